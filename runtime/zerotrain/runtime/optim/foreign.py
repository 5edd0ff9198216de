"""Element-wise torch optimizers of any kind on the shards (`zero_allow_untested_optimizer`).

The optimizer that the user gave is copied without its parameters and runs on views of the flat fp32 shards,
one view per stretch of a parameter group. Its per-element states are moved into flat streams like those of
the built-in rules, so they are sharded, counted and in checkpoints. Its other values (step counts and the
like) are numbers that are equal on every rank, and go into the checkpoint's scalars. Made by
`user_optimizer.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from zerotrain.contract.config import ConfigError
from zerotrain.runtime.optim.joint import JointUnit
from zerotrain.runtime.optim.saved_values import from_plain, to_plain
from zerotrain.runtime.optim.torch_face import HANDED_OVER

WHOLE_TENSOR = {
    "LBFGS": "it evaluates the loss several times per step",
    "Muon": "it orthogonalises whole matrices (the engine's own does; optimizer.type names it)",
    "Adafactor": "it keeps sums over the rows and columns of whole matrices",
    "SparseAdam": "it wants sparse gradients",
}
"""Optimizers of torch that cannot run on parts of parameters, with the reason."""

_PROBE_STEPS = 3
_CUT = 7


class ForeignRule:
    """A `JointRule` around a torch optimizer."""

    def __init__(self, prototype: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> None:
        """Take the engine's `groups`, in the prototype's order; their options are read at every step.

        Raises ConfigError when the optimizer cannot run on parts of parameters.
        """
        self._prototype = prototype
        self._groups = groups
        self._options = [[key for key in group if key != "params"] for group in prototype.param_groups]
        state = _check_elementwise(prototype)
        self.kinds = tuple(sorted(name for name, value in state.items() if _is_per_element(value)))
        self._counts = {name: value for name, value in state.items() if name not in self.kinds}
        """Values that the optimizer keeps per parameter beside the streams, as examples of their types."""
        self._inner: torch.optim.Optimizer | None = None
        self._views: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._anchors: list[nn.Parameter] = []
        """One element per group on every rank, with a zero gradient, so that every rank has all counts."""
        self._loaded: list[dict[str, Any]] | None = None

    def update_units(self, units: Sequence[JointUnit], step: int, *, grad_scale: float) -> None:
        """Update the units as `JointRule`. No communication: each rank works on its own shards."""
        if self._inner is None:
            self._start(units)
        assert self._inner is not None
        for parameter, (unit, _, start, stop) in zip(self._views, self._stretches(units), strict=True):
            grad = unit.grads[start:stop]
            parameter.grad = grad.mul_(grad_scale) if grad_scale != 1.0 else grad
        for mine, group, options in zip(self._inner.param_groups, self._groups, self._options, strict=True):
            mine.update({key: group[key] for key in options})
        self._inner.step()
        for mine, group, options in zip(self._inner.param_groups, self._groups, self._options, strict=True):
            group.update({key: mine[key] for key in options})
        self._keep_states_flat()

    def scalars(self) -> dict[str, Any]:
        """Return the values kept beside the streams, by group: JSON values, equal on every rank."""
        if self._inner is None:
            return {"counts": self._loaded}
        counts = [
            {name: self._inner.state[anchor][name] for name in self._counts} for anchor in self._anchors
        ]
        return {"counts": to_plain(counts, type(self._inner).__name__)}

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Restore the values of `scalars`; the streams are overwritten by the checkpoint itself."""
        self._loaded = scalars["counts"]
        self._inner = None

    def _start(self, units: Sequence[JointUnit]) -> None:
        """Put the optimizer onto the shards, with the states of a checkpoint if one was loaded."""
        device = units[0].states.master.device
        self._anchors = [nn.Parameter(torch.zeros(1, device=device)) for _ in self._groups]
        for anchor in self._anchors:
            anchor.grad = torch.zeros_like(anchor)
        members: list[list[nn.Parameter]] = [[anchor] for anchor in self._anchors]
        self._views.clear()
        for unit, group, start, stop in self._stretches(units):
            parameter = nn.Parameter(unit.states.master[start:stop])
            self._views[parameter] = {kind: unit.states.by_kind[kind][start:stop] for kind in self.kinds}
            members[group].append(parameter)
        self._inner = _copy_without_state(self._prototype, members)
        self._inner.state = _States(self._views)
        if self._loaded is None:
            return
        for group, parameters in enumerate(members):
            for parameter in parameters:
                views = self._views.get(parameter)
                streams = views or {kind: torch.zeros(1, device=device) for kind in self.kinds}
                counts = from_plain(self._loaded[group], self._counts)
                self._inner.state[parameter].update({**counts, **streams})

    def _stretches(self, units: Sequence[JointUnit]) -> Iterable[tuple[JointUnit, int, int, int]]:
        """Yield `(unit, group, start, stop)` of the maximal runs of one parameter group that this rank holds,
        in layout order."""
        for unit in units:
            owned = (segment for segment in unit.segments if segment.start < segment.stop)
            for group, run in groupby(owned, key=attrgetter("group")):
                segments = list(run)
                yield unit, group, segments[0].start, segments[-1].stop

    def _keep_states_flat(self) -> None:
        """Move states into the streams that the optimizer did not store through `_StateOfOne`."""
        assert self._inner is not None
        for parameter, views in self._views.items():
            parameter.grad = None
            state = self._inner.state[parameter]
            for kind, view in views.items():
                if state[kind].data_ptr() != view.data_ptr():
                    view.copy_(state[kind])
                    state[kind] = view


class _StateOfOne(dict[str, Any]):
    """The state that an optimizer keeps for one parameter. A tensor stored in it moves into its stream at
    once, so that the states of all parameters never exist twice."""

    def __init__(self, views: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._views = views

    def __setitem__(self, name: str, value: Any) -> None:
        view = self._views.get(name)
        if view is not None and _is_like(value, view) and value.data_ptr() != view.data_ptr():
            view.copy_(value)
            value.set_(view)  # the optimizer may also hold the tensor by another name
        super().__setitem__(name, value)


class _States(defaultdict[torch.Tensor, Any]):
    """An optimizer's `state` that fills the streams in `views`, by parameter and kind."""

    def __init__(self, views: Mapping[torch.Tensor, Mapping[str, torch.Tensor]]) -> None:
        super().__init__(dict)
        self._views = views

    def __missing__(self, parameter: torch.Tensor) -> dict[str, Any]:
        made = self[parameter] = _StateOfOne(self._views.get(parameter, {}))
        return made


def _is_like(value: Any, view: torch.Tensor) -> bool:
    """Return whether the tensor can replace the other one."""
    return (
        isinstance(value, torch.Tensor)
        and (value.shape, value.dtype, value.device) == (view.shape, view.dtype, view.device)
        and not value.requires_grad
    )


def refuse_whole_tensor(prototype: torch.optim.Optimizer) -> None:
    """Raise ConfigError for the optimizers of torch that need whole parameters."""
    for base in type(prototype).__mro__:
        reason = WHOLE_TENSOR.get(base.__name__)
        if reason is not None:
            raise _not_elementwise(prototype, reason)


def _not_elementwise(prototype: torch.optim.Optimizer, reason: str) -> ConfigError:
    return ConfigError(
        "optimizer",
        f"must work element by element, since a rank holds parts of parameters; {reason}",
        type(prototype).__name__,
        "Use AdamW or another element-wise optimizer.",
    )


def _check_elementwise(prototype: torch.optim.Optimizer) -> dict[str, Any]:
    """Run the optimizer on a small matrix and on the same elements cut in two; return the state that it made
    for a parameter. Raises ConfigError where the results differ or the state does not fit."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4, 6, generator=generator)
    whole = [nn.Parameter(start.clone())]
    parts = [nn.Parameter(start.flatten()[:_CUT].clone()), nn.Parameter(start.flatten()[_CUT:].clone())]
    others: list[list[nn.Parameter]] = [[] for _ in prototype.param_groups[1:]]
    try:
        left = _copy_without_state(prototype, [whole, *others])
        right = _copy_without_state(prototype, [parts, *others])
        for _ in range(_PROBE_STEPS):
            grad = torch.randn(4, 6, generator=generator)
            whole[0].grad = grad
            parts[0].grad, parts[1].grad = grad.flatten()[:_CUT].clone(), grad.flatten()[_CUT:].clone()
            left.step()
            right.step()
    except Exception as error:
        raise _not_elementwise(prototype, f"on parts of a matrix it fails: {error}") from error
    after = torch.cat([part.detach() for part in parts])
    if not torch.allclose(whole[0].detach().flatten(), after, rtol=1e-5, atol=1e-7):
        raise _not_elementwise(prototype, "its result changes when a parameter is cut in two")
    state = dict(right.state[parts[1]])
    unsupported = sorted(name for name, value in state.items() if not _fits(value))
    if unsupported:
        raise _not_elementwise(
            prototype, f"its state {unsupported[0]!r} is neither fp32 per element nor a number"
        )
    return state


def _is_per_element(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == 24 - _CUT


def _fits(value: Any) -> bool:
    if _is_per_element(value):
        return bool(value.dtype is torch.float32)
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return value is None or isinstance(value, (bool, int, float, str))


def _copy_without_state(
    prototype: torch.optim.Optimizer, members: Sequence[Sequence[nn.Parameter]]
) -> torch.optim.Optimizer:
    """Return the same optimizer with the same options over other parameters, as if it had never stepped."""
    made: torch.optim.Optimizer = object.__new__(type(prototype))  # copy.copy would lose attributes
    made.__dict__.update(prototype.__dict__)
    for name in ("step", *HANDED_OVER):  # bound to the original: a schedule's counter, methods of the engine
        made.__dict__.pop(name, None)
    made.state = defaultdict(dict)
    made.param_groups = [
        {**group, "params": list(parameters)}
        for group, parameters in zip(prototype.param_groups, members, strict=True)
    ]
    return made

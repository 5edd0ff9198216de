"""The engine's optimizers as `torch.optim.Optimizer`s, so that torch's schedules and scalers, Lightning and
Accelerate accept them.

The base class brings hooks, `defaults` and `param_groups`. Whatever torch does with states or with a step of
its own is implemented here, or raises an error that names what to call.
docs/adr/0050-gradients-of-others-code.md.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.optim import optimizer as torch_optimizer

from zerotrain.runtime.optim.groups import GroupError
from zerotrain.runtime.zero.clipping import clip_grad_norm_

SCALARS = "zerotrain"
"""Key of a state dict beside torch's `state` and `param_groups`."""


def _refuse_states(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        "optimizer.state holds nothing, as optimizer states are divided among the ranks, so a change of it "
        "has no effect; set a state, or reset it with zeros, by "
        "zerotrain.runtime.set_full_optimizer_state(parameter, kind, value), on every rank"
    )


class ShardedStates(defaultdict[torch.Tensor, Any]):
    """The empty `optimizer.state`: states are divided among the ranks. Looking one up raises KeyError, and
    changing it RuntimeError."""

    __setitem__ = __delitem__ = __ior__ = _refuse_states
    clear = pop = popitem = setdefault = update = _refuse_states

    def __missing__(self, key: Any) -> NoReturn:
        raise KeyError(
            "optimizer.state holds nothing, as optimizer states are divided among the ranks; read one with "
            "zerotrain.runtime.get_full_optimizer_state(parameter, kind), on every rank, or this rank's part "
            "with get_local_optimizer_state"
        )


class TorchOptimizer(torch.optim.Optimizer, ABC):
    """The optimizer that `initialize` and `shard` return.

    Attributes:
        param_groups: the very dicts that the engine reads at every step.
        num_updates: number of steps that changed the weights.
        followers: optimizers over the same groups, this one first; a schedule over any of them sees that a
            step was taken.
        face: the optimizer that is passed to hooks.
    """

    num_updates: int
    _is_made = False

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        """Take the `groups` as they are, also those of frozen parameters."""
        super().__init__(groups, defaults)
        self._is_made = True
        self.state = ShardedStates()
        self._groups = self.param_groups
        self.followers: list[torch.optim.Optimizer] = [self]
        self.face: torch.optim.Optimizer = self

    @property  # type: ignore[override]  # torch's is an attribute
    def state(self) -> ShardedStates:
        """The empty states."""
        states: ShardedStates = self._state
        return states

    @state.setter
    def state(self, states: Any) -> None:
        if self._is_made and not isinstance(states, ShardedStates):
            _refuse_states()
        self._state = states

    def check_param_groups(self) -> None:
        """Raise GroupError where `param_groups` of an optimizer is another list than the engine reads."""
        if any(each.param_groups is not self._groups for each in self.followers):
            raise GroupError(
                "optimizer.param_groups was replaced by another list, whose values the engine does not read; "
                "set values in its dicts, and add groups with add_param_group"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters that are frozen so far; they are trained from the step on that follows
        their `requires_grad_()`. Call it before `load_checkpoint`, too.

        Raises GroupError for parameters that have a group, and for an optimizer whose groups are fixed.
        """
        if self._is_made:
            self.append_group(param_group)
        else:
            self.param_groups.append(param_group)

    @abstractmethod
    def append_group(self, group: Mapping[str, Any]) -> None:
        """Add a group, as `add_param_group`."""

    @abstractmethod
    def scalars(self) -> dict[str, Any]:
        """Return the state beside the tensors, as JSON values."""

    @abstractmethod
    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Restore the state of `scalars`."""

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Scale the gradients of this step so that their norm over all parameters and ranks is at most
        `max_norm`, and return the norm that they had. Collective; between `backward` and `step`.

        The arguments are those of `torch.nn.utils.clip_grad_norm_`; `foreach` changes nothing. Raises
        RuntimeError for a norm that is not finite, if asked to, and in forward and backward.
        """
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        return clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's form, of plain values: groups and counts. `state` is empty, as moments are divided
        among the ranks: `engine.save_checkpoint` saves them."""
        return {**super().state_dict(), SCALARS: self.scalars()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy the groups' values of `state_dict` into the present dicts.

        Raises RuntimeError where moments would have to be restored as well: load a checkpoint of the engine
        first. Raises ValueError for other groups.
        """
        state = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state)
            state = state if changed is None else changed
        groups: list[dict[str, Any]] = state["param_groups"]
        _check_loadable(self, state, groups)
        if SCALARS in state:
            self.load_scalars(state[SCALARS])
        for mine, saved in zip(self.param_groups, groups, strict=True):
            mine.update({key: copy.deepcopy(value) for key, value in saved.items() if key != "params"})
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "an engine drives this optimizer, so it cannot be copied or pickled; engine.save_checkpoint "
            "saves its states, on every rank, and state_dict() gives its groups"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCalls:
    """Functions of the engine that its optimizer calls; the defaults hold until there is an engine."""

    drop_gradients: Callable[[], None] = lambda: None
    """The implementation of `zero_grad`."""
    backward: Callable[..., Any] = lambda *_, **__: None
    loss_scale: Callable[[], float] = lambda: 1.0
    settle: Callable[[], None] = lambda: None
    """Makes the host know what became of the last step."""
    was_skipped: Callable[[], bool] = lambda: False
    """Whether the last step changed nothing, because the gradient was not finite."""


class ScaleNames:
    """DeepSpeed's names on the engine's optimizer, for losses and the outcome of the last step."""

    calls: EngineCalls = EngineCalls()
    """Set by the engine, which is made after its optimizer."""

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Accumulate the gradients of a scalar loss, which is not divided by the accumulation steps.

        Errors are those of `engine.backward`.
        """
        self.calls.backward(loss, retain_graph=retain_graph)

    @property
    def loss_scale(self) -> float:
        """Present factor on the loss; 1 unless fp16 computes."""
        return self.calls.loss_scale()

    cur_scale = loss_scale
    """Present factor on the loss, by another name."""

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because the gradient was not finite."""
        return self.calls.was_skipped()

    if not TYPE_CHECKING:  # a type checker would accept every attribute

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError: DeepSpeed's optimizer wraps another one, and has flat buffers."""
            raise AttributeError(
                f"the engine's optimizer has no {name!r}, and no other optimizer within it: its param_groups "
                "are those that the engine reads, and zerotrain.runtime.get_full_optimizer_state reads "
                "states. docs/deepspeed.md lists its names"
            )


def _check_loadable(
    optimizer: TorchOptimizer, state: Mapping[str, Any], groups: list[dict[str, Any]]
) -> None:
    """Raise the errors of `load_state_dict`."""
    sizes = [len(group["params"]) for group in groups]
    mine = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != mine:
        raise ValueError(
            f"the state dict has parameter groups of {sizes} parameters, this optimizer of {mine}; pass "
            "the same model_parameters"
        )
    updates = int(state[SCALARS]["num_updates"]) if SCALARS in state else 0
    if state["state"] or updates != optimizer.num_updates:
        raise RuntimeError(
            f"load_state_dict cannot restore optimizer states ({updates} updates there, "
            f"{optimizer.num_updates} here): they are divided among the ranks. Save and load them with "
            "engine.save_checkpoint and engine.load_checkpoint, or set those of a plain torch optimizer "
            "with zerotrain.runtime.set_full_optimizer_state(parameter, kind, value) on every rank"
        )


def before_step(optimizer: TorchOptimizer) -> None:
    """Run the hooks of `register_step_pre_hook`; the engine calls it before each update."""
    hooks = torch_optimizer._global_optimizer_pre_hooks, optimizer._optimizer_step_pre_hooks
    for hook in chain(*(list(each.values()) for each in hooks)):
        hook(optimizer.face, (), {})


def after_step(optimizer: TorchOptimizer) -> None:
    """Run the hooks of `register_step_post_hook`, and mark the step as taken for schedules."""
    for each in optimizer.followers:
        each._opt_called = True  # type: ignore[attr-defined]  # torch.optim.lr_scheduler's own mark
    hooks = optimizer._optimizer_step_post_hooks, torch_optimizer._global_optimizer_post_hooks
    for hook in chain(*(list(each.values()) for each in hooks)):
        hook(optimizer.face, (), {})


def share_step_hooks(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    """Share the hooks of two optimizers, so that hooks registered on either run with the engine's steps."""
    one._optimizer_step_pre_hooks = other._optimizer_step_pre_hooks
    one._optimizer_step_post_hooks = other._optimizer_step_post_hooks


def hand_over(given: torch.optim.Optimizer, made: TorchOptimizer) -> None:
    """Make an optimizer that was passed to `initialize` another name of the engine's: groups, states (none)
    and methods are the same."""
    if len(given.param_groups) == len(made.param_groups):
        # The very dicts of the script's optimizer: another optimizer may have been made of its groups, whose
        # schedule writes rates into them (Accelerate makes one where states are offloaded).
        for index, (theirs, mine) in enumerate(zip(given.param_groups, made.param_groups, strict=True)):
            values = dict(mine)
            theirs.clear()
            theirs.update(values)
            made.param_groups[index] = theirs
    given.param_groups, given.state = made.param_groups, made.state
    made.followers.append(given)
    given.step = refuse_step  # type: ignore[method-assign]
    for name in HANDED_OVER:
        setattr(given, name, getattr(made, name))


HANDED_OVER = ("state_dict", "load_state_dict", "add_param_group")
"""Methods of an optimizer passed to `initialize` that are the engine's afterwards, besides `step`."""


def refuse_step(*_: Any, **__: Any) -> NoReturn:
    """Raise RuntimeError, as `step()` of an optimizer passed to `initialize`: the engine owns the weights."""
    raise RuntimeError(
        "call engine.step() instead of optimizer.step(): it reduces, clips and updates; an optimizer that "
        "was passed to initialize() updates nothing by itself any more"
    )


refuse_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedules warn of a replaced step()

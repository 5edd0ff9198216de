"""Parameter groups: the learning rate and weight decay of each element of a flat shard."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerotrain.contract.config import OptimizerConfig
from zerotrain.runtime.zero.layout import UnitLayout
from zerotrain.runtime.zero.names import named_parameters

GROUP_KEYS = ("lr", "weight_decay", "betas", "eps", "momentum")

Divide = Callable[[Mapping[str, Any], int], list[dict[str, Any]]]
"""Makes groups of one; the number is its position."""

ModelParameters = Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]] | Iterable[Mapping[str, Any]]

PARAM_NAMES = "param_names"
"""Key of a group under which torch keeps the names of (name, parameter) pairs."""

FIXED_OPTIONS = (
    "amsgrad",
    "maximize",
    "nesterov",
    "dampening",
    "decoupled_weight_decay",
    "differentiable",
    "use_muon",
)
"""Options of torch's groups that the engine's own updates take at `initialize` only."""

LABELS = ("name", PARAM_NAMES)
"""Keys of a group that belong to the script and change nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hyper:
    """Hyperparameters that may differ between parameter groups and steps, by value."""

    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    momentum: float
    use_muon: bool = False
    """Whether Muon updates the matrices of the group."""


class GroupError(ValueError):
    """Error of parameter groups that do not cover the model's trainable parameters exactly once."""


def build_groups(
    model: nn.Module,
    config: OptimizerConfig,
    model_parameters: ModelParameters | None,
    *,
    is_foreign: bool = False,
    divide: Divide | None = None,
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return `(param_groups, group index by fqn)`. `model_parameters` is what a torch optimizer would be
    given, or None; `is_foreign` groups are those of a torch optimizer, which has options of its own. `divide`
    makes several groups of one.

    Raises GroupError for a trainable parameter in no group or in two, and for options that are not per group.
    """
    given = listed(model_parameters)
    if given is None:
        # A parameter that is unfrozen later joins the first group; where groups differ in kind, its own.
        given = [{"params": [p for p in model.parameters() if p.requires_grad or divide is not None]}]
    elif not isinstance(given[0], Mapping):
        given = [{"params": given}]
    names = names_of(model)
    groups: list[dict[str, Any]] = []
    index_of: dict[str, int] = {}
    for group in given:
        assert isinstance(group, Mapping)  # the lines above made it so
        for part in [group] if divide is None else divide(group, len(groups)):
            append_group(groups, index_of, part, names=names, config=config, is_foreign=is_foreign)
    trained = {fqn for fqn, parameter in named_parameters(model) if parameter.requires_grad}
    missing = sorted(trained - index_of.keys())
    if missing:
        raise GroupError(
            f"model_parameters leaves out trainable parameters {missing[:5]}; add them, or set requires_grad "
            "to False"
        )
    return groups, index_of


def listed(
    model_parameters: ModelParameters | None,
) -> list[Any] | None:
    """Return `model_parameters` as a list, None for all trainable parameters. Raises GroupError where it is
    empty or holds no parameters at all."""
    if model_parameters is None:
        return None
    given = list(model_parameters)
    if not given:
        raise GroupError(
            "model_parameters is empty (a generator that was read before?); pass a list, or None for all "
            "trainable parameters"
        )
    wrong = [each for each in given if not (isinstance(each, (torch.Tensor, Mapping)) or _is_named(each))]
    if wrong:
        raise GroupError(
            "model_parameters must hold parameters, (name, parameter) pairs or groups of them; got "
            f"{type(model_parameters).__name__} of {type(wrong[0]).__name__}; pass model.parameters()"
        )
    return [_checked(each, index) if isinstance(each, Mapping) else each for index, each in enumerate(given)]


def _is_named(each: object) -> bool:
    """Return whether this is a pair as `named_parameters` yields it."""
    return (
        isinstance(each, tuple)
        and len(each) == 2
        and isinstance(each[0], str)
        and isinstance(each[1], torch.Tensor)
    )


def names_of(model: nn.Module) -> dict[int, str]:
    """Return the names of the parameters by their ids."""
    return {id(parameter): fqn for fqn, parameter in named_parameters(model)}


def append_group(
    groups: list[dict[str, Any]],
    index_of: dict[str, int],
    group: Mapping[str, Any],
    *,
    names: Mapping[int, str],
    config: OptimizerConfig,
    is_foreign: bool = False,
) -> None:
    """Complete a group by the configuration's values and add it. Raises GroupError as `build_groups`."""
    index = len(groups)
    params, labels = members(group, index)
    if not is_foreign:
        _check_options(group, index, config)
    for parameter in params:
        _assign(parameter, index, names, index_of)
    defaults = {key: getattr(config, key) for key in GROUP_KEYS}
    groups.append(
        {**defaults, **{k: v for k, v in group.items() if k != "params"}, "params": params, **labels}
    )


def _checked(group: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return the group with its parameters in lists, for torch's optimizers too."""
    params, labels = members(group, index)
    return {**group, **labels, "params": params}


def members(group: Mapping[str, Any], index: int) -> tuple[list[nn.Parameter], dict[str, list[str]]]:
    """Return the parameters of a group and, where they are given as pairs, torch's `param_names` of it."""
    if "params" not in group:
        raise GroupError(f"parameter group {index} must have params; got {sorted(group)}; add its parameters")
    given = group["params"]
    params: list[Any] = [given] if isinstance(given, torch.Tensor) else list(given)
    named = [each for each in params if _is_named(each)]
    wrong = [each for each in params if not (isinstance(each, torch.Tensor) or _is_named(each))]
    if wrong or (named and len(named) < len(params)):
        raise GroupError(
            f"params of parameter group {index} must hold parameters, or only (name, parameter) pairs; got "
            f"{sorted({type(each).__name__ for each in params})}; pass for example model.parameters()"
        )
    if not named:
        return params, {}
    return [parameter for _, parameter in named], {PARAM_NAMES: [name for name, _ in named]}


def _check_options(group: Mapping[str, Any], index: int, config: OptimizerConfig) -> None:
    known = [*GROUP_KEYS, "use_muon"] if config.type == "Muon" else [*GROUP_KEYS]
    unknown = sorted(set(group) - {*known, *LABELS, "params"})
    if unknown:
        raise GroupError(f"parameter group {index} sets {unknown}; a group can set {known} and name")


def _assign(parameter: nn.Parameter, index: int, names: Mapping[int, str], index_of: dict[str, int]) -> None:
    if id(parameter) not in names:
        if not parameter.requires_grad:
            return
        raise GroupError(f"parameter group {index} holds a parameter that is not part of the model")
    fqn = names[id(parameter)]
    if index_of.setdefault(fqn, index) != index:
        raise GroupError(f"parameter {fqn!r} is in groups {index_of[fqn]} and {index}; keep one")


def fixed_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the group's options that must stay as they are; absent and switched off are the same."""
    return {key: value for key in FIXED_OPTIONS if (value := group.get(key))}


def check_members(groups: Sequence[Mapping[str, Any]], members: Sequence[Sequence[nn.Parameter]]) -> None:
    """Raise GroupError where groups were removed or added in place, or parameters moved between them."""
    if len(groups) != len(members):
        raise GroupError(
            f"param_groups must hold the {len(members)} groups of initialize and add_param_group; got "
            f"{len(groups)}: edit the values of groups, or set requires_grad to False to stop training some"
        )
    for index, (group, before) in enumerate(zip(groups, members, strict=True)):
        now = group["params"]
        if len(now) != len(before) or not all(map(operator.is_, now, before)):
            raise GroupError(
                f"param_groups[{index}]['params'] must hold the {len(before)} parameters that it was made "
                "with, in their order, as their states are kept by group; add others in a group of their own "
                "with add_param_group, and set requires_grad to False to stop training some"
            )


def check_edits(groups: Sequence[Mapping[str, Any]], fixed: Sequence[Mapping[str, Any]]) -> None:
    """Raise GroupError where an edited option of a group has no effect."""
    for index, (group, before) in enumerate(zip(groups, fixed, strict=True)):
        now = fixed_options(group)
        changed = [key for key in FIXED_OPTIONS if now.get(key) != before.get(key)]
        if changed:
            raise GroupError(
                f"param_groups[{index}][{changed[0]!r}] must stay {before.get(changed[0], False)!r} after "
                f"initialize; got {group.get(changed[0])!r}, which has no effect: set it in the optimizer "
                "that is passed to initialize"
            )


def group_hyper(group: Mapping[str, Any]) -> Hyper:
    """Return the group's present values, as a copy. Raises GroupError for values that are no numbers."""
    try:
        beta1, beta2 = group["betas"]
        return Hyper(
            lr=float(group["lr"]),
            weight_decay=float(group["weight_decay"]),
            betas=(float(beta1), float(beta2)),
            eps=float(group["eps"]),
            momentum=float(group["momentum"]),
            use_muon=bool(group.get("use_muon")),
        )
    except (TypeError, ValueError, KeyError) as error:
        now = {key: group.get(key, "nothing") for key in GROUP_KEYS}
        raise GroupError(
            f"a parameter group must hold numbers, and two of them in betas; got {now}"
        ) from error


def group_runs(
    unit: UnitLayout, interval: tuple[int, int], key_of: Mapping[str, tuple[int, int]]
) -> Sequence[tuple[int, int, tuple[int, int]]]:
    """Return `(start, stop, key)` runs of parameters with equal keys that cover an interval of a unit,
    relative to the interval's start.

    Gaps and padding belong to the run of the parameter before them: they are zeros and stay zeros under every
    rule.
    """
    low, high = interval
    runs: list[tuple[int, int, tuple[int, int]]] = []
    for position, segment in enumerate(unit.segments):
        is_last = position + 1 == len(unit.segments)
        following = unit.padded_numel if is_last else unit.segments[position + 1].start
        start, stop, key = max(low, segment.start), min(high, following), key_of[segment.fqn]
        if start >= stop:
            continue
        if runs and runs[-1][2] == key:
            runs[-1] = (runs[-1][0], stop - low, key)
        else:
            runs.append((start - low, stop - low, key))
    return runs

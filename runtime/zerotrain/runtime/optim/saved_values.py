"""The values of optimizers and schedules in a checkpoint, beside tensors: JSON values, as no checkpoint needs
pickle, and parameter groups, which are matched with the present ones by their parameters.

A script that lists its groups in another order, or the same parameters under another label, goes on with
every parameter's own options; a script that divides the parameters in another way is rejected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

PAIRS = "__pairs__"
"""Key of an object that stands for a mapping whose keys are not texts."""

_PER_GROUP = frozenset(
    {
        "base_lrs",
        "_last_lr",
        "lr_lambdas",
        "max_lrs",
        "min_lrs",
        "base_momentums",
        "max_momentums",
        "counts",
    }
)
"""Names of lists with one value per group in the states of torch's schedules and of `ForeignRule`."""


def to_plain(value: Any, path: str) -> Any:
    """Return the value in JSON types. Raises ValueError with the path of a value that has none."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        return [to_plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: to_plain(item, f"{path}.{key}") for key, item in value.items()}
        return {PAIRS: [[key, to_plain(item, f"{path}[{key!r}]")] for key, item in value.items()]}
    raise ValueError(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold; "
        "keep numbers, texts, lists and mappings in the state"
    )


def from_plain(value: Any, like: Any) -> Any:
    """Convert a value of `to_plain` back; `like` is a value of the same shape that shows the types."""
    if isinstance(value, dict) and PAIRS in value:
        pairs = dict(value[PAIRS])
        return Counter(pairs) if isinstance(like, Counter) else pairs
    if isinstance(value, dict):
        known = like if isinstance(like, dict) else {}
        return {key: from_plain(item, known.get(key)) for key, item in value.items()}
    if isinstance(value, list):
        alike = isinstance(like, (list, tuple)) and len(like) == len(value)
        items = [from_plain(item, like[index] if alike else None) for index, item in enumerate(value)]
        return tuple(items) if isinstance(like, tuple) else items
    if isinstance(like, torch.Tensor):
        return torch.full_like(like, value)
    return value


def members_of(group_of: Mapping[str, int], num_groups: int) -> list[list[str]]:
    """Return the names of the parameters of every group."""
    members: list[list[str]] = [[] for _ in range(num_groups)]
    for fqn, index in group_of.items():
        members[index].append(fqn)
    return members


def match_groups(
    stored: Sequence[Sequence[str]] | None, num_stored: int, group_of: Mapping[str, int], num_groups: int
) -> list[int]:
    """Return, for every present group, the index of the stored one with the same members.

    Parameters that only one side has do not count: they are frozen on the other. Groups without a common
    member are matched in their order; so are all groups of a checkpoint that holds no members (`stored`
    None). Raises ValueError where the numbers of groups differ, or the members do, with names.
    """
    if num_stored != num_groups:
        raise ValueError(
            f"the checkpoint has {num_stored} parameter groups, this optimizer {num_groups}; pass the same "
            "model_parameters, and call add_param_group before the load for groups that were added later"
        )
    if stored is None:
        return list(range(num_groups))
    of_stored: dict[int, tuple[int, str]] = {}
    of_mine: dict[int, tuple[int, str]] = {}
    for index, members in enumerate(stored):
        for fqn in members:
            if (mine := group_of.get(fqn)) is None:
                continue
            known, first = of_stored.setdefault(index, (mine, fqn))
            if known != mine:
                raise _divided(fqn, first, "were in one parameter group", "are in different ones now")
            known, first = of_mine.setdefault(mine, (index, fqn))
            if known != index:
                raise _divided(fqn, first, "were in different parameter groups", "are in one now")
    left = (index for index in range(num_stored) if index not in of_stored)
    return [of_mine[mine][0] if mine in of_mine else next(left) for mine in range(num_groups)]


def match_stored(scalars: Mapping[str, Any], group_of: Mapping[str, int], num_groups: int) -> list[int]:
    """Match the groups of an optimizer's scalars in a checkpoint, as `match_groups`."""
    return match_groups(scalars.get("members"), len(scalars["groups"]), group_of, num_groups)


def regrouped(state: Any, order: Sequence[int]) -> Any:
    """Return the state of a schedule or a rule with its values per group in the present groups' order."""
    if isinstance(state, Mapping):
        return {
            key: [value[index] for index in order]
            if key in _PER_GROUP and isinstance(value, (list, tuple)) and len(value) == len(order)
            else regrouped(value, order)
            for key, value in state.items()
        }
    if isinstance(state, list):
        return [regrouped(item, order) for item in state]
    return state


def _divided(fqn: str, other: str, before: str, now: str) -> ValueError:
    return ValueError(
        f"parameters {other!r} and {fqn!r} {before} when the checkpoint was written and {now}; pass groups "
        "of the same members in model_parameters (in any order), or load with load_optimizer_states=False"
    )

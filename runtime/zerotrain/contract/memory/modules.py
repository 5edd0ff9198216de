"""Units of a model from its modules, by the engine's own rule, for models that are not built yet.

`gpt_units` and the planner's shapes call it. The engine partitions real modules (`runtime/zero/plan.py`);
tests compare the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from .inputs import padded_numel
from .sizes import UnitSize

SMALL_UNIT = "(small)"
"""Name of the unit of parameters that stay whole at stage 3."""

ROOT_UNIT = "(root)"

SEGMENT_ALIGN_NUMEL = 8
"""Elements of whose number the start of a parameter within its unit is a multiple."""

MIN_UNIT_NUMEL = 1024
"""Number of elements below which a module is not a unit of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleSize:
    """A transformer block with all its content, or another module with parameters of its own."""

    name: str
    """Name within the model."""

    parameters: tuple[int, ...]
    """Elements of each parameter, in the model's order."""

    is_tied: bool = False
    """Whether its weight is also that of another module, so that the model itself must keep it."""


def arrange_units(
    modules: Sequence[ModuleSize],
    *,
    world_size: int,
    min_unit_numel: int = MIN_UNIT_NUMEL,
    small: tuple[int, int] = (0, 0),
) -> tuple[UnitSize, ...]:
    """Return the units of these modules, in the engine's order: those of the model itself first.

    `small`: parameters up to the first number of elements, in total up to the second, form a unit of their
    own (`small_parameters` of a configuration).
    """
    (largest, budget), members = small, dict[tuple[str, bool], list[int]]()
    splits: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}
    for module, home in zip(modules, _homes(modules, min_unit_numel), strict=True):
        sizes = module.parameters
        if sizes not in splits:
            splits[sizes] = _within(sizes, largest, largest * len(sizes))
        little, rest = splits[sizes]
        if budget - sum(little) < largest:
            little, rest = _within(sizes, largest, budget)
        budget -= sum(little)
        parts = [((SMALL_UNIT, True), little), (home, rest)]
        if little and little[0] != sizes[0]:
            parts.reverse()
        for key, part in parts:
            if part:
                members.setdefault(key, []).extend(part)
    of_model_first = sorted(members.items(), key=lambda item: not item[0][1])
    numel_of = cache(_numel)  # the layers of a model are alike
    return tuple(
        _unit(name, numel_of(tuple(sizes)), world_size, whole_pass=whole_pass)
        for (name, whole_pass), sizes in of_model_first
    )


def _within(sizes: Sequence[int], largest: int, budget: int) -> tuple[list[int], list[int]]:
    """Return the sizes that stay whole while the budget lasts, and the others."""
    little: list[int] = []
    rest: list[int] = []
    for numel in sizes:
        stays = largest > 0 and numel <= min(largest, budget)
        budget -= numel if stays else 0
        (little if stays else rest).append(numel)
    return little, rest


def _homes(modules: Sequence[ModuleSize], min_unit_numel: int) -> Iterable[tuple[str, bool]]:
    """Yield (unit, whether it belongs to the model itself) of each module."""
    for module in modules:
        if sum(module.parameters) < min_unit_numel:
            yield ROOT_UNIT, True
        else:
            yield module.name, module.is_tied


def _numel(parameters: tuple[int, ...]) -> int:
    """Return the elements of a unit with these parameters."""
    found = 0
    for parameter in parameters:
        found = -(-found // SEGMENT_ALIGN_NUMEL) * SEGMENT_ALIGN_NUMEL + parameter
    return found


def _unit(name: str, numel: int, world_size: int, *, whole_pass: bool) -> UnitSize:
    return UnitSize(
        name=name,
        numel=numel,
        padded_numel=padded_numel(max(numel, 1), world_size),
        whole_pass=whole_pass,
        stays_whole=name == SMALL_UNIT,
    )

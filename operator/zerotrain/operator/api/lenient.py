"""Lenient reading of JSON that another version of the operator wrote: what fits a model is kept.

The client reads every status so: a job that the cluster shows must not be lost for one field of it. So does
the operator where it can do without the field.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from typing import Any, Self, TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError

Path: TypeAlias = tuple[int | str, ...]
Model = TypeVar("Model", bound=BaseModel)

_is_lenient: ContextVar[bool] = ContextVar("is_lenient", default=False)


class OpenEnum(StrEnum):
    """Enum to which a newer version may add values: a lenient reading keeps an unknown text as a value of its
    own."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not _is_lenient.get() or not isinstance(value, str):
            return None
        unknown = str.__new__(cls, value)
        unknown._name_ = unknown._value_ = value
        return unknown


def read_leniently(model: type[Model], value: object) -> Model:
    """Return the model of `value` without what does not fit: a field of a wrong type reads as one that is
    absent, an item of a list that lacks a required field is left out, a list that is too long is cut. All
    fields of `model` itself must have defaults. `value` is not changed."""
    while True:
        try:
            with _unknown_values_kept():
                return model.model_validate(value)
        except ValidationError as error:
            value = _mended(value, error)


def read_but_for_unfit(
    model: type[Model], value: object, *, needed: Collection[str]
) -> tuple[Model, tuple[str, ...]]:
    """Return the model of `value` without what does not fit, and one text per place that was left out.
    Unknown values of an enum do not fit. Raises ValidationError if such a place is in one of the fields
    `needed` (by alias), or is `value` itself."""
    unfit: list[str] = []
    while True:
        try:
            return model.model_validate(value), tuple(unfit)
        except ValidationError as error:
            found = error.errors(include_url=False, include_input=False)
            if any(not item["loc"] or item["loc"][0] in needed for item in found):
                raise
            unfit += [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in found]
            value = _mended(value, error)


@contextmanager
def _unknown_values_kept() -> Iterator[None]:
    token = _is_lenient.set(True)
    try:
        yield
    finally:
        _is_lenient.reset(token)


def _mended(value: object, error: ValidationError) -> object:
    """Return `value` without the places of the errors. Each call removes something, so calls come to an
    end."""
    unfit: list[Path] = []
    for item in error.errors(include_url=False, include_input=False):
        limit = item.get("ctx", {}).get("max_length") if item["type"] == "too_long" else None
        if limit is None:
            unfit.append(item["loc"])
        else:
            unfit += [(*item["loc"], index) for index in range(limit, item["ctx"]["actual_length"])]
    kept = _without(value, unfit)
    return {} if kept is _NOTHING else kept


_NOTHING = object()


def _without(value: object, paths: Sequence[Path]) -> object:
    """Return a copy of `value` without the parts at `paths`, or _NOTHING if it is such a part itself or lacks
    one. The copy goes as deep as the paths do, that is as the models."""
    if () in paths:
        return _NOTHING
    below: dict[int | str, list[Path]] = {}
    for first, *rest in paths:
        below.setdefault(first, []).append(tuple(rest))
    if isinstance(value, dict):
        items: list[tuple[Any, object]] = list(value.items())
    else:
        items = list(enumerate(value)) if isinstance(value, list) else []
    if below.keys() - {key for key, _ in items}:
        return _NOTHING
    kept = [(key, _without(item, below[key]) if key in below else item) for key, item in items]
    kept = [(key, item) for key, item in kept if item is not _NOTHING]
    return dict(kept) if isinstance(value, dict) else [item for _, item in kept]

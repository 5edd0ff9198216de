"""Replacement of a function of another library by one that is called with the original."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]


def around(owner: Any, name: str) -> Callable[[Function], Function]:
    """Return a decorator that puts a function in the place of `owner.name`; that one is its first argument,
    before those of the call."""
    given = getattr(owner, name)

    def replace(function: Function) -> Function:
        @functools.wraps(given)
        def changed(*args: Any, **kwargs: Any) -> Any:
            return function(given, *args, **kwargs)

        setattr(owner, name, changed)
        return changed

    return replace

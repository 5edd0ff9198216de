"""The hostile objects of a tenant, one row or function for each case.

To add one, add a row for `add_jobs` in one of the modules `case_*`, or there a function with `@case("name")`
that returns what is posted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.cluster.hostile.bodies import Post, job
from tests.support.kube_json import KubeJson

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Bystander:
    """The job of another namespace that goes on during the attack; forgeries name it."""

    name: str
    uid: str
    namespace: str


def nothing(api: KubeJson, namespace: str) -> list[str]:
    """Return no complaint."""
    return []


@dataclass(frozen=True, kw_only=True)
class Case:
    """The objects that one attack posts, in order."""

    name: str
    posts: Callable[[Bystander], list[Post]]
    touches: int = 0
    """Number of times that the tenant then changes a label of each of its jobs."""

    never_starts: bool = False
    """Whether these jobs must never have a pod, as they would break a rule of the installation."""

    check: Callable[[KubeJson, str], list[str]] = nothing
    """Function that returns complaints about this case's objects once the operator has processed them."""

    alone: bool = True
    """Whether the case runs by itself; False for cases that run several together to save time."""

    def __str__(self) -> str:
        return self.name


CASES: list[Case] = []


def case(
    name: str, **more: Any
) -> Callable[[Callable[[Bystander], list[Post]]], Callable[[Bystander], list[Post]]]:
    """Add the decorated function to the cases; see `Case` for `more`."""

    def add(posts: Callable[[Bystander], list[Post]]) -> Callable[[Bystander], list[Post]]:
        add_case(Case(name=name, posts=posts, **more))
        return posts

    return add


def add_case(new: Case) -> None:
    """Add a case. Raises ValueError if the name is taken, as names of objects begin with it."""
    if any(found.name == new.name for found in CASES):
        raise ValueError(f"two cases are called {new.name}")
    CASES.append(new)


def add_jobs(
    rows: Iterable[tuple[str, Mapping[str, Any], Mapping[str, str]]],
    *,
    never_starts: bool = False,
    alone: bool = True,
) -> None:
    """Add one case of one job for each row: name, changes to a good job, JSON text for marks in them."""
    for name, changes, raw in rows:
        posts = _one_job(name, changes, raw)
        add_case(Case(name=name, posts=posts, never_starts=never_starts, alone=alone))


def batches(size: int = 10) -> list[list[Case]]:
    """Return all cases in their order: those that run alone, and the others in batches of `size`."""
    together = [found for found in CASES if not found.alone]
    return [
        *([found] for found in CASES if found.alone),
        *(together[at : at + size] for at in range(0, len(together), size)),
    ]


def _one_job(
    name: str, changes: Mapping[str, Any], raw: Mapping[str, str]
) -> Callable[[Bystander], list[Post]]:
    return lambda bystander: [job(name, changes, raw)]

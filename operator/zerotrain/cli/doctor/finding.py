"""The result of a check."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARN = "warn"
    """A job runs, but slower or less protected than it could."""
    FAIL = "fail"
    """A job that needs it would not run, or would not keep its promises."""
    SKIP = "skip"
    """The check could not be made here; the note says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of one check, printed as one line."""

    group: str
    """One of drive, kernel, memory, processor, gpu, nccl, network."""
    name: str
    state: State
    value: str
    """The value that was found."""
    note: str = ""
    """The consequence, and what to do about it."""


class Group:
    """Builder of the findings of one group."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.findings: list[Finding] = []

    def add(self, name: str, state: State, value: str, note: str = "") -> None:
        self.findings.append(Finding(group=self.name, name=name, state=state, value=value, note=note))

    def check(self, name: str, value: str, *, good: bool, note: str, bad: State = State.WARN) -> None:
        """Add a finding: OK without the note if `good`, else `bad` with the note."""
        self.add(name, State.OK if good else bad, value, "" if good else note)


def worst(findings: Iterable[Finding]) -> State:
    """Return the most severe state of all findings; OK if there are none."""
    order = (State.FAIL, State.WARN)
    found = {item.state for item in findings}
    return next((state for state in order if state in found), State.OK)


def to_records(findings: Iterable[Finding]) -> list[dict[str, str]]:
    """Return the findings as records for JSON."""
    return [{name: str(value) for name, value in asdict(item).items()} for item in findings]


def from_records(records: Iterable[Mapping[str, Any]]) -> list[Finding]:
    """Parse the findings that another process printed.

    Raises ValueError, KeyError or TypeError for other content.
    """
    return [
        Finding(
            group=str(item["group"]),
            name=str(item["name"]),
            state=State(item["state"]),
            value=str(item["value"]),
            note=str(item["note"]),
        )
        for item in records
    ]

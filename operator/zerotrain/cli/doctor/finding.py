"""What a check says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """How serious it is."""

    OK = "ok"
    WARN = "warn"
    """It runs, but slower or less protected than it could."""
    FAIL = "fail"
    """A job that needs it would not run, or would not be what it promises."""
    SKIP = "skip"
    """Could not be looked at here; the note says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line."""

    group: str
    """drive, kernel, memory, processor, gpu, nccl, network."""
    name: str
    state: State
    value: str
    """What was found."""
    note: str = ""
    """What follows from it, and what to do."""


class Group:
    """Findings of one group, made in a few words each."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.findings: list[Finding] = []

    def add(self, name: str, state: State, value: str, note: str = "") -> None:
        self.findings.append(Finding(group=self.name, name=name, state=state, value=value, note=note))

    def judge(self, name: str, value: str, *, good: bool, note: str, bad: State = State.WARN) -> None:
        """OK without the note, or the other state with it."""
        self.add(name, State.OK if good else bad, value, "" if good else note)


def worst(findings: Iterable[Finding]) -> State:
    """Of all; OK for none."""
    order = (State.FAIL, State.WARN)
    found = {item.state for item in findings}
    return next((state for state in order if state in found), State.OK)


def to_records(findings: Iterable[Finding]) -> list[dict[str, str]]:
    """For JSON."""
    return [{name: str(value) for name, value in asdict(item).items()} for item in findings]


def from_records(records: Iterable[Mapping[str, Any]]) -> list[Finding]:
    """What another process printed. Raises ValueError, KeyError or TypeError for something else."""
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

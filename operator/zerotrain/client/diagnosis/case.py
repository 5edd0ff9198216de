"""What the rules of `advice` look at, and what they give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from zerotrain.client.job import Job, command
from zerotrain.client.observed import Event, Pod


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """One thing to do."""

    text: str
    command: str = ""
    """To type, where there is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What the rules look at."""

    job: Job
    events: Sequence[Event]
    pods: Sequence[Pod]
    now: datetime

    def has(self, reason: str) -> bool:
        """Whether an event with this reason was told."""
        return any(event.reason == reason for event in self.events)

    def reason(self, kind: str, status: str) -> str:
        """Of the condition, where it has this status."""
        found = self.job.condition(kind)
        return found.reason if found is not None and found.status == status else ""

    def zerotrain(self, verb: str, options: str = "") -> str:
        """A command about the job."""
        return command(self.job, verb, options)

    def kubectl(self, words: str) -> str:
        return f"kubectl -n {self.job.namespace} {words}"

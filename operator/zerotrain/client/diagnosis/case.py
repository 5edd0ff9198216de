"""Input and output of the rules of `advice`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from zerotrain.client.job import Job, command
from zerotrain.client.observed import Event, Pod


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """One recommended action."""

    text: str
    command: str = ""
    """Command to type, if there is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Input of the rules."""

    job: Job
    events: Sequence[Event]
    pods: Sequence[Pod]
    now: datetime

    def has(self, reason: str) -> bool:
        """Return whether there is an event with this reason."""
        return any(event.reason == reason for event in self.events)

    def reason(self, kind: str, status: str) -> str:
        """Return the reason of the condition if it has this status, else an empty text."""
        found = self.job.condition(kind)
        return found.reason if found is not None and found.status == status else ""

    def zerotrain(self, verb: str, options: str = "") -> str:
        """Return a command about the job."""
        return command(self.job, verb, options)

    def kubectl(self, words: str) -> str:
        return f"kubectl -n {self.job.namespace} {words}"

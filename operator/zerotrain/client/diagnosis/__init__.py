"""Diagnosis of a job in plain words, with advice, for `zerotrain describe` and for programs.

It consists of pure functions of the job, its events and its pods; they send no requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from zerotrain.client.diagnosis.advice import advice_for
from zerotrain.client.diagnosis.case import Advice
from zerotrain.client.diagnosis.history import Happening, happenings
from zerotrain.client.diagnosis.now import headline, situation
from zerotrain.client.job import Job
from zerotrain.client.observed import Event, Pod

__all__ = ["Advice", "Diagnosis", "Happening", "diagnose"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Description of a job, with advice."""

    headline: str
    """One line: phase, progress, reason."""
    situation: tuple[str, ...]
    """Present state, in sentences."""
    happenings: tuple[Happening, ...]
    """Failures, events and warnings about pods, oldest first."""
    advice: tuple[Advice, ...]
    """Recommended actions, the most urgent first; empty when there is nothing to do."""


def diagnose(
    job: Job,
    events: Sequence[Event] = (),
    pods: Iterable[Pod] = (),
    *,
    now: datetime | None = None,
) -> Diagnosis:
    """Diagnose the job from everything that is known. Texts are as the cluster returned them: print them
    through `text.printable`."""
    moment, found = now or datetime.now(UTC), tuple(pods)
    return Diagnosis(
        headline=headline(job, moment),
        situation=tuple(situation(job, found, moment)),
        happenings=tuple(happenings(job, events)),
        advice=tuple(advice_for(job, events, found, moment)),
    )

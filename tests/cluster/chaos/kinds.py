"""Kinds of jobs of a scenario: each is drawn with some of the product's features, and records which."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

QUEUE = "team-a"

EXCLUSION_S = 3
"""Seconds for which a rule excludes a node: short, so that attempts both wait for it and outlive it."""

RULES: tuple[Json, ...] = (
    {"onExitCodes": [137], "action": "ReplaceNodeAndRestart"},
    {"onExitCodes": [82], "action": "RestartAllIgnoreBudget"},
    {"onReasons": ["Hang"], "action": "ReplaceNodeAndRestart"},
)
SHRINK: Json = {"onExitCodes": [1], "action": "ShrinkAndRestart"}

MAX_ELASTIC = 4

HANG_S = 3
"""Seconds after which a step without an end counts as a hang."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """Features of one job."""

    elastic: bool = False
    queued: bool = False
    """Whether Kueue admits it."""
    verified: bool = False
    """Whether its checkpoint is read once it has completed."""
    detects_hangs: bool = False
    """Whether it has hang detection, so that it may hang."""


def draw(chance: random.Random, workers: tuple[int, ...]) -> tuple[Json, Traits]:
    """Return the changes of the good job, by dotted path, and the traits that they give it."""
    place, count = chance.choice(("", "", "gang", "group", "queue")), chance.choice(workers)
    traits = Traits(
        elastic=chance.random() < 0.5 and count <= MAX_ELASTIC,
        queued=place == "queue",
        verified=chance.random() < 0.4,
        detects_hangs=chance.random() < 0.3,
    )
    changes: Json = {
        "spec.workers": count,
        "spec.failurePolicy.maxRestarts": 100,
        "spec.failurePolicy.nodeExclusionSeconds": EXCLUSION_S,
        "spec.runPolicy.terminationTimeoutSeconds": 3,
        "spec.checkpoint.gracePeriodSeconds": 10,
    }
    if traits.elastic:
        changes |= {"spec.elastic.minWorkers": 1, "spec.elastic.maxWorkers": MAX_ELASTIC}
    if chance.random() < 0.4:
        changes["spec.failurePolicy.rules"] = [*RULES, *((SHRINK,) if traits.elastic else ())]
    if traits.verified:
        changes["spec.checkpoint.verify"] = "OnCompletion"
        changes["spec.runPolicy.cleanPodPolicy"] = chance.choice(("All", "Running", "None"))
    if traits.detects_hangs:
        changes["spec.hangPolicy"] = {"minTimeoutSeconds": HANG_S, "stepTimeoutFactor": 2}
    if place == "gang":
        changes["spec.scheduling.gang"] = "Auto"
    if place == "group":
        # No scheduler reads the group here: it must be created before its pods and deleted with them.
        changes["spec.scheduling.gang"] = "Coscheduling"
    if place == "queue":
        changes["spec.scheduling.queueName"] = QUEUE
    return changes, traits

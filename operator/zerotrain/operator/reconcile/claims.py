"""What jobs ask of the cluster's room, what is told them, and what there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from zerotrain.operator.reconcile.placement import Kind, Node
from zerotrain.operator.resources.amounts import Amounts

VERDICT_AGE_S = 30.0
"""Older words on the cluster's room are not acted upon, unless the reader says so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """The workers of one attempt."""

    workers: int
    kind: Kind
    priority: int = 0
    preempts: bool = False
    """Whether the scheduler may evict pods of lower priority for them."""
    topology_key: str | None = None
    spread: bool = False
    """Over the values of the key, evenly; all on one value otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A job that waits, or one whose pods have no nodes yet."""

    uid: str
    name: str
    """namespace/name, for messages."""
    created: datetime
    demand: Demand
    growing: bool = False
    """It runs already and asks how large it could be; it keeps nothing and waits for nobody."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """The nodes that a waiting job keeps."""

    nodes: frozenset[str]
    demand: Demand
    """What they are kept for; another demand has no right to them."""
    until: datetime
    """Even if the cluster is too small for the job meanwhile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether the job may start, and what it should know."""

    admitted: bool
    workers: int
    """How many were asked for."""
    fits: int | None = 0
    """Workers that the cluster could hold now; the job's own pods count as their places. None while nobody
    looks: the job waits for others and not for nodes."""
    counted: bool = True
    """False where nodes and pods may not be read: the rest then says who may start, and nothing of room."""
    at: datetime | None = None
    """When the cluster was read; the reader fills it in."""
    good_for_s: float = VERDICT_AGE_S
    """How long the word is worth acting upon; a reader that reads more seldom stands by it for longer."""
    domain: str | None = None
    """Value of the topology key that all workers go to."""
    avoid: tuple[str, ...] = ()
    """Nodes that are kept for jobs ahead."""
    message: str = ""
    keeps: Kept | None = field(default=None, compare=False)
    """For the next round; no news to the job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeUse:
    """One node and what its pods request."""

    node: Node
    lasting: Mapping[int, Amounts] = field(default_factory=dict)
    """By priority: pods that are not ours, of which nobody knows when they end."""
    ours: Mapping[str, Mapping[int, Amounts]] = field(default_factory=dict)
    """By UID of the job and priority: workers of training jobs, which end."""

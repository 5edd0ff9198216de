"""What the operator knows of the Services by which jobs of a namespace find their worker 0."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple


class Place(NamedTuple):
    """One of the Services."""

    namespace: str
    name: str


@dataclass(slots=True)
class MeetingPlaces:
    """One that is missing here costs a request more, or stays in the cluster when nobody needs it."""

    seen: dict[Place, datetime | None] = field(default_factory=dict)
    """Those that are there, and when each was last found as it should be."""
    locks: defaultdict[Place, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    """Nobody counts on one while it is being deleted."""
    listed: set[str | None] = field(default_factory=set)
    """Namespaces (None: all) where all of them are known."""

    def doubt(self) -> None:
        """This replica begins to lead: others may have made or deleted some."""
        self.seen.clear()
        self.listed.clear()

"""What decisions need to know of the nodes that hold workers."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeView:
    """One node."""

    name: str
    ready: bool = True
    not_ready_since: datetime | None = None
    unschedulable: bool = False
    """Cordoned, as before a drain."""
    out_of_service: bool = False
    """Carries `node.kubernetes.io/out-of-service`: its pods will not come back."""

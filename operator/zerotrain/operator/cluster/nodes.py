"""Nodes in trouble, in memory: NotReady, cordoned, tainted for eviction, deleted.

All nodes of the cluster are watched, since any of them may hold a worker. A healthy node leaves nothing here
but its name, and the heartbeats of a thousand nodes cause no pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from zerotrain.contract.text import word
from zerotrain.operator.cluster.api import Json
from zerotrain.operator.reconcile import NodeTaint, NodeView, PodView
from zerotrain.operator.reconcile.avoided_nodes import LEAVING_TAINTS
from zerotrain.operator.reconcile.pod_reader import parse_time

PATH = "/api/v1/nodes"

NEVER_UPDATED = "NodeStatusNeverUpdated"
"""Reason that the node controller gives for a node whose kubelet has never reported: it has not fallen
silent."""

MAX_GONE = 1000
"""Maximum of deleted nodes that are remembered: an autoscaler keeps making new names, and a pod outlives its
node by minutes."""

NO_NODES: Mapping[str, NodeView] = {}


class NodeStore:
    """Sink of a ListWatch for nodes. `changed` is called with the name of a node whose view has changed;
    `now` is the time that decides passes."""

    def __init__(
        self,
        changed: Callable[[str], None] = lambda name: None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.changed, self.now = changed, now
        self._troubled: dict[str, NodeView] = {}
        self._known: set[str] = set()

    def key(self, item: Json) -> str:
        return str(item["metadata"]["name"])

    def put(self, item: Json) -> None:
        view = node_view(item)
        self._known.add(view.name)
        self._keep(view.name, None if is_well(view) else view)

    def remove(self, item: Json) -> None:
        self._bury(item["metadata"]["name"])

    def listed(self, keys: set[str], version: int) -> None:
        for name in self._known - keys:
            self._bury(name)

    @property
    def are_seen(self) -> bool:
        """Return whether this operator may read nodes, and has read some."""
        return bool(self._known)

    def any_silent(self) -> bool:
        """Return whether any node exists and is not ready."""
        return any(not view.ready and not view.gone for view in self._troubled.values())

    def of(self, pods: Iterable[PodView]) -> Mapping[str, NodeView]:
        """Return the views of those nodes of the pods that are in trouble."""
        troubled = self._troubled
        if not troubled:  # the usual case; jobs may have thousands of pods
            return NO_NODES
        return {pod.node: troubled[pod.node] for pod in pods if pod.node is not None and pod.node in troubled}

    def _bury(self, name: str) -> None:
        # Kept until a node of that name comes back: pods name their node for as long as they exist.
        self._known.discard(name)
        self._keep(name, NodeView(name=name, ready=False, gone=True))
        gone = [other for other, view in self._troubled.items() if view.gone]
        for other in gone[:-MAX_GONE]:
            del self._troubled[other]

    def _keep(self, name: str, view: NodeView | None) -> None:
        old = self._troubled.get(name)
        if view is not None and view.not_ready_since is not None:
            is_known = old is not None and old.not_ready_since == view.not_ready_since
            view = replace(view, learned_at=old.learned_at if old is not None and is_known else self.now())
        if old == view:
            return
        if view is None:
            del self._troubled[name]
        else:
            self._troubled[name] = view
        self.changed(name)


def node_view(node: Mapping[str, Any]) -> NodeView:
    """Return the view of a node's JSON. A node without a readiness condition counts as ready until there is
    evidence against it."""
    spec, status = node.get("spec", {}), node.get("status", {})
    conditions = {item["type"]: item for item in status.get("conditions", ())}
    ready = conditions.get("Ready", {})
    is_ready = ready.get("status", "True") == "True" or ready.get("reason") == NEVER_UPDATED
    return NodeView(
        name=node["metadata"]["name"],
        ready=is_ready,
        not_ready_since=None if is_ready else parse_time(ready.get("lastTransitionTime")),
        unschedulable=bool(spec.get("unschedulable")),
        taints=tuple(
            NodeTaint(
                key=word(item["key"]), value=word(item.get("value", "")), effect=word(item.get("effect", ""))
            )
            for item in spec.get("taints", ())
        ),
    )


def is_well(view: NodeView) -> bool:
    """Return whether an existing node gives no job a reason to act. Taints that only keep new pods away are
    usual on GPU nodes."""
    is_evicting = any(taint.effect == "NoExecute" or taint.key in LEAVING_TAINTS for taint in view.taints)
    return view.ready and not view.unschedulable and not is_evicting and not view.out_of_service

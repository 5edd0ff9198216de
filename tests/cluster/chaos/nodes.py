"""Temporary faults of the nodes of a scenario."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from tests.operator.kubelet_double import KubeletDouble
from tests.support.kube_json import KubeJson


class Nodes:
    """Faults of nodes. Call `heal` often."""

    def __init__(self, api: KubeJson, double: KubeletDouble, chance: random.Random) -> None:
        self._api, self._double, self._chance = api, double, chance
        self._restore: list[tuple[float, Callable[[], None]]] = []

    def heal(self, now: float) -> None:
        """Undo faults that have lasted long enough; `math.inf` undoes all."""
        for due, restore in self._restore:
            if due <= now:
                restore()
        self._restore = [item for item in self._restore if item[0] > now]

    def deafen(self) -> bool:
        """Stop the nodes from answering: deleted pods stay Terminating until a forced deletion."""
        self._double.obeys_sigterm = False
        self._restore.append((time.monotonic() + self._chance.uniform(0.5, 5), self._hear))
        return True

    def fill(self) -> bool:
        """Remove all free capacity: new pods stay Pending."""
        self._double.start_up = False
        self._restore.append((time.monotonic() + self._chance.uniform(0.2, 2), self._empty))
        return True

    def drain(self) -> bool:
        """Cordon a node for a while: its workers move, with all others of their jobs."""
        if len(self._double.nodes) == 1:
            return False
        node = self._chance.choice(self._double.nodes)
        nodes, self._double.nodes = self._double.nodes, tuple(n for n in self._double.nodes if n != node)
        self._cordon(node, True)

        def open_again() -> None:
            self._cordon(node, False)
            self._double.nodes = nodes

        self._restore.append((time.monotonic() + self._chance.uniform(2, 6), open_again))
        return True

    def _cordon(self, node: str, closed: bool) -> None:
        self._api.patch(f"/api/v1/nodes/{node}", {"spec": {"unschedulable": closed}})

    def _hear(self) -> None:
        self._double.obeys_sigterm = True

    def _empty(self) -> None:
        self._double.start_up = True

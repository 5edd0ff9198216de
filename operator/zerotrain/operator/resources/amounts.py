"""Resource requests of pods, in exact thousandths of each resource.

They are used for pod groups, for queues and for the hint on free capacity.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from zerotrain.operator.api.quantity import Quantity

Amounts = dict[str, int]
"""Amount in thousandths, by resource name."""

MILLI = 1000

PODS = "pods"
"""Resource that limits the number of pods on a node; every pod takes one."""


_OF_PODS = ("cpu", "memory")
_HUGE_PAGES = "hugepages-"
"""Prefix of further resources, besides those of `_OF_PODS`, that a pod may request as a whole."""


def requests_of(spec: Mapping[str, Any]) -> Amounts:
    """Return what the scheduler counts for a pod.

    That is the larger of its containers together with its sidecars and its largest init step. A request for
    the pod as a whole (`spec.resources`) replaces the sum over its containers.
    """
    running = Counter[str]()
    for container in spec.get("containers", ()):
        running.update(_requests(container))
    sidecars, peak = Counter[str](), Counter[str]()
    for container in spec.get("initContainers", ()):
        wanted = _requests(container)
        if container.get("restartPolicy") == "Always":
            sidecars.update(wanted)
            wanted = {}
        # An init step runs together with the sidecars that were started before it.
        for name in wanted.keys() | sidecars.keys():
            peak[name] = max(peak[name], wanted.get(name, 0) + sidecars[name])
    running.update(sidecars)
    largest = {name: max(running[name], peak[name]) for name in running.keys() | peak.keys()}
    total = Counter({**largest, **_of_the_pod(spec.get("resources") or {}, largest)})
    total.update({name: at_least(amount) for name, amount in spec.get("overhead", {}).items()})
    return total


def times(amounts: Mapping[str, int], count: int) -> Amounts:
    return {name: amount * count for name, amount in amounts.items()}


def resource_list(amounts: Mapping[str, int]) -> dict[str, str]:
    """Return the amounts as Kubernetes writes quantities, with whole numbers where possible."""
    return {
        name: str(amount // MILLI) if amount % MILLI == 0 else f"{amount}m"
        for name, amount in sorted(amounts.items())
    }


def at_least(amount: object) -> int:
    """Return a requested amount in thousandths, rounded up."""
    return _milli(str(amount))[1]


def at_most(amount: object) -> int:
    """Return an amount that a node offers in thousandths, rounded down."""
    return _milli(str(amount))[0]


def _requests(container: Mapping[str, Any]) -> Amounts:
    """Return the requests of a container. A missing request is the limit, as the API server defaults it."""
    resources = container.get("resources", {})
    asked = {**resources.get("limits", {}), **resources.get("requests", {})}
    return {name: least for name, amount in asked.items() if (least := at_least(amount))}


def _of_the_pod(resources: Mapping[str, Any], containers: Amounts) -> Amounts:
    """Return the resources that the pod requests as a whole.

    A limit without a request counts as a request if no container requests the resource, as the API server
    defaults it. For huge pages, which are never overcommitted, it always counts.
    """
    asked = dict(resources.get("requests") or {})
    for name, amount in (resources.get("limits") or {}).items():
        if name not in containers or name.startswith(_HUGE_PAGES):
            asked.setdefault(name, amount)
    return {
        name: at_least(amount)
        for name, amount in asked.items()
        if name in _OF_PODS or name.startswith(_HUGE_PAGES)
    }


# A cluster repeats a few amounts on thousands of pods, and exact fractions are slow.
@lru_cache(maxsize=4096)
def _milli(text: str) -> tuple[int, int]:
    exact = Quantity(text).value * MILLI
    return math.floor(exact), math.ceil(exact)

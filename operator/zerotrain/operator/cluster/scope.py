"""Scope of the operator: the whole cluster, or a few namespaces that its roles name one by one.

Every list and watch of namespaced objects takes its paths from here. Cluster-scoped objects (nodes, priority
classes, flavors of a queue) are requested in both modes, and their callers handle a rejection.
"""

from __future__ import annotations

from collections.abc import Sequence


def scoped(path: str, namespaces: Sequence[str]) -> tuple[str, ...]:
    """Return the paths of a collection such as `/api/v1/pods`: itself for the whole cluster, else one per
    namespace."""
    if not namespaces:
        return (path,)
    prefix, _, plural = path.rpartition("/")
    return tuple(f"{prefix}/namespaces/{namespace}/{plural}" for namespace in namespaces)

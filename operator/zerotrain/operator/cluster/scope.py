"""Which namespaces the operator looks after: the whole cluster, or a few that its roles name one by one.

Every list and watch of namespaced objects asks here for its paths. What lies outside namespaces (nodes,
priority classes, flavors of a queue) is asked for in both modes, and whoever asks copes with a refusal.
"""

from __future__ import annotations

from collections.abc import Sequence


def scoped(path: str, namespaces: Sequence[str]) -> tuple[str, ...]:
    """Paths of a collection such as `/api/v1/pods`: itself for the whole cluster, else one per namespace."""
    if not namespaces:
        return (path,)
    prefix, _, plural = path.rpartition("/")
    return tuple(f"{prefix}/namespaces/{namespace}/{plural}" for namespace in namespaces)

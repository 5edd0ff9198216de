"""Merge of a job's new file over the existing job; used by `Client.submit`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerotrain.client.lenient_json import Fields


def merged_over(old: Mapping[str, Any], new: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Return `new` at the version of `old`, with those labels and annotations of `old` that other clients
    have set.

    Labels and annotations that `owner` has set before, and that are not in `new`, are removed.
    """
    meta = {**old["metadata"]}
    meta.pop("managedFields", None)
    for kind in ("labels", "annotations"):
        ours = _owned(old, kind, owner)
        kept = {key: value for key, value in (meta.pop(kind, None) or {}).items() if key not in ours}
        if texts := kept | dict(new["metadata"].get(kind) or {}):
            meta[kind] = texts
    return {**new, "metadata": meta}


def _owned(old: Mapping[str, Any], kind: str, owner: str) -> set[str]:
    """Return the keys of the labels or annotations that this owner has set."""
    entries = Fields(old).part("metadata").parts("managedFields")
    mine = [entry for entry in entries if entry.text("manager") == owner]
    sets = [entry.part("fieldsV1").part("f:metadata").part(f"f:{kind}") for entry in mine]
    return {name.removeprefix("f:") for found in sets for name in found.names()}

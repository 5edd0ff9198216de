"""A short hash of parts of a spec: whether something would be made today as it was made then."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Set
from typing import Any

from .spec import ZeroTrainingJobSpec


def spec_hash(spec: ZeroTrainingJobSpec, *, parts: Set[str], but: Mapping[str, Any]) -> str:
    """Of these fields of the spec, without those of their own fields that `but` names: 16 hex digits.

    Without defaults: another version of the operator, with fields that this one does not know, must come to
    the same.
    """
    kept = spec.model_dump(
        mode="json",
        include=set(parts),
        exclude={name: set(of) for name, of in but.items()},
        exclude_defaults=True,
    )
    # A part of which nothing counts is the same as none.
    kept = {name: value for name, value in kept.items() if value not in ({}, None)}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]

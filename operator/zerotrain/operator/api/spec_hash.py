"""Short hash of parts of a spec, by which the operator tells whether an object would be created the same
today."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Set
from typing import Any

from .spec import ZeroTrainingJobSpec


def spec_hash(spec: ZeroTrainingJobSpec, *, parts: Set[str], but: Mapping[str, Any]) -> str:
    """Return the hash of the fields `parts` of the spec, without those of their own fields that `but` names:
    16 hex digits.

    Defaults do not count: another version of the operator, with fields that this one does not know, must
    compute the same hash.
    """
    kept = spec.model_dump(
        mode="json",
        include=set(parts),
        exclude={name: set(of) for name, of in but.items()},
        exclude_defaults=True,
    )
    # A part in which no field counts equals a missing part.
    kept = {name: value for name, value in kept.items() if value not in ({}, None)}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]

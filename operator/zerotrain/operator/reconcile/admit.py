"""The check of a spec before an attempt: fields that are not supported yet, and rules that CEL cannot
express."""

from __future__ import annotations

from pydantic import ValidationError

from zerotrain.contract.text import one_line
from zerotrain.operator.api import ZeroTrainingJobSpec
from zerotrain.operator.api.admission import refusals
from zerotrain.operator.constants import Reason


def refusal_of(spec: ZeroTrainingJobSpec) -> tuple[str, str] | None:
    """Return reason and message of a rejected spec, naming every field; None if the job may start."""
    found = refusals(spec)
    if not found:
        return None
    # A wrong value comes before a missing feature: it stays wrong in every version.
    wrong = [item for item in found if item.reason == Reason.INVALID_SPEC]
    first = (wrong or list(found))[0]
    return str(first.reason), one_line("; ".join(f"{item.path}: {item.message}" for item in found))


def unreadable(error: ValidationError) -> tuple[str, str]:
    """Return reason and message for a stored spec that this version's models reject, e.g. after a manual CRD
    change."""
    problems = [
        f"spec.{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()
    ]
    return str(Reason.INVALID_SPEC), one_line("; ".join(problems))


def too_large(why: str) -> tuple[str, str]:
    """Return reason and message for a stored spec that is larger than the operator reads."""
    return str(Reason.INVALID_SPEC), why

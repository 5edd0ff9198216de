"""The gate before an attempt: fields whose behaviour is missing and rules that CEL cannot say."""

from __future__ import annotations

from pydantic import ValidationError

from zerotrain.contract.text import one_line
from zerotrain.operator.api import ZeroTrainingJobSpec
from zerotrain.operator.api.admission import refusals
from zerotrain.operator.constants import Reason


def refusal_of(spec: ZeroTrainingJobSpec) -> tuple[str, str] | None:
    """Reason and message of a refused spec, naming every field; None when the job may start."""
    found = refusals(spec)
    if not found:
        return None
    # A wrong value comes before a missing feature: it stays wrong in every version.
    wrong = [item for item in found if item.reason == Reason.INVALID_SPEC]
    first = (wrong or list(found))[0]
    return str(first.reason), one_line("; ".join(f"{item.path}: {item.message}" for item in found))


def unreadable(error: ValidationError) -> tuple[str, str]:
    """A stored spec that this version's models do not accept, as when the CRD was changed by hand."""
    problems = [
        f"spec.{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()
    ]
    return str(Reason.INVALID_SPEC), one_line("; ".join(problems))


def too_large(why: str) -> tuple[str, str]:
    """A stored spec that is more than the operator reads of one."""
    return str(Reason.INVALID_SPEC), why

"""Reasons why a job must not start."""

from __future__ import annotations

from dataclasses import dataclass

from zerotrain.operator.constants import Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """One reason, about one field."""

    path: str
    """Path of the field from the object's root, such as spec.nvme.mountPath."""

    reason: Reason
    """Kind of the reason. INVALID_SPEC: wrong in every version; NOT_SUPPORTED: this version has no behaviour
    for it."""

    message: str
    """Text with the rule, the value and a remedy."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


def invalid(path: str, message: str) -> Refusal:
    return Refusal(path=path, reason=Reason.INVALID_SPEC, message=message)

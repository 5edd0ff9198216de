"""The fields of the API that this version has no behaviour for, in one table.

Whoever gives a field its behaviour deletes its row. A field is listed with the values that ask for the
missing behaviour; a value that asks for nothing (gang: None) passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from zerotrain.operator.constants import Reason

from .refusal import Refusal
from .spec import ZeroTrainingJobSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class MissingBehaviour:
    """One row: a field, when it asks for something that is missing, and what to do."""

    path: str
    asked: Callable[[ZeroTrainingJobSpec], bool]
    way_out: str


def _row(path: str, asked: Callable[[ZeroTrainingJobSpec], bool], way_out: str) -> MissingBehaviour:
    return MissingBehaviour(path=path, asked=asked, way_out=way_out)


MISSING: tuple[MissingBehaviour, ...] = (
    _row(
        "spec.resources.rdma",
        lambda spec: spec.resources is not None and spec.resources.rdma is not None,
        "workers cannot be given RDMA devices yet; remove it and the collectives go over TCP",
    ),
    _row(
        "spec.nvme.requireEncryptedVolume",
        lambda spec: spec.nvme is not None and bool(spec.nvme.require_encrypted_volume),
        "StorageClasses are not examined yet; remove it",
    ),
)


def unsupported_fields(spec: ZeroTrainingJobSpec) -> Iterator[Refusal]:
    for row in MISSING:
        if row.asked(spec):
            yield Refusal(
                path=row.path,
                reason=Reason.NOT_SUPPORTED,
                message=f"not supported by this version: {row.way_out}",
            )

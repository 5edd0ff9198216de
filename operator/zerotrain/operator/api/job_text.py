"""Jobs as the API server sends them, parsed within bounds. Of a spec beyond the bounds, only the fields that
say which controller manages the job, and whether it is suspended, are kept. The rest of such a job is parsed
as for any other: its status has to say why it stalls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import suppress
from sys import getsizeof
from typing import Any

from zerotrain.contract.json_depth import depth_of
from zerotrain.contract.json_text import members, read_json
from zerotrain.operator.constants import (
    ANNOTATION_IGNORE_MEMORY_PLAN,
    MAX_SPEC_BYTES,
    MAX_SPEC_DEPTH,
    MAX_SPEC_VALUES,
    QUEUE_LABEL,
)

from .packed import packed
from .spec import ZeroTrainingJobSpec

Json = dict[str, Any]
Read = Callable[[bytes], Any]
"""Parser that raises nothing but ValueError."""

UNREAD = "unread"
"""Key in the body of a job whose spec exceeds the limits. Its value is the reason; all but a few fields of
the spec are missing."""

_ROOT = ("apiVersion", "kind", "metadata", "spec", "status")
_SPEC = tuple(str(field.alias) for field in ZeroTrainingJobSpec.model_fields.values())
_METADATA = (
    *("annotations", "creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp", "finalizers"),
    *("generateName", "generation", "labels", "managedFields", "name", "namespace", "ownerReferences"),
    *("resourceVersion", "selfLink", "uid"),
)
_KEPT_METADATA = frozenset(_METADATA) - {"managedFields", "finalizers", "ownerReferences", "selfLink"}
_KEPT_SPEC = ("managedBy", "suspend")
_NOTES = (QUEUE_LABEL, ANNOTATION_IGNORE_MEMORY_PLAN)
"""Labels and annotations of a job that the operator reads. Others are not kept: they may have 256 KiB."""
MAX_NOTE = 1024
"""Maximum number of characters of the value of one of them."""
_READ_IN_PLACE = (*_KEPT_SPEC, "hangPolicy", "scheduling", "workers")
"""Fields of a spec that are read without its model; all of them are small."""
MAX_FIELD_BYTES = 8 << 10
"""Memory of one field of a spec from which on it is kept as JSON text."""
_SHORT = 32
"""Maximum number of characters of a shared string. Short values are much the same from job to job, longer
ones (UIDs, messages) are not."""


def read_job(text: bytes, read: Read = read_json) -> Json:
    """Parse a job, or the part of one in the answer to a write. Raises ValueError."""
    if len(text) <= MAX_SPEC_BYTES:
        with suppress(ValueError):  # too deep somewhere
            return dict(read(text))
    parts = members(text, _ROOT)
    fields = members(parts.get("metadata", b""), _METADATA)
    if "uid" not in fields:
        raise ValueError("an object without metadata")
    job: Json = {name: read(parts[name]) for name in ("apiVersion", "kind") if name in parts}
    job["metadata"] = {name: read(fields[name]) for name in fields if name in _KEPT_METADATA}
    if "status" in parts:
        job["status"] = read(parts["status"])
    return job | _read_spec(parts["spec"], read) if "spec" in parts else job


def read_event(line: bytes, read: Read = read_json) -> Json:
    """Parse an event of a watch of jobs. Raises ValueError."""
    if len(line) <= MAX_SPEC_BYTES:
        with suppress(ValueError):
            return dict(read(line))
    parts = members(line, ("type", "object"))
    return {"type": read(parts.get("type", b"")), "object": read_job(parts.get("object", b""), read)}


def _read_spec(text: bytes, read: Read) -> Json:
    if len(text) <= MAX_SPEC_BYTES:
        with suppress(ValueError):
            return {"spec": read(text)}
    fields = members(text, _SPEC)
    kept = {name: read(fields[name]) for name in _KEPT_SPEC if name in fields}
    field = max(fields, key=lambda name: len(fields[name]), default="")
    if len(text) > MAX_SPEC_BYTES:
        message = _too_long(len(text), field, len(fields.get(field, b"")))
    else:
        field = max(fields, key=lambda name: depth_of(fields[name]), default="")
        message = _too_deep(field)
    return {"spec": kept, UNREAD: message}


def kept(job: Mapping[str, Any]) -> Json:
    """Return the job as it stays in memory: without fields that the operator does not read, and with strings
    that all jobs share (a parser creates each key and each value of each object anew). A spec beyond the
    limits is left out."""
    metadata = {name: value for name, value in job["metadata"].items() if name in _KEPT_METADATA}
    metadata |= {name: _notes(metadata[name]) for name in ("labels", "annotations") if metadata.get(name)}
    spec = job.get("spec")
    rest = {name: value for name, value in job.items() if name not in ("metadata", "spec")}
    found: Json = {**_Walk(left=MAX_STATUS_VALUES).shared(rest, 0), "metadata": metadata}
    return found if spec is None else found | _shared_spec(spec)


MAX_STATUS_VALUES = 1 << 20
"""Maximum number of values in a job outside its metadata and spec: far above what the operator writes."""


def _shared_spec(spec: Mapping[str, Any]) -> Json:
    walk, shared = _Walk(left=MAX_SPEC_VALUES), dict[str, Any]()
    for name, value in spec.items():
        walk.size = 0
        try:
            found = walk.shared(value, MAX_SPEC_DEPTH)
            is_large = walk.size > MAX_FIELD_BYTES and name not in _READ_IN_PLACE
            shared[_one(name)] = packed(value) if is_large else found
        except _TooMuch:
            message = _too_many(name) if walk.left < 0 else _too_deep(name)
            return {"spec": {key: spec[key] for key in _KEPT_SPEC if key in spec}, UNREAD: message}
    return {"spec": shared}


class _TooMuch(Exception):
    """Error for a value with more levels or values than a spec may have."""


class _Walk:
    """Walk through one value, within bounds."""

    def __init__(self, left: int) -> None:
        self.left = left
        """Number of values that may still follow."""
        self.size = 0
        """Bytes of memory of the values so far, without shared strings."""

    def shared(self, part: Any, levels: int) -> Any:
        """Return an equal value with shared strings. `levels`: maximum depth of nested lists and objects, 0:
        any."""
        if isinstance(part, (dict, list)):
            self.left -= len(part)
            self.size += getsizeof(part)
            if levels == 1 and part and any(isinstance(item, (dict, list)) for item in _values(part)):
                raise _TooMuch
            if self.left < 0:
                raise _TooMuch
            if isinstance(part, dict):
                return {_one(name): self.shared(value, levels - 1) for name, value in part.items()}
            return [self.shared(item, levels - 1) for item in part]
        if isinstance(part, str) and len(part) <= _SHORT:
            return _one(part)
        self.size += getsizeof(part)
        return part


def _values(part: Any) -> Any:
    return part.values() if isinstance(part, dict) else part


@functools.lru_cache(maxsize=4096)
def _one(text: str) -> str:
    """Return the same object for the same text. sys.intern is unsuitable: in Python 3.12 it keeps every
    string for ever."""
    return text


def _notes(texts: Mapping[str, str]) -> dict[str, str]:
    """Return the labels or annotations that the operator reads, within bounds."""
    return {name: texts[name] for name in _NOTES if len(texts.get(name, "")) <= MAX_NOTE and name in texts}


_WAY_OUT = (
    "Keep in the job what describes it, and mount or download data: a file of spec.podTemplate.volumes, the "
    "image, or the program itself"
)


def _too_long(size: int, field: str, part: int) -> str:
    return (
        f"spec: {size:,} bytes of JSON, of which spec.{field} has {part:,}; a spec may have at most "
        f"{MAX_SPEC_BYTES:,} so it is not read. {_WAY_OUT}"
    )


def _too_deep(field: str) -> str:
    return (
        f"spec.{field}: lists and objects more than {MAX_SPEC_DEPTH} levels deep; a field may have at most "
        f"so many, and the spec is not read. {_WAY_OUT}"
    )


def _too_many(field: str) -> str:
    return (
        f"spec.{field}: with it the spec has more than {MAX_SPEC_VALUES:,} values; it may have at most so "
        f"many, so it is not read. {_WAY_OUT}"
    )

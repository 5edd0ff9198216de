"""Check of a checkpoint's buffers against the model that loads them, before any write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from zerotrain.runtime.checkpoint.errors import CheckpointMismatch
from zerotrain.runtime.checkpoint.manifest import Manifest
from zerotrain.runtime.checkpoint.names import BUFFER_PREFIX
from zerotrain.runtime.checkpoint.tensorfile import TensorFile
from zerotrain.runtime.zero.state import CheckpointState
from zerotrain.runtime.zero.strided import as_bytes, holds, shares_memory


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredBuffers:
    """Facts about a checkpoint's buffers that decide whether they fit the model."""

    stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    """Shape and dtype by name."""
    clashes: tuple[str, ...]
    """Reasons why buffers of the model cannot hold what is stored: elements, or two buffers, share memory."""

    @classmethod
    def read(cls, manifest: Manifest, path: Path, state: CheckpointState) -> StoredBuffers:
        """Read the facts from the checkpoint's folder. Raises OSError, ValueError when the file does not hold
        what the manifest says."""
        if not manifest.buffers:
            return cls(stored={}, clashes=())
        keys = {fqn: f"{BUFFER_PREFIX}{fqn}" for fqn in manifest.buffers}
        with TensorFile(path / manifest.files[0].name) as file:
            stored = {fqn: (file.shape(key), file.dtype(key)) for fqn, key in keys.items()}
            fitting = {
                fqn: buffer
                for fqn, buffer in state.buffers.items()
                if fqn in stored and stored[fqn][0] == buffer.shape
            }
            return cls(stored=stored, clashes=tuple(_clashes(fitting, lambda fqn: file.read(keys[fqn]))))

    def check(self, state: CheckpointState, *, strict: bool) -> None:
        """Raise CheckpointMismatch naming the first buffer that does not fit.

        Not `strict`: names that only the model or only the checkpoint has are passed over, and floating
        buffers may have another floating dtype.
        """
        if strict:
            self._check_names(state)
        for fqn in sorted(set(self.stored).intersection(state.buffers)):
            buffer, (shape, dtype) = state.buffers[fqn], self.stored[fqn]
            if tuple(buffer.shape) != shape:
                raise CheckpointMismatch(
                    f"buffer {fqn!r} has shape {list(buffer.shape)} in the model and {list(shape)} in the "
                    "checkpoint; give the model its old sizes or another folder"
                )
            if dtype in (buffer.dtype, state.given_dtypes.get(fqn)):
                continue
            if strict or not _is_rounding(dtype, buffer.dtype):
                raise CheckpointMismatch(
                    f"buffer {fqn!r} is {buffer.dtype} in the model and {dtype} in the checkpoint; give it "
                    f"the dtype that was saved{_ROUND if _is_rounding(dtype, buffer.dtype) else ''}"
                )
        if self.clashes:
            raise CheckpointMismatch(self.clashes[0])

    def _check_names(self, state: CheckpointState) -> None:
        missing = sorted(set(state.buffers) - set(self.stored))
        if missing:
            raise CheckpointMismatch(
                f"the checkpoint holds no buffer {missing[0]!r} ({len(missing)} missing in all); the model "
                "must be the same, or load with load_module_strict=False to keep the model's values"
            )
        extra = sorted(set(self.stored) - set(state.buffers))
        if extra:
            raise CheckpointMismatch(
                f"the checkpoint holds buffer {extra[0]!r}, which the model does not have or does not store "
                f"({len(extra)} in all); the model must be the same, or load with load_module_strict=False "
                "to leave such buffers out"
            )


_ROUND = " (see data_types.buffer_dtype), or load with load_module_strict=False to round it"


def _is_rounding(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether a cast changes only precision and range; 8-bit floats mean nothing without scales."""
    return all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in (stored, wanted))


def _clashes(buffers: Mapping[str, torch.Tensor], read: Callable[[str], torch.Tensor]) -> Iterator[str]:
    """Yield why a buffer cannot hold its stored values; `read` is called only for buffers that share
    memory."""
    first: dict[int, str] = {}
    for fqn, buffer in buffers.items():
        if shares_memory(buffer) and not holds(buffer, read(fqn)):
            yield (
                f"buffer {fqn!r} is an expanded view in the model, and the checkpoint holds several values "
                "where it has one; register it as .expand(...).contiguous(), or take another folder"
            )
        other = first.setdefault(id(buffer), fqn)
        if other != fqn and not torch.equal(as_bytes(read(fqn)), as_bytes(read(other))):
            yield (
                f"buffer {fqn!r} is the same tensor as {other!r} in the model, and the checkpoint holds "
                "different values of the two; register tensors of their own, or take another folder"
            )

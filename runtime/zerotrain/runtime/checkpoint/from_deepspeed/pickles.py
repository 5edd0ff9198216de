"""Loading of a torch file from an untrusted source, without running or importing anything that it names.

torch's `weights_only` unpickler builds tensors and plain containers. DeepSpeed's files also hold a few of its
own objects and those of `argparse`. Each such name becomes a class of ours that keeps its arguments as data.
Every other name is rejected. Runs only in the importing process (`__main__`).
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

from zerotrain.contract.exit_codes import may_pass
from zerotrain.runtime.checkpoint.errors import CheckpointDamaged, CheckpointError, CheckpointUnreadable

_STAND_INS = ("deepspeed.", "argparse.")
_MAX_DEPTH = 48
"""Greatest nesting of client state: less than a manifest may have."""


class UnsafeCheckpoint(CheckpointError):
    """Error of a file that names something that only running code could make."""


class Inert:
    """An object of a class that is not imported: `arguments` and `state` as they were pickled."""

    def __new__(cls, *arguments: Any, **named: Any) -> Inert:
        inert = super().__new__(cls)
        inert.__dict__.update(arguments=arguments, state=named)
        return inert

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Do nothing: `__new__` does everything, as an unpickler may call only that."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__dict__.setdefault("items", {})[key] = value


def _unread(path: Path, error: Exception) -> CheckpointError:
    kind = CheckpointUnreadable if isinstance(error, OSError) and may_pass(error.errno) else CheckpointDamaged
    return kind(f"{path} cannot be read: {error}")


def _check_sizes(path: Path) -> None:
    """Check that a file's members are uncompressed, as torch writes them, and fit its size. Compressed
    members may grow a thousandfold when they are read, and members that share bytes count as often as they
    are listed. Raises CheckpointDamaged, UnsafeCheckpoint."""
    try:
        size = path.stat().st_size
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
        raise _unread(path, error) from error
    packed = [item for item in members if item.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise UnsafeCheckpoint(
            f"{path} holds {packed[0].filename!r} compressed, {packed[0].file_size} bytes in "
            f"{packed[0].compress_size}; torch writes without compression: save it again with torch.save"
        )
    total = sum(item.file_size for item in members)
    if total > size:
        raise UnsafeCheckpoint(
            f"{path} has {size} bytes and claims {total} of contents; save it again with torch.save"
        )


def load_file(path: Path) -> dict[str, Any]:
    """Return the dictionary of one file; tensors are mapped from it, not read. Raises UnsafeCheckpoint,
    CheckpointDamaged, CheckpointUnreadable."""
    if not zipfile.is_zipfile(path):
        raise CheckpointDamaged(f"{path} is no torch file, or was cut short")
    _check_sizes(path)
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except MemoryError:
        raise
    except Exception as error:
        raise _unread(path, error) from error
    refused = sorted(name for name in names if not name.startswith(_STAND_INS))
    if refused:
        raise UnsafeCheckpoint(
            f"{path} names {refused[0]!r}, which is neither plain data nor one of DeepSpeed's own objects; "
            "nothing of the file was loaded. If it is in your client state, save that without it"
        )
    stubs = [(type(name.rpartition(".")[2], (Inert,), {}), name) for name in sorted(names)]
    try:
        with torch.serialization.safe_globals(stubs):  # type: ignore[arg-type]
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except MemoryError:
        raise
    except Exception as error:
        raise _unread(path, error) from error
    if not isinstance(content, dict):
        raise CheckpointDamaged(f"{path} holds a {type(content).__name__} instead of a dictionary")
    return content


def plain(value: Any, depth: int = 0) -> Any:
    """Return the value as JSON can hold it, inert objects as their contents. Raises TypeError for others."""
    if depth > _MAX_DEPTH:
        raise TypeError(f"a value that is nested more than {_MAX_DEPTH} deep is not plain data")
    if isinstance(value, Inert):
        return plain(value.__dict__["state"] or list(value.__dict__["arguments"]), depth + 1)
    if isinstance(value, dict):
        return {str(key): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, depth + 1) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float) and value == value and abs(value) != float("inf"):
        return value
    raise TypeError(f"{type(value).__name__} is not plain data")

"""The tensors of a safetensors file, or of a folder in Hugging Face's form, by name.

Opening files reads only their headers. No pickle is ever opened: a folder with only `.bin` files is rejected.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from zerotrain.contract.strict_json import read_json
from zerotrain.runtime.checkpoint.tensorfile import TensorFile
from zerotrain.runtime.weights.errors import WeightsError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_OPEN_FILES = 32
MAX_INDEX_BYTES = 256 << 20
"""Largest index, with a name and a file for every tensor; the largest in use have a few MiB."""

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """File, shape and dtype of a stored tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightFiles:
    """Tensors by name; `bytes_read` counts the bytes of tensor data that this process read."""

    def __init__(self, path: Path | str) -> None:
        """`path` names a `.safetensors` file, or a folder with one or with an index. Raises WeightsError."""
        self.path = Path(path)
        self.bytes_read = 0
        self._open: dict[Path, TensorFile] = {}
        weakref.finalize(self, _close_all, self._open)
        self.tensors: Mapping[str, StoredTensor] = self._scan()

    def read_into(self, name: str, start: int, target: torch.Tensor) -> None:
        """Fill 1-D `target` with elements of a tensor from `start` on, cast to the target's dtype.

        Raises WeightsError when the file has changed or cannot be read.
        """
        stored = self.tensors[name]
        try:
            self._file(stored.file).read_into(name, start, target)
        except (OSError, ValueError) as error:
            raise WeightsError(f"weights {stored.file}: {name!r} cannot be read: {error}") from error
        self.bytes_read += target.numel() * stored.dtype.itemsize

    def _file(self, path: Path) -> TensorFile:
        if path not in self._open:
            while len(self._open) >= MAX_OPEN_FILES:
                self._open.pop(next(iter(self._open))).close()
            self._open[path] = TensorFile(path)
        return self._open[path]

    def _scan(self) -> dict[str, StoredTensor]:
        index = self.path / INDEX
        if self.path.is_dir() and not (self.path / SINGLE).is_file() and index.is_file():
            return self._of_index(index)
        return self._of_file(_only_file(self.path))

    def _of_index(self, index: Path) -> dict[str, StoredTensor]:
        try:
            named = read_json(index, max_bytes=MAX_INDEX_BYTES, follow_link=True)["weight_map"]
            files = {str(name): str(file) for name, file in named.items()}
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise WeightsError(f"weights index {index} cannot be read: {error!r}; fetch it again") from error
        found: dict[str, StoredTensor] = {}
        for file in sorted(set(files.values())):
            if os.path.basename(file) != file:
                raise WeightsError(f"weights index {index} names {file!r}, which is not a file beside it")
            found |= self._of_file(self.path / file)
        lost = sorted(set(files) - set(found))
        if lost:
            raise WeightsError(
                f"weights index {index} names {lost[0]!r} in {files[lost[0]]}, which does not hold it "
                f"({len(lost)} such tensors); fetch the folder again"
            )
        return found

    def _of_file(self, path: Path) -> dict[str, StoredTensor]:
        try:
            file = self._file(path)
            return {
                name: StoredTensor(file=path, shape=file.shape(name), dtype=file.dtype(name))
                for name in file.keys()  # noqa: SIM118 - it is not a mapping
            }
        except FileNotFoundError:
            raise WeightsError(f"weights file {path} does not exist; fetch the folder again") from None
        except (OSError, ValueError) as error:
            raise WeightsError(f"weights file {path} cannot be read: {error}") from error


def _only_file(path: Path) -> Path:
    if path.suffix in _PICKLES:
        raise WeightsError(f"weights {path} are pickled, and loading a pickle runs code. {_CONVERT}")
    if not path.is_dir():
        return path
    if (path / SINGLE).is_file():
        return path / SINGLE
    found = sorted(path.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        raise WeightsError(
            f"weights folder {path} has {len(found)} .safetensors files but neither {INDEX} nor {SINGLE}; "
            "name one file, or add the index"
        )
    pickled = sorted(file.name for file in path.glob("*") if file.suffix in _PICKLES)
    if pickled:
        raise WeightsError(
            f"weights folder {path} holds only pickled weights ({pickled[0]}), and loading a pickle runs "
            f"code. {_CONVERT}"
        )
    raise WeightsError(f"weights folder {path} holds no .safetensors file (looked for {SINGLE} and {INDEX})")


_CONVERT = (
    'Convert once, where you trust the file: `python -c "from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained('IN').save_pretrained('OUT')\"`"
)


def _close_all(files: dict[Path, TensorFile]) -> None:
    for file in files.values():
        file.close()

"""Python values as JSON and tensors, and back with their types: no checkpoint needs pickle.

Values that JSON has itself are written as they are (None, truth values, whole numbers, finite floats, texts,
lists, dictionaries with text keys). Every other value is an object with the one key `TAG`, whose value is the
kind and its parts. Tensors and arrays go into the rank's tensor file, and the JSON holds their key. Used for
client states and the extra states of modules.
"""

from __future__ import annotations

import base64
import io
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch

from zerotrain.runtime.checkpoint.tensorfile import DTYPE_NAMES

TAG = "__zerotrain__"

MAX_DEPTH = 50
"""Greatest nesting of a value."""

_LARGE = 1 << 63
"""Whole numbers from this one on are written as text: other readers of JSON would round them."""


class UnpackableError(ValueError):
    """Error of a value that a checkpoint cannot hold; the text names its place, its type and the way out."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Values as JSON, and the tensors that it refers to by their keys."""

    json: Any
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def pack(value: Any, path: str) -> Packed:
    """Convert `value`, by value. `path` is its name in messages, and begins the keys of its tensors.

    Subclasses of numbers and texts come back as the plain type, numpy's scalars as themselves, tensors in
    host memory. Raises UnpackableError for a type that is not listed in the module's text.
    """
    packer = _Packer(path)
    return Packed(packer.pack(value, path, 0), packer.tensors)


def unpack(value: Any, read: Callable[[str], torch.Tensor]) -> Any:
    """Convert a value of `pack` back; `read` returns the tensor of a key. Raises ValueError for other
    values."""
    if isinstance(value, list):
        return [unpack(item, read) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) != {TAG}:
        return {key: unpack(item, read) for key, item in value.items()}
    try:
        kind, made_of = value[TAG]
        return _UNPACK[kind](made_of, read)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"a value of the kind {str(value[TAG])[:40]!r} cannot be read ({error})") from error


def tensor_key(value: Any) -> str | None:
    """Return the key of a packed value that is a tensor as a whole; None for another value."""
    if isinstance(value, dict) and set(value) == {TAG} and value[TAG][0] == "tensor":
        return str(value[TAG][1])
    return None


class _Packer:
    def __init__(self, root: str) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._root = root

    def pack(self, value: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise UnpackableError(f"{path[:80]}... is nested more than {MAX_DEPTH} deep (or holds itself)")
        if isinstance(value, Enum):
            raise self._refused(value, path, "save its value or its name")
        if isinstance(value, np.generic):
            return self._numpy_scalar(value, path)
        if value is None or isinstance(value, (bool, int, float, complex, str)):
            return _scalar(value)
        if isinstance(value, torch.nn.Parameter):
            raise self._refused(value, path, "save its detach(), or let the model hold it")
        if isinstance(value, (torch.Tensor, np.ndarray)):
            return self._tensor(value, path)
        if type(value) in (bytes, bytearray, io.BytesIO):
            data = value.getvalue() if isinstance(value, io.BytesIO) else bytes(value)
            return _tagged(type(value).__name__, base64.b64encode(data).decode())
        if type(value) in (dict, OrderedDict, Counter):
            return self._mapping(value, path, depth)
        if type(value) in (list, tuple, set, frozenset, deque):
            return self._sequence(value, path, depth)
        raise self._refused(value, path, _way_out(value))

    def _mapping(self, value: Any, path: str, depth: int) -> Any:
        plain = type(value) is dict and all(type(key) is str for key in value) and TAG not in value
        if plain:
            return {key: self.pack(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
        pairs = [
            [
                self.pack(key, f"the key {key!r} of {path}", depth + 1),
                self.pack(item, f"{path}[{key!r}]", depth + 1),
            ]
            for key, item in value.items()
        ]
        return _tagged(type(value).__name__, pairs)

    def _sequence(self, value: Any, path: str, depth: int) -> Any:
        items = [self.pack(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
        if type(value) is list:
            return items
        if type(value) is deque:
            return _tagged("deque", [items, value.maxlen])
        return _tagged(type(value).__name__, items)

    def _numpy_scalar(self, value: np.generic, path: str) -> Any:
        if value.dtype.kind not in "biufc":
            raise self._refused(value, path, "convert it with .item()")
        data = base64.b64encode(value.astype(value.dtype.newbyteorder("<")).tobytes()).decode()
        return _tagged("numpy", [value.dtype.name, data])

    def _tensor(self, value: torch.Tensor | np.ndarray[Any, Any], path: str) -> Any:
        kind = "array" if isinstance(value, np.ndarray) else "tensor"
        try:
            copy = torch.from_numpy(np.array(value)) if kind == "array" else _copy_of(value)
        except (TypeError, RuntimeError, NotImplementedError) as error:
            raise self._refused(value, path, f"a checkpoint cannot hold it ({error})") from error
        if copy.dtype not in DTYPE_NAMES:
            raise UnpackableError(
                f"{path} has dtype {copy.dtype}, which a checkpoint cannot hold; convert it"
            )
        key = f"{self._root}/{len(self.tensors)}"
        self.tensors[key] = copy
        return _tagged(kind, key)

    @staticmethod
    def _refused(value: Any, path: str, way_out: str) -> UnpackableError:
        kind = type(value)
        name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        return UnpackableError(f"{path} is of type {name}, which no checkpoint brings back; {way_out}")


def _copy_of(tensor: Any) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError("only dense tensors")
    with torch._C.DisableTorchFunctionSubclass():
        copy: torch.Tensor = tensor.detach().to("cpu", copy=True).contiguous()
    return copy


def _scalar(value: Any) -> Any:
    """Return a value that JSON may hold, or its tagged form."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        number = int(value)
        return number if -_LARGE <= number < _LARGE else _tagged("int", hex(number))
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _tagged("float", repr(float(value)))
    if isinstance(value, complex):
        return _tagged("complex", [_scalar(value.real), _scalar(value.imag)])
    return str(value)


def _tagged(kind: str, made_of: Any) -> dict[str, Any]:
    return {TAG: [kind, made_of]}


def _way_out(value: Any) -> str:
    if isinstance(value, Mapping):
        return "pass dict(...) of it"
    if isinstance(value, tuple):
        return "pass tuple(...) of it, or its fields as a dictionary"
    if isinstance(value, (list, set, frozenset)):
        return "pass list(...) or set(...) of it"
    if callable(getattr(value, "state_dict", None)):
        return "save its state_dict()"
    if hasattr(value, "__dataclass_fields__"):
        return "pass dataclasses.asdict(...) of it"
    if hasattr(value, "__fspath__"):
        return "pass str(...) of it"
    return "save the numbers, texts, tensors and collections that it is made of"


Read = Callable[[str], torch.Tensor]


def _pairs(made_of: Any, read: Read) -> list[tuple[Any, Any]]:
    return [(unpack(key, read), unpack(item, read)) for key, item in made_of]


def _items(made_of: Any, read: Read) -> list[Any]:
    return [unpack(item, read) for item in made_of]


def _numpy(made_of: Any, _: Read) -> Any:
    name, data = made_of
    kind = np.dtype(name)
    if kind.kind not in "biufc":
        raise ValueError(f"{name} is no number of numpy's")
    return np.frombuffer(base64.b64decode(data), dtype=kind.newbyteorder("<"))[0].astype(kind)[()]


_UNPACK: Mapping[str, Callable[[Any, Read], Any]] = {
    "int": lambda text, _: int(text, 16),
    "float": lambda text, _: float(text),
    "complex": lambda parts, read: complex(*_items(parts, read)),
    "bytes": lambda text, _: base64.b64decode(text),
    "bytearray": lambda text, _: bytearray(base64.b64decode(text)),
    "BytesIO": lambda text, _: io.BytesIO(base64.b64decode(text)),
    "dict": lambda pairs, read: dict(_pairs(pairs, read)),
    "OrderedDict": lambda pairs, read: OrderedDict(_pairs(pairs, read)),
    "Counter": lambda pairs, read: Counter(dict(_pairs(pairs, read))),
    "tuple": lambda items, read: tuple(_items(items, read)),
    "set": lambda items, read: set(_items(items, read)),
    "frozenset": lambda items, read: frozenset(_items(items, read)),
    "deque": lambda made_of, read: deque(_items(made_of[0], read), made_of[1]),
    "numpy": _numpy,
    "tensor": lambda key, read: read(key),
    "array": lambda key, read: read(key).numpy(),
}

"""A safetensors file from a stranger: every header that does not describe the file is refused by name."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from zerotrain.runtime.checkpoint.tensorfile import TensorFile
from zerotrain.runtime.weights.errors import WeightsError
from zerotrain.runtime.weights.files import INDEX, WeightFiles

pytestmark = pytest.mark.unit


DATA = bytes(128)


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]} | changes


def write(path: Path, header: bytes, length: int | None = None) -> Path:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + DATA)
    return path


def headers() -> dict[str, bytes]:
    """Return wrong headers by their fault."""
    second = {"dtype": "F32", "shape": [16], "data_offsets": [64, 128]}
    entries: dict[str, Any] = {
        "negative": entry(data_offsets=[-64, 0]),
        "past the end": entry(data_offsets=[96, 160]),
        "backwards": entry(data_offsets=[64, 0]),
        "beyond 64 bits": entry(data_offsets=[2**70, 2**70 + 64]),
        "another size": entry(data_offsets=[0, 60]),
        "one offset": entry(data_offsets=[0]),
        "text for offsets": entry(data_offsets="ab"),
        "no offsets": {"dtype": "F32", "shape": [4, 4]},
        "text for a shape": entry(shape="44"),
        "texts in a shape": entry(shape=["4", "4"]),
        "fractions in a shape": entry(shape=[4.0, 4.0]),
        "a truth in a shape": entry(shape=[True, 16]),
        "negative sizes": entry(shape=[-4, -4]),
        "a list for a dtype": entry(dtype=["F32"]),
        "no object": [1],
        "null": None,
    }
    found = {name: json.dumps({"a": value, "b": second}).encode() for name, value in entries.items()}
    found["shared bytes"] = json.dumps({"a": entry(), "b": entry()}).encode()
    one = json.dumps(entry()).encode()
    found["named twice"] = b'{"a": ' + one + b', "a": ' + one + b"}"
    found["a deep list"] = b"[" * 200_000
    found["a list"] = b"[]"
    found["no JSON"] = b"\xff\xfe{}"
    found["a number of 5000 digits"] = b'{"a": {"shape": [' + b"9" * 5000 + b"]}}"
    return found


@pytest.mark.parametrize("header", headers().values(), ids=headers())
def test_a_wrong_header_is_refused(header: bytes, tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", header)
    with pytest.raises(WeightsError, match=r"model\.safetensors cannot be read"):
        WeightFiles(path)


def test_a_wrong_length_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", json.dumps({"a": entry()}).encode(), length=2**63)
    with pytest.raises(WeightsError, match="claims 9223372036854775808 bytes"):
        WeightFiles(path)


def test_the_right_header_is_read(tmp_path: Path) -> None:
    header = json.dumps({"__metadata__": {"format": "pt"}, "a": entry()}).encode()
    with TensorFile(write(tmp_path / "model.safetensors", header)) as file:
        assert file.keys() == ["a"]
        assert file.read("a").shape == (4, 4)


@pytest.mark.parametrize(
    "index", [b"[" * 200_000, b"[]", b'{"weight_map": 1}', b'{"weight_map": {"a": "../x"}}']
)
def test_a_wrong_index_is_refused(index: bytes, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(index)
    with pytest.raises(WeightsError, match="index"):
        WeightFiles(tmp_path)

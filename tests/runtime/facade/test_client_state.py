"""A client state comes back with its types and keys, or is refused before anything is written."""

from __future__ import annotations

import io
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.ranks import run_ranks
from zerotrain.runtime.checkpoint import CheckpointError
from zerotrain.runtime.checkpoint.packing import TAG, UnpackableError, pack, unpack

VALUES: dict[str, Any] = {
    "none": None,
    "truth": True,
    "numbers": [0, -1, 2**63, -(2**200), 0.1, -0.0, 1e308, 5e-324, 3 + 4j],
    "not finite": [math.inf, -math.inf, math.nan, complex(math.nan, math.inf)],
    "texts": ["", "ä\n\u2028", "\ud800", "NaN"],
    "int keys": {0: 1.0, 1: 2.0, -3: None},
    "all keys": {None: 1, True: 2, 2: 3, 2.5: 4, "x": 5, (1, "a"): 6, b"b": 7, frozenset({1}): 8},
    "infinite key": {math.inf: 9},
    "digits as texts": {"0": 1.0},
    "mixed keys": {"1": "text", 1: "number"},
    "tuples": (1, (2, [3, (4,)]), ()),
    "sets": [{1, 2}, set(), frozenset({"a"})],
    "bytes": [b"", b"\0\xff", bytearray(b"ab"), io.BytesIO(b"xyz")],
    "numpy scalars": [
        np.float32(0.1), np.float64(math.inf), np.float16(2.5), np.int8(-3), np.uint64(2**64 - 1),
        np.bool_(True), np.complex64(1 + 2j),
    ],
    "numpy keys": {np.int64(3): "a"},
    "arrays": [np.arange(6).reshape(2, 3), np.array([1.5, math.nan])],
    "tensors": [torch.arange(3), torch.tensor(2.5, dtype=torch.bfloat16), torch.zeros(2, 0)],
    "generator": torch.get_rng_state(),
    "collections": [OrderedDict(b=1, a=2), Counter("aab"), deque([1, 2], maxlen=3)],
    "the mark": {TAG: ["tuple", [1]]},
}  # fmt: skip


def nothing(key: str) -> torch.Tensor:
    """Raise KeyError, as the value has no tensors."""
    raise KeyError(key)


def same(left: Any, right: Any) -> bool:
    """Return whether values and types are equal, and the order where it has a meaning; NaN equals itself."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return bool(left.dtype == right.dtype and np.array_equal(left, right, equal_nan=True))
    if isinstance(left, io.BytesIO):
        return bool(left.getvalue() == right.getvalue())
    if isinstance(left, dict):
        pairs = list(zip(left.items(), right.items(), strict=True))
        return len(left) == len(right) and all(same(a, b) and same(x, y) for (a, x), (b, y) in pairs)
    if isinstance(left, (list, tuple, deque)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, (float, complex, np.generic)):
        return repr(left) == repr(right)
    return bool(left == right)


@pytest.mark.unit
@pytest.mark.parametrize("name", VALUES)
def test_values_come_back_as_they_were(name: str) -> None:
    packed = pack({name: VALUES[name]}, "client_state")
    through_json = json.loads(json.dumps(packed.json, allow_nan=False))
    assert same(unpack(through_json, packed.tensors.__getitem__), {name: VALUES[name]})


@pytest.mark.unit
def test_subclasses_of_texts_and_numbers_come_back_plain() -> None:
    back = unpack(pack({"version": torch.__version__}, "client_state").json, nothing)
    assert back == {"version": str(torch.__version__)}
    assert type(back["version"]) is str


@pytest.mark.unit
def test_later_changes_do_not_reach_what_was_packed() -> None:
    tensor, array = torch.zeros(2), np.zeros(2)
    packed = pack([tensor, array], "x")
    tensor.add_(1)
    array += 1
    assert [float(held.sum()) for held in packed.tensors.values()] == [0.0, 0.0]


class Colour(Enum):
    RED = 1


class Level(IntEnum):
    LOW = 1


Pair = namedtuple("Pair", "a b")  # defined by a script

REFUSED: list[tuple[Any, str]] = [
    (object(), r"client_state\.x is of type object"),
    ([1, {"y": Path("a")}], r"client_state\.x\[1\]\.y is of type pathlib\.\w*Path.*pass str"),
    (Pair(1, 2), r"client_state\.x is of type .*Pair.*pass tuple"),
    (defaultdict(int), r"client_state\.x is of type collections\.defaultdict.*pass dict"),
    (Colour.RED, r"client_state\.x is of type .*Colour.*save its value"),
    ({Level.LOW: 1}, r"the key .* of client_state\.x is of type .*Level"),
    (nn.Linear(1, 1), r"client_state\.x is of type torch.*Linear.*save its state_dict"),
    (nn.Parameter(torch.ones(2)), r"client_state\.x is of type .*Parameter.*save its detach"),
    (torch.zeros(2).to_sparse(), r"client_state\.x is of type torch\.Tensor.*only dense"),
    (np.array(["a"]), r"client_state\.x is of type numpy\.ndarray"),
    (np.datetime64("2020-01-01"), r"client_state\.x is of type numpy\.datetime64"),
    (lambda: 1, r"client_state\.x is of type function"),
    (range(3), r"client_state\.x is of type range"),
]


@pytest.mark.unit
@pytest.mark.parametrize(("value", "found"), REFUSED, ids=lambda value: str(value)[:20])
def test_other_types_are_refused_with_their_place(value: Any, found: str) -> None:
    with pytest.raises(UnpackableError, match=found):
        pack({"x": value}, "client_state")


@pytest.mark.unit
def test_what_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UnpackableError, match="nested more than"):
        pack({"x": loop}, "client_state")


@pytest.mark.unit
@pytest.mark.parametrize(
    "stored",
    [
        {TAG: ["unknown", 1]}, {TAG: []}, {TAG: 3}, {TAG: ["set", [[1]]]}, {TAG: ["tensor", 5]},
        {TAG: ["numpy", ["object", "AA=="]]}, {TAG: ["numpy", ["float32", ""]]}, {TAG: ["bytes", 3]},
        {TAG: ["int", "__import__('os')"]}, {TAG: ["dict", [[1]]]},
    ],
)  # fmt: skip
def test_what_was_never_packed_is_an_error_of_one_kind(stored: Any) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        unpack(stored, nothing)


CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}}


def saved_and_loaded(folder: str, in_background: bool) -> list[str]:
    engine, *_ = zt.initialize(model=nn.Linear(4, 4), config=CONFIG)
    engine.save_checkpoint(folder, client_state=VALUES, asynchronous=in_background)
    engine.wait_for_checkpoint()
    _, found = engine.load_checkpoint(folder)
    assert list(found) == list(VALUES)
    return [name for name, value in VALUES.items() if not same(found[name], value)]


@pytest.mark.ranks
@pytest.mark.parametrize("in_background", [False, True])
def test_a_checkpoint_keeps_them(tmp_path: Path, in_background: bool) -> None:
    assert run_ranks(2, saved_and_loaded, str(tmp_path), in_background) == [[], []]


def refused(folder: str, only_rank: int) -> str:
    """Give one rank an unstorable state: no rank writes, all get the error, and the next save works."""
    engine, *_ = zt.initialize(model=nn.Linear(4, 4), config=CONFIG)
    bad = {"best": {"model": nn.Linear(1, 1)}} if engine.rank == only_rank else {}
    try:
        engine.save_checkpoint(folder, client_state=bad)
    except CheckpointError as error:
        assert not Path(folder).exists()
        engine.comm.gather_record([0.0])
        engine.save_checkpoint(folder, client_state={"best": 1})
        return str(error)
    return "nothing raised"


@pytest.mark.ranks
@pytest.mark.parametrize("only_rank", [0, 1])
def test_a_refusal_is_the_same_on_every_rank_and_before_anything_is_written(
    tmp_path: Path, only_rank: int
) -> None:
    first, second = run_ranks(2, refused, str(tmp_path / "run"), only_rank)
    assert first == second
    assert "client_state.best.model is of type torch.nn.modules.linear.Linear" in first
    assert "save its state_dict()" in first


@pytest.mark.ranks
def test_a_client_state_that_is_no_dictionary_is_refused(tmp_path: Path) -> None:
    engine, *_ = zt.initialize(model=nn.Linear(4, 4), config=CONFIG)
    with pytest.raises(CheckpointError, match="client_state must be a dictionary; got list"):
        engine.save_checkpoint(tmp_path, client_state=[1])  # type: ignore[arg-type]

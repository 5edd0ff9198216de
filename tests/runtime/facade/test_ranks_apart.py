"""Ranks that part are named long before the watchdog's bound, and a rank that is late is not accused."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import zerotrain.runtime as zt
from tests.support.device import TRANSPORTS
from tests.support.ports import free_port
from tests.support.ranks import run_ranks, use_transport
from tests.support.tiers import with_slow_rows
from zerotrain.runtime.comm.group import CommError
from zerotrain.runtime.comm.mismatch import CALL, Progress, certain_failure, diagnose

A, B, SAVE = "all_gather for 'a'", "all_gather for 'b'", f"{CALL}save_checkpoint"


def progress(*recent: str, waiting: bool = False, **more: Any) -> Progress:
    numbered = {1 + index: what for index, what in enumerate(recent)}
    started = len(recent)
    return Progress(started=started, recent=numbered, waiting_for=started if waiting else None, **more)


def known(mine: Progress, theirs: Progress) -> str | None:
    return certain_failure(mine, {1: theirs}, rank=0)


@pytest.mark.unit
def test_a_call_on_one_rank_alone_is_named_on_both() -> None:
    caller, other = progress(A, SAVE, waiting=True), progress(A, B, waiting=True)
    mine = known(caller, other)
    assert mine is not None
    assert mine.startswith(
        f"rank 1 started {B} while rank 0 called save_checkpoint(); call save_checkpoint()"
    )
    theirs = known(other, caller)
    assert theirs is not None
    assert theirs.startswith(f"rank 1 called save_checkpoint() while rank 0 started {B}; ")


@pytest.mark.unit
def test_a_rank_that_ended_or_raised_is_named_where_it_is_missing() -> None:
    mine = progress(A, B, waiting=True)
    assert (
        known(mine, progress(A, end="raised ValueError: x"))
        == "another rank ended or left: rank 1 raised ValueError: x"
    )
    ended = progress(A, end="closed its engine", error="KeyError: 'y'")
    found = known(mine, ended)
    assert found == "another rank ended or left: rank 1 closed its engine (its last error: KeyError: 'y')"
    assert known(mine, progress(A, B, end="ended")) is None, "it was there"
    assert known(mine, progress(A, error="KeyError: 'y'")) is None, "it may have handled that"
    found = diagnose(mine, {1: progress(A, end="ended")}, rank=0, waited=2.0, bound=600.0)
    assert found == f"{B} on rank 0 has waited 2 s and cannot end: another rank ended or left: rank 1"


@pytest.mark.unit
def test_a_loader_that_ended_is_named_only_where_its_rank_can_never_come() -> None:
    mine = progress(A, B, waiting=True, batches=(0, 3, False))
    found = known(mine, progress(A, batches=(0, 2, True)))
    assert found is not None
    assert found.startswith("rank 1's loader ended after 2 batches of epoch 0, and rank 0 is at batch 3;")
    for batches in ((0, 2, False), (0, 3, True), (1, 2, True), None):
        assert known(mine, progress(A, batches=batches)) is None, batches
    assert known(mine, progress(A, B, batches=(0, 2, True))) is None, "it is in this collective"
    without = progress(A, B, waiting=True)
    assert known(without, progress(A, batches=(0, 2, True))) is None, "another loader may go on"


@pytest.mark.unit
def test_all_of_it_survives_the_store() -> None:
    for mine in (progress(A, end="x", error="y", batches=(1, 2, True)), progress(SAVE, waiting=True)):
        assert Progress.from_json(mine.to_json()) == mine


def start(stage: int = 3, **more: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(3)))
    return zt.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "SGD"},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        },
        **more,
    )


def step(engine: Any, rows: torch.Tensor | None = None) -> None:
    engine.backward(engine(torch.ones(2, 40) if rows is None else rows).mean())
    engine.step()


def train(engine: Any, steps: int) -> None:
    for _ in range(steps):
        step(engine)


def what_happens(action: Any) -> str:
    """Return the error that ends the action. The watchdog's bound is the default of ten minutes."""
    assert "ZEROTRAIN_WATCHDOG_SECONDS" not in os.environ
    try:
        action()
    except CommError as error:
        found = str(error)
    else:
        found = "nothing raised"
    assert "gloo" not in found
    assert "onnection" not in found
    return found


def call_alone(folder: str, stage: int, method: str) -> str:
    engine, *_ = start(stage)
    step(engine)

    def act() -> None:
        if engine.rank == 0:
            getattr(engine, method)(folder)
        for _ in range(3):
            step(engine)

    return what_happens(act)


@pytest.mark.ranks
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_save_on_one_rank_alone(tmp_path: Path, stage: int, transport: str) -> None:
    with use_transport(transport):
        found = run_ranks(2, call_alone, str(tmp_path), stage, "save_checkpoint")
    assert "rank 1 started" in found[0]
    assert "while rank 0 called save_checkpoint()" in found[0]
    assert "rank 0 called save_checkpoint() while rank 1 started" in found[1]
    assert not any(tmp_path.iterdir())


@pytest.mark.ranks
@pytest.mark.parametrize("method", ["load_checkpoint", "save_16bit_model"])
def test_other_calls_on_one_rank_alone(tmp_path: Path, method: str) -> None:
    for text in run_ranks(3, call_alone, str(tmp_path), 3, method):
        assert f"rank 0 called {method}()" in text


def other_store() -> Any:
    """Store through which ranks report to each other that a case is over."""
    c10d: Any = dist.distributed_c10d
    return c10d.PrefixStore("test", c10d._get_default_store())


def end_in_its_way(way: str) -> str:
    """Train two steps on rank 1 and no more; rank 0 would train on."""
    engine, *_ = start(stage=2)
    for _ in range(2):
        step(engine)
    if engine.rank == 0:
        found = what_happens(lambda: train(engine, 3))
        other_store().set("over", "1")
        return found
    if way == "raises":
        try:
            raise KeyError("no such file")
        except KeyError:
            sys.excepthook(*sys.exc_info())  # as the interpreter does
    elif way == "closes":
        engine.close()
    else:
        try:
            engine.backward(engine(torch.ones(2, 41)).mean())
        except RuntimeError:
            engine.close()
    other_store().wait(["over"])
    return ""


@pytest.mark.ranks
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("raises", "rank 1 raised KeyError: 'no such file'"),
        ("closes", "rank 1 closed its engine"),
        ("fails in forward", "mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_a_rank_that_comes_no_more(way: str, expected: str, transport: str) -> None:
    with use_transport(transport):
        message = run_ranks(2, end_in_its_way, way)[0]
    assert expected in message
    if way == "fails in forward":
        assert "rank 1 closed its engine (its last error: RuntimeError: " in message


PROGRAM = """
import os, sys, torch
import zerotrain.runtime as zt
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"}}
config["zero_optimization"] = {"stage": 2}
engine, *_ = zt.initialize(model=torch.nn.Linear(40, 40), config=config)
for index in range(5):
    if engine.rank == 1 and index == 2:
        if sys.argv[1] == "raises":
            raise ValueError("sample 7 cannot be decoded")
        if sys.argv[1] == "is killed":
            os.kill(os.getpid(), 9)
        sys.exit(0)
    engine.backward(engine(torch.ones(2, 40)).mean())
    engine.step()
"""


@pytest.mark.ranks
@pytest.mark.parametrize("transport", with_slow_rows(["shared", "gloo"], quick=["shared"]))
@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("raises", "rank 1 raised ValueError: sample 7 cannot be decoded"),
        ("is killed", "another rank ended or left: rank 1\n"),
        ("exits", "another rank ended or left: rank 1\n"),
    ],
)
def test_a_process_that_is_gone(tmp_path: Path, way: str, expected: str, transport: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared = {**os.environ, **meeting, "WORLD_SIZE": "2"}
    shared |= {"ZEROTRAIN_TRANSPORT": transport, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, program, way],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=300)[1] for process in ranks]
    assert "CommError" in errors[0]
    assert expected in errors[0]


def late(seconds: float) -> str:
    engine, *_ = start(stage=3)
    step(engine)
    if engine.rank == 1:
        time.sleep(seconds)
    return what_happens(lambda: step(engine))


@pytest.mark.ranks
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_is_late_is_not_accused(transport: str) -> None:
    """The rank is late for longer than any case above takes."""
    with use_transport(transport):
        assert run_ranks(2, late, 6.0) == ["nothing raised"] * 2


def uneven(sizes: list[int], then: str, folder: str) -> str:
    size = sizes[dist.get_rank()]
    engine, _, loader, _ = start(stage=2, training_data=TensorDataset(torch.ones(size, 40)))

    def act() -> None:
        for (rows,) in loader:
            step(engine, rows)
        if then == "saves":
            engine.save_checkpoint(folder)
        elif engine.rank == 1:
            other_store().wait(["over"])

    found = what_happens(act)
    other_store().set("over", "1")
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_loader_that_ends_early(transport: str, tmp_path: Path) -> None:
    with use_transport(transport):
        found = run_ranks(2, uneven, [12, 8], "waits", str(tmp_path))
        # Both loaders give all they have; the sampler of the short one has fewer.
        assert "rank 1's loader ended after 2 batches of epoch 0, and rank 0 is at batch 3" in found[0]
        assert found[1] == "nothing raised", "it waits outside of the engine"
        found = run_ranks(2, uneven, [12, 8], "saves", str(tmp_path))
    assert "rank 1 called save_checkpoint() while rank 0 started" in found[0]
    assert "while rank 1 called save_checkpoint()" in found[1]


def empty_batch() -> list[str]:
    engine, *_ = start(stage=2)
    step(engine)
    rows = torch.ones(0 if engine.rank == 1 else 2, 40)
    if engine.rank == 0:
        found = what_happens(lambda: step(engine, rows))
        other_store().set("over", "1")
        return [found]
    try:
        step(engine, rows)
    except ValueError as error:
        engine.close()
        other_store().wait(["over"])
        return [str(error)]
    return []


@pytest.mark.ranks
def test_an_empty_batch_is_named_where_its_loss_is_no_number() -> None:
    (first,), (raised,) = run_ranks(2, empty_batch)
    assert raised.startswith("the batch of rank 1 has no samples (shapes [(0, 40)]), so its loss is nan")
    assert "rank 1 closed its engine (its last error: ValueError: the batch of rank 1 has no samples" in first


def empty_sum() -> list[bool]:
    """Take a sum as the loss: it is zero for no rows, which is no error."""
    engine, *_ = start(stage=2)
    engine.backward(engine(torch.ones(0 if engine.rank == 1 else 2, 40)).sum())
    return [engine.step().skipped]


@pytest.mark.ranks
def test_an_empty_batch_with_a_finite_loss_trains() -> None:
    assert run_ranks(2, empty_sum) == [[False], [False]]

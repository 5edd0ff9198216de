"""Ranks that use several engines in different orders, or do not all come to `initialize`, are named early."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.device import TRANSPORTS
from tests.support.forkserver import CONTEXT
from tests.support.ports import free_port
from tests.support.ranks import run_ranks, use_transport
from zerotrain.runtime.comm.group import CommError
from zerotrain.runtime.comm.mismatch import CALL, Progress, different_calls, waits_elsewhere

BOUND_S = 5.0
"""Seconds within which ranks that part are named on an idle machine."""

A, B = "all_gather for 'a'", "all_gather for 'b'"


def progress(*recent: str, waiting: bool = False, thread: int = 1) -> Progress:
    numbered = {1 + index: what for index, what in enumerate(recent)}
    started = len(recent)
    return Progress(started=started, recent=numbered, waiting_for=started if waiting else None, thread=thread)


def found(mine: Progress, missing: Progress, here: Progress, there: Progress) -> str | None:
    return waits_elsewhere(mine, {1: missing}, rank=0, here=here, there={1: there})


@pytest.mark.unit
def test_a_rank_in_another_engine_is_named_only_where_neither_can_go_on() -> None:
    mine, missing, here, there = progress(A, waiting=True), progress(), progress(), progress(B, waiting=True)
    text = found(mine, missing, here, there)
    assert text is not None
    assert text.startswith(
        f"rank 1 waits in another engine, in {B}, while rank 0 started {A}; use the engines"
    )
    assert found(mine, progress(A), here, there) is None, "it was here already"
    assert found(mine, missing, progress(B), there) is None, "this rank was there already"
    assert found(mine, missing, here, progress(B)) is None, "it does not wait"
    assert found(progress(A), missing, here, there) is None, "this rank does not wait"
    assert found(mine, missing, progress(thread=2), there) is None, "another thread of this rank may come"
    assert found(mine, replace(missing, thread=2), here, there) is None, "another thread of it may come"


@pytest.mark.unit
def test_a_whole_call_is_named_as_such() -> None:
    text = found(
        progress(f"{CALL}initialize", waiting=True), progress(), progress(), progress(B, waiting=True)
    )
    assert text is not None
    assert text.startswith(f"rank 1 started {B} while rank 0 called initialize(); call initialize() on every")
    text = different_calls(1, ["save_checkpoint", "load_checkpoint", "save_checkpoint"])
    assert text.startswith("rank 0 called save_checkpoint() while rank 1 called load_checkpoint(); call ")


def start(stage: int = 3, *, trains: bool = True) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(2))).requires_grad_(trains)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return zt.initialize(model=model, config=config)[0]


def step(engine: Any, times: int = 1) -> None:
    for _ in range(times):
        engine.backward(engine(torch.ones(2, 40)).mean())
        engine.step()


def evaluate(engine: Any, times: int) -> None:
    with torch.no_grad():
        for _ in range(times):
            engine(torch.ones(2, 40))


def crossed(engine: Any, folder: str) -> None:
    """Step two engines, on each rank in another order."""
    other = start()
    for each in (engine, other) if engine.rank else (other, engine):
        step(each)


def uneven_teacher(engine: Any, folder: str) -> None:
    evaluate(start(trains=False), 2 + engine.rank)
    step(engine, 2)


def one_initializes(engine: Any, folder: str) -> None:
    if engine.rank == 0:
        start()
    step(engine, 2)


def one_loads(engine: Any, folder: str) -> None:
    engine.save_checkpoint(folder)
    (engine.save_checkpoint if engine.rank else engine.load_checkpoint)(folder)


def one_exports(engine: Any, folder: str) -> None:
    (engine.save_checkpoint if engine.rank else engine.save_16bit_model)(folder)


CASES = {
    "crossed": (crossed, "use the engines of the program in the same order"),
    "uneven teacher": (uneven_teacher, "use the engines of the program in the same order"),
    "one initializes": (one_initializes, "called initialize()"),
    "one loads": (one_loads, "called load_checkpoint()"),
    "one exports": (one_exports, "called save_16bit_model()"),
}


def what_happens(case: str, folder: str) -> tuple[str, float]:
    """Return the error that a case ends with, and after how many seconds."""
    assert "ZEROTRAIN_WATCHDOG_SECONDS" not in os.environ, "its default is ten minutes"
    engine = start()
    step(engine)
    began = time.monotonic()
    try:
        CASES[case][0](engine, folder)
    except CommError as error:
        return str(error), time.monotonic() - began
    return "nothing raised", 0.0


@pytest.mark.ranks
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("case", CASES)
def test_both_ranks_end_early(case: str, transport: str, tmp_path: Path) -> None:
    with use_transport(transport):
        ends = run_ranks(2, what_happens, case, str(tmp_path))
    # The rank that raises first leaves, and the other one may find nothing but that.
    assert any(CASES[case][1] in text for text, _ in ends), ends
    for text, seconds in ends:
        assert CASES[case][1] in text or "another rank ended or left" in text
        assert "gloo" not in text
        assert seconds < 2 * BOUND_S


def two_values() -> list[float]:
    """Return what a policy and its teacher compute, which are open side by side."""
    policy, teacher = start(), start(trains=False)
    for _ in range(2):
        evaluate(teacher, 1)
        step(policy)
    with torch.no_grad():
        values = [float(each(torch.ones(2, 40)).sum()) for each in (policy, teacher)]
    teacher.close()
    step(policy)
    policy.close()
    return values


@pytest.mark.ranks
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_engines_side_by_side_compute_the_same_on_every_rank(transport: str) -> None:
    with use_transport(transport):
        first, second = run_ranks(2, two_values)
    assert first == second


def late_for_both() -> str:
    """Let a rank be late for both engines, which it then uses in the order of the other rank."""
    engine, other = start(), start()
    if engine.rank == 1:
        time.sleep(BOUND_S)
    step(engine)
    step(other)
    return "trained"


@pytest.mark.ranks
def test_a_late_rank_with_two_engines_is_not_accused() -> None:
    assert run_ranks(2, late_for_both) == ["trained"] * 2


def rank_main(rank: int, way: str, port: int, results: Any) -> None:
    """Be a rank that `multiprocessing` started, which runs neither `sys.excepthook` nor `atexit`."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    zt.init_distributed()
    if rank == 1 and way == "before":
        raise ValueError("no such data")
    engine = start()
    step(engine)
    if rank == 1:
        if way == "exits":
            try:
                engine(torch.ones(2, 41))
            except RuntimeError:
                os._exit(3)
        if way == "exit code":
            sys.exit(3)
        raise ValueError("no such data")
    try:
        step(engine, 3)
    except CommError as error:
        results.put(str(error))


ENDS = {
    "before": "another rank ended or left: rank 1",
    "raises": "rank 1 raised ValueError: no such data",
    "exits": "rank 1 (its last error: RuntimeError: mat1 and mat2",
    "exit code": "another rank ended or left: rank 1",
}


@pytest.mark.ranks
@pytest.mark.parametrize("way", ENDS)
def test_the_end_of_a_process_of_multiprocessing(way: str) -> None:
    results = CONTEXT.Queue()
    port = free_port()
    ranks = [CONTEXT.Process(target=caught_main, args=(rank, way, port, results)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=120)
    assert ENDS[way] in results.get(timeout=5)


def caught_main(rank: int, way: str, port: int, results: Any) -> None:
    try:
        rank_main(rank, way, port, results)
    except CommError as error:
        results.put(str(error))

"""An error of an update in the background is final, keeps its exit code and hangs no rank."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import zerotrain.runtime as zt
from tests.support.just_in_time import PATIENCE_S, Run, batch, engine_of, pause_of, train_step
from tests.support.ranks import run_ranks
from zerotrain.contract.exit_codes import ExitCode
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.offload.updater import UpdateAbandoned, Updater
from zerotrain.runtime.optim.update import StepUpdate
from zerotrain.runtime.train.exits import exit_code_of
from zerotrain.runtime.zero.pending import UpdateInterrupted

ROOT = Path(__file__).parents[3]


class Broken(RuntimeError):
    """The error after a disk that returns other bytes."""

    exit_code = ExitCode.SPILL_INTEGRITY


def breaks() -> None:
    raise Broken("tile 3 of unit 'blocks.0' is not what was written")


def weight_of(engine: Engine) -> torch.nn.Parameter:
    return engine.module.get_parameter("blocks.1.weight")


LATER: dict[str, Callable[[Engine, Path], object]] = {
    "forward": lambda engine, _: engine(batch(1)),
    "step": lambda engine, _: engine.step(),
    "zero_grad": lambda engine, _: engine.zero_grad(),
    "save": lambda engine, folder: engine.save_checkpoint(folder / "saved"),
    "load": lambda engine, folder: engine.load_checkpoint(folder / "saved"),
    "export": lambda engine, folder: engine.save_16bit_model(folder / "exported"),
    "synchronize": lambda engine, _: engine.synchronize(),
    "read": lambda engine, _: weight_of(engine).detach().sum(),
    "state": lambda engine, _: zt.get_local_fp32(weight_of(engine)),
    "whole": lambda engine, _: engine.module_state_dict(),
    "memory": lambda engine, _: engine.memory_status(),
    "close": lambda engine, _: engine.close(),
}


@pytest.mark.unit
@pytest.mark.parametrize("just_in_time", [True, False])
def test_every_later_call_raises_it_again(just_in_time: bool, tmp_path: Path) -> None:
    with engine_of(Run(just_in_time=just_in_time)) as engine:
        train_step(engine, 0)
        engine.synchronize()
        if just_in_time:
            pause_of(engine, breaks)
            train_step(engine, 1)
        else:
            engine.optimizer.begin_step = breaks  # type: ignore[assignment,method-assign]
            with pytest.raises(Broken):
                train_step(engine, 1)
        for name, call in LATER.items():
            if not just_in_time and name == "read":
                continue  # without background work no error is hidden
            with pytest.raises(Broken) as caught:
                call(engine, tmp_path)
            assert exit_code_of(caught.value) == ExitCode.SPILL_INTEGRITY, name
            depth = len(caught.traceback)
            assert depth < 40, "tracebacks grow"
        assert not (tmp_path / "saved").exists()
        assert not (tmp_path / "exported").exists()


@pytest.mark.unit
def test_an_error_in_the_middle_of_forward_is_raised_there() -> None:
    with engine_of(Run()) as engine:
        train_step(engine, 0)
        engine.synchronize()
        units = iter(range(10))
        pause_of(engine, lambda: breaks() if next(units) == 2 else None)
        train_step(engine, 1)
        ran: list[int] = []
        for index in range(4):
            block = engine.module.get_submodule(f"blocks.{index}")
            block.register_forward_hook(lambda *_, index=index: ran.append(index))
        with pytest.raises(Broken):
            engine(batch(2))
        assert ran == [0, 1]
        with pytest.raises(Broken):
            engine.close()


@pytest.mark.unit
def test_closing_twice_and_dropping_an_engine_end_the_thread() -> None:
    with engine_of(Run()) as engine:
        train_step(engine, 0)
        updater = engine.pipeline.executor.updater
        assert updater is not None
        thread = updater._thread
        assert thread is not None
        engine.close()
        updater.close()
        assert not thread.is_alive()


class Reader(Dataset[torch.Tensor]):
    """Samples that read the model."""

    def __init__(self, engine: Engine) -> None:
        self.weight = weight_of(engine)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.weight.detach().clone()


@pytest.mark.ranks
def test_a_forked_worker_raises_that_it_cannot_wait() -> None:
    with engine_of(Run()) as engine:
        train_step(engine, 0)
        loader = DataLoader(Reader(engine), num_workers=1, multiprocessing_context="fork")
        with pytest.raises(RuntimeError, match="before the fork"):
            next(iter(loader))
        engine.synchronize()
        loader = DataLoader(Reader(engine), num_workers=1, multiprocessing_context="fork")
        assert torch.equal(next(iter(loader))[0], weight_of(engine).detach())


LEAVING = """
import sys, threading, time
from tests.support.just_in_time import PATIENCE_S, Run, batch, engine_of, pause_of, train_step
from tests.support.ranks import run_ranks

context = engine_of(Run(tier=sys.argv[1]))
engine = context.__enter__()
engine.close = lambda: None
train_step(engine, 0)
printed = threading.Event()
pause_of(engine, lambda: (printed.wait(), time.sleep(0.1)))
train_step(engine, 1)
print("leaving", bool(engine.core.updates), flush=True)
printed.set()
if sys.argv[2] == "error":
    raise SystemExit(7)
"""


@pytest.mark.ranks
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize(("way", "code"), [("end", 0), ("error", 7)])
def test_a_process_ends_while_an_update_goes_on(tier: str, way: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore:bf16 on this CPU", "-c", LEAVING, tier, way],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "leaving True\n", "")


def interrupts() -> None:
    raise KeyboardInterrupt


@pytest.mark.unit
def test_an_interrupted_update_is_final(tmp_path: Path) -> None:
    """Some units are then of the new step and others of the old one."""
    with engine_of(Run(just_in_time=False)) as engine:
        train_step(engine, 0)
        seen: list[str] = []
        run = StepUpdate.run

        def run_some(update: StepUpdate, name: str) -> None:
            seen.append(name)
            if len(seen) == 3:
                interrupts()
            run(update, name)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StepUpdate, "run", run_some)
            with pytest.raises(KeyboardInterrupt):
                train_step(engine, 1)
        for name in ("zero_grad", "save", "forward", "close"):
            with pytest.raises(UpdateInterrupted, match="last checkpoint"):
                LATER[name](engine, tmp_path)
        assert not list(tmp_path.rglob("manifest.json"))


def interrupted_publication(stage: int) -> list[str]:
    """Return what a rank raises whose wait for the third unit was interrupted, with gathers under way."""
    raised = []
    with engine_of(Run(stage=stage, dtype="fp32")) as engine:
        train_step(engine, 0)
        engine.synchronize()
        train_step(engine, 1)
        updates = engine.core.updates
        tickets: Any = updates._tickets
        third = tickets[updates._publication[2]]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(updates, "_wait", lambda one: interrupts() if one is third else one.wait())
            for call in (engine.synchronize, engine.synchronize):
                try:
                    call()
                except BaseException as error:
                    raised.append(type(error).__name__)
        updates.failure = None
        engine.synchronize()
    return raised


@pytest.mark.ranks
def test_an_interrupted_publication_is_final() -> None:
    for raised in run_ranks(2, interrupted_publication, 1):
        assert raised == ["KeyboardInterrupt", "UpdateInterrupted"]


@pytest.mark.unit
def test_closing_gives_up_what_has_not_begun() -> None:
    """A hanging disk must not delay a process once per unit."""
    updater, began, ran = Updater(), Event(), list[str]()

    def run(name: str) -> None:
        began.set()
        assert updater._is_closing.wait(PATIENCE_S)
        ran.append(name)

    tickets, stored = updater.submit(["a", "b", "c"], run, lambda: None)
    assert began.wait(PATIENCE_S)
    updater.close()
    tickets["a"].wait()
    for ticket in (tickets["b"], tickets["c"], stored):
        with pytest.raises(UpdateAbandoned):
            ticket.wait()
    assert ran == ["a"]

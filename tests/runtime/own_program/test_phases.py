"""Phases and durable checkpoints of a user's program under the real launcher.

Rank 1 comes late to each collective, so that rank 0 waits in it while the test looks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.launcher import RunningLauncher, eventually
from tests.support.own_programs import is_held, launched_program, open_gate, wait_for
from zerotrain.runtime.checkpoint.names import committed

pytestmark = pytest.mark.ranks


PROGRAM = """
from zerotrain.runtime.checkpoint import CheckpointNotWritable

with zt.ProgressReporter(total_steps=9) as reporter:
    with reporter.rendezvous():
        hold("rendezvous")
        engine = build()
    reporter.watch(engine)
    hold("load")
    engine.load_checkpoint(CHECKPOINTS)
    hold("first")
    reporter.step(train(engine))
    hold("save")
    engine.save_checkpoint(CHECKPOINTS)
    hold("pause")
    with reporter.pause():
        hold("pause-ends", ranks=(0,))
    try:
        engine.save_checkpoint(__file__)
    except CheckpointNotWritable:
        labels = {"job_name": "demo", "rank": str(RANK)}
        read = reporter.registry.get_sample_value
        assert read("zerotrain_checkpoint_failures_total", labels) == 1, "an alert rests on it"
    hold("refused")
    engine.save_checkpoint(CHECKPOINTS, "aside", save_latest=False)
    hold("aside", ranks=(0, 1))
    reporter.step(train(engine))
    engine.save_checkpoint(CHECKPOINTS, asynchronous=True)
    while engine.last_save.step != 2:
        reporter.step(train(engine))
        time.sleep(0.01)
    hold("background", ranks=(0, 1))
    reached = engine.global_steps
    engine.save_checkpoint(CHECKPOINTS, asynchronous=True)
    hold("waits")
    assert engine.wait_for_checkpoint().step == reached
    hold("waited", ranks=(0, 1))
    reporter.step(train(engine))
    engine.save_checkpoint(CHECKPOINTS, asynchronous=True)
    engine.close()
"""


def first_checkpoint(launcher: RunningLauncher, rank: int) -> dict[str, Any]:
    """Wait until a rank reports a checkpoint; while it saves, it reports the same phase and step without."""

    def is_reported() -> bool:
        return launcher.report()["ranks"][rank]["checkpoint"] is not None

    eventually(is_reported, what=f"rank {rank} reports a checkpoint")
    return dict(wait_for(launcher, rank, step=1)["checkpoint"])


def test_phases_and_checkpoints_are_reported_without_a_further_call(tmp_path: Path) -> None:
    with launched_program(tmp_path, PROGRAM) as launcher:

        def rank_0_meets(gate: str, **values: object) -> None:
            eventually(lambda: is_held(tmp_path, gate), what=f"rank 1 stands before {gate}")
            wait_for(launcher, 0, **values)
            wait_for(launcher, 1, phase=BEFORE[gate])
            open_gate(tmp_path, gate)

        rank_0_meets("rendezvous", phase="rendezvous", total_steps=9)
        rank_0_meets("load", phase="init", step=0)
        rank_0_meets("first", phase="first_step", step=0, checkpoint=None, resumed_from=None)
        rank_0_meets("save", phase="checkpoint", step=1, checkpoint=None)
        eventually(lambda: is_held(tmp_path, "pause"), what="the save is over")
        (saved,) = committed(tmp_path / "checkpoints")
        wait_for(launcher, 0, phase="checkpoint")  # the pause: a long evaluation reports the same
        for rank in (0, 1):
            progress = first_checkpoint(launcher, rank)
            assert (progress["step"], progress["path"]) == (1, str(saved.path))
        wait_for(launcher, 1, phase="step")
        for gate in ("pause", "pause-ends"):
            open_gate(tmp_path, gate)
        eventually(lambda: is_held(tmp_path, "refused"), what="a save that fails")
        assert wait_for(launcher, 1, phase="step")["checkpoint"]["step"] == 1
        open_gate(tmp_path, "refused")
        eventually(lambda: is_held(tmp_path, "aside", 0), what="a checkpoint that no load finds by itself")
        assert wait_for(launcher, 0, phase="step")["checkpoint"]["path"] == str(saved.path)
        open_gate(tmp_path, "aside")
        eventually(lambda: is_held(tmp_path, "background", 0), what="the save in the background is over")
        progress = wait_for(launcher, 0, phase="step")["checkpoint"]
        assert (progress["step"], Path(progress["path"]).name) == (2, "step-0000000002-attempt-3")
        open_gate(tmp_path, "background")
        eventually(lambda: is_held(tmp_path, "waits"), what="rank 1 does not wait yet")
        wait_for(launcher, 0, phase="checkpoint")
        open_gate(tmp_path, "waits")
        eventually(lambda: is_held(tmp_path, "waited", 0), what="it was waited for")
        progress = wait_for(launcher, 0, phase="step")
        assert progress["checkpoint"]["step"] == progress["step"] > 2
        open_gate(tmp_path, "waited")
        code, output = launcher.finish()
        assert code == 0, output
        ended = launcher.termination
        assert ended.checkpoint is not None
        assert ended.checkpoint.step == ended.step == progress["step"] + 1  # durable within close()


BEFORE = {"rendezvous": "rendezvous", "load": "init", "first": "init", "save": "step"}
"""Phase of the rank that is late."""

FAILING = """
try:
    with zt.ProgressReporter(total_steps=3) as reporter:
        if RANK == 1:
            raise ValueError("planted")
        time.sleep(600)
except ValueError:
    hold("failed")
    raise
"""


def test_an_exception_is_the_reason_of_the_end_and_no_proper_end(tmp_path: Path) -> None:
    limits = {"peer_grace_s": 0.3, "failing_rank_s": 600.0}
    with launched_program(tmp_path, FAILING, limits=limits) as launcher:
        eventually(lambda: is_held(tmp_path, "failed"), what="rank 1 fails")
        assert wait_for(launcher, 1, total_steps=3)["phase"] == "init"
        open_gate(tmp_path, "failed")
        assert launcher.wait() == 1
        assert (launcher.termination.rank, launcher.termination.exception) == (1, "ValueError: planted")


@pytest.mark.parametrize(("code", "phase"), [(0, "done"), (75, "done"), (3, "init")])
def test_leaving_with_a_code_is_a_proper_end_if_the_code_is(tmp_path: Path, code: int, phase: str) -> None:
    text = f"""
    try:
        with zt.ProgressReporter():
            sys.exit({code})
    finally:
        hold("end")
    """
    with launched_program(tmp_path, text) as launcher:
        eventually(lambda: is_held(tmp_path, "end"), what="rank 1 is about to end")
        assert wait_for(launcher, 1, phase=phase)["step"] == 0
        open_gate(tmp_path, "end")
        assert launcher.wait() == code


OWN_LOOP = """
with zt.ProgressReporter() as reporter:
    model, optimizer = zt.shard(Model(), config())
    engine = optimizer.engine
    reporter.watch(engine)

    def step():
        loss = model(torch.ones(2, 8))
        loss.backward()
        optimizer.step()
        reporter.step(loss)

    hold("first")
    step()
    engine.save_checkpoint(CHECKPOINTS)
    step()
    engine.load_checkpoint(CHECKPOINTS, load_module_only=True)
    hold("weights", ranks=(0, 1))
    hold("load")
    engine.load_checkpoint(CHECKPOINTS)
    hold("back", ranks=(0, 1))
    step()  # the step that the checkpoint was followed by before
    hold("again", ranks=(0, 1))
    engine.close()
    import gc, weakref

    held = weakref.ref(engine)
    del model, optimizer, engine, step
    gc.collect()
    assert held() is None, "what is reported keeps the engine"
    assert zt.ProgressReporter._open is reporter
"""


def test_a_loop_of_ones_own_may_go_back_to_a_checkpoint(tmp_path: Path) -> None:
    """The load is no resume of the attempt, and weights alone are not even another step."""
    with launched_program(tmp_path, OWN_LOOP) as launcher:
        wait_for(launcher, 0, phase="first_step", total_steps=0)
        open_gate(tmp_path, "first")
        eventually(lambda: is_held(tmp_path, "weights", 0), what="the weights are loaded")
        wait_for(launcher, 0, phase="step", step=2, resumed_from=None)
        open_gate(tmp_path, "weights")
        eventually(lambda: is_held(tmp_path, "load"), what="rank 1 does not load yet")
        wait_for(launcher, 0, phase="checkpoint", step=2)
        open_gate(tmp_path, "load")
        eventually(lambda: is_held(tmp_path, "back", 0), what="the checkpoint is loaded")
        progress = wait_for(launcher, 0, phase="step", step=1)
        assert (progress["resumed_from"], progress["checkpoint"]["step"]) == (None, 1)
        open_gate(tmp_path, "back")
        eventually(lambda: is_held(tmp_path, "again", 0), what="it goes on from there")
        wait_for(launcher, 0, phase="step", step=2)
        open_gate(tmp_path, "again")
        code, output = launcher.finish()
        assert code == 0, output

"""No action of a program before its first pass looks like training: its worker is not ready yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launcher import eventually
from tests.support.own_programs import is_held, launched_program, open_gate, wait_for

pytestmark = pytest.mark.ranks


PROGRAM = """
with zt.ProgressReporter() as reporter:
    with reporter.rendezvous():
        engine = build()
        reporter.watch(engine)
        hold("load")
        engine.load_checkpoint(CHECKPOINTS)
        hold("met", ranks=(0, 1))
    with reporter.pause():
        hold("pause", ranks=(0, 1))
    hold("save")
    engine.save_checkpoint(CHECKPOINTS)
    hold("saved", ranks=(0, 1))
    reporter.step(train(engine))
    with reporter.pause():
        hold("later", ranks=(0, 1))
    engine.close()
"""


def test_loads_pauses_and_saves_before_the_first_pass_are_part_of_the_start(tmp_path: Path) -> None:
    with launched_program(tmp_path, PROGRAM) as launcher:

        def rank_0_meets(gate: str, phase: str, rank: int = 0) -> None:
            eventually(lambda: is_held(tmp_path, gate, rank), what=f"rank {rank} stands before {gate}")
            assert wait_for(launcher, 0, phase=phase)["phase"] == phase
            assert (launcher.request("/ready")[0] == 200) == (phase == "checkpoint")
            open_gate(tmp_path, gate)

        rank_0_meets("load", "init", rank=1)  # rank 0 waits in the load
        rank_0_meets("met", "rendezvous")
        rank_0_meets("pause", "init")
        rank_0_meets("save", "init", rank=1)  # rank 0 waits in the save
        rank_0_meets("saved", "init")
        wait_for(launcher, 1, phase="checkpoint")
        rank_0_meets("later", "checkpoint")
        code, output = launcher.finish()
        assert code == 0, output

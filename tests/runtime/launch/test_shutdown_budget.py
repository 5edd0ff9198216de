"""The termination message is written before the kubelet's SIGKILL, however short the pod's grace is."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.launcher import rank_program, spec_for
from zerotrain.contract.worker_environment import grace_of_ranks
from zerotrain.runtime.launch import supervisor as supervising
from zerotrain.runtime.launch.process import RankProcess
from zerotrain.runtime.launch.rank_table import RankTable
from zerotrain.runtime.launch.ranks import RankGroup
from zerotrain.runtime.launch.shutdown_budget import ShutdownBudget
from zerotrain.runtime.launch.stacks import TIMEOUT_S
from zerotrain.runtime.launch.supervisor import Limits, Supervisor

NEVER_S = 86_400.0


@pytest.mark.unit
@pytest.mark.parametrize("pod_s", [1, 2, 5, 10, 15, 25, 30, 120])
@pytest.mark.parametrize("late", [0.0, 0.5, 1.0])
def test_all_waits_of_an_end_fit_into_what_the_ranks_leave(tmp_path: Path, pod_s: int, late: float) -> None:
    """Each wait takes its maximum, from the end of the ranks' grace or from `late` of the margin on."""
    now = [0.0]
    limits = Limits.of(spec_for(tmp_path, ranks=1, grace_seconds=grace_of_ranks(pod_s)))
    patience = ShutdownBudget(lambda: now[0])
    patience.start(limits.stop_grace_s + limits.exit_margin_s)
    now[0] = limits.stop_grace_s + late * limits.exit_margin_s
    left = pod_s - now[0]
    stacks_s = patience.limit(TIMEOUT_S)
    now[0] += 2 * stacks_s
    for most_s in (limits.output_s, limits.output_s):
        now[0] += patience.limit(most_s)
    assert pod_s - now[0] >= left / 4 - 1e-9


@pytest.mark.unit
def test_nothing_is_hurried_while_no_end_is_near() -> None:
    patience = ShutdownBudget(lambda: 0.0)
    assert patience.limit(NEVER_S) == NEVER_S
    patience.start(120.0)
    assert patience.limit(TIMEOUT_S) == TIMEOUT_S
    patience.start(-1.0)
    assert patience.limit(TIMEOUT_S) == 0.0


@pytest.mark.unit
def test_the_stacks_of_ranks_that_do_not_stop_are_waited_for_within_the_margin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another request may wait for stacks without a deadline meanwhile."""
    asked: list[float] = []

    async def collect(_ranks: Sequence[RankProcess], *, timeout_s: float = NEVER_S) -> str:
        asked.append(timeout_s)
        await asyncio.sleep(timeout_s)
        return ""

    class Ranks(RankGroup):
        any_running = True
        killed = asyncio.Event()

        def kill(self) -> None:
            self.killed.set()

    async def run() -> None:
        spec = spec_for(tmp_path, ranks=1)
        limits = Limits(stop_grace_s=0.0, exit_margin_s=0.4)
        supervisor = Supervisor(spec, RankTable(spec, built_in_trainer=True), limits=limits)
        others = asyncio.ensure_future(supervisor.stacks())
        await asyncio.sleep(0)
        supervisor.request_stop()
        await Ranks.killed.wait()
        others.cancel()

    monkeypatch.setattr(supervising, "collect_stacks", collect)
    monkeypatch.setattr(supervising, "RankGroup", Ranks)
    asyncio.run(asyncio.wait_for(run(), timeout=60.0))
    assert asked[0] == NEVER_S
    assert 0.0 <= asked[1] <= 0.1


DRIVER = """
import sys
from zerotrain.runtime.launch import reaper
from zerotrain.runtime.launch.main import main
reaper.end_children = lambda: print(open(sys.argv[1]).read(), flush=True)
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.ranks
def test_the_message_is_written_before_what_ranks_left_behind_is_ended(tmp_path: Path) -> None:
    """A process inside the kernel may end at any later time."""
    spec = spec_for(tmp_path, ranks=1)
    program = rank_program(tmp_path, "sys.exit(66)")
    ended = subprocess.run(
        [sys.executable, "-c", DRIVER, str(spec.termination_log), "--", *program],
        env={"PYTHONPATH": ":".join(sys.path), **spec.to_variable()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 66, ended.stderr
    assert '"code":66' in ended.stdout

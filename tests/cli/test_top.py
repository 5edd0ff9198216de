"""`zerotrain top`: the live view on a headless terminal, and its lines off one."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections.abc import Callable

import pytest
from textual.widgets import DataTable, ProgressBar, Static

from tests.support import job_states
from tests.support.commands import zerotrain
from tests.support.devcluster import PATIENCE_S
from zerotrain.cli.options import Output
from zerotrain.cli.output import show_record
from zerotrain.cli.top import as_record
from zerotrain.cli.top_app import TopApp
from zerotrain.cli.top_table import one_line
from zerotrain.client import ClientError, JobNotFoundError
from zerotrain.client.snapshot import Mark, RankRow, Snapshot

pytestmark = pytest.mark.unit


GIB = 1 << 30


def row(rank: int, **changes: object) -> RankRow:
    fine = RankRow(
        rank=rank,
        pod=f"gpt-2-{rank // 2}",
        node=f"node-{'ab'[rank // 2]}",
        phase="step",
        step=61,
        step_seconds=0.5,
        waits_s=1.0,
        idle_s=0.2,
        gpu_bytes=0,
        host_bytes=GIB,
        spill_bytes=3 * GIB if rank == 3 else 0,
        mark=Mark.FINE,
    )
    return dataclasses.replace(fine, **changes)  # type: ignore[arg-type]


def snapshot(*rows: RankRow, problem: str = "", **status: object) -> Snapshot:
    return Snapshot(time=job_states.NOW, job=job_states.job(status), rows=rows, problem=problem)


def four() -> Snapshot:
    ranks = (row(0), row(1), row(2, step_seconds=0.9, mark=Mark.SLOW), row(3))
    return snapshot(*ranks)


def shown(app: TopApp, name: str) -> str:
    return str(app.query_one(f"#{name}", Static).render())


def ranks_in(app: TopApp) -> list[str]:
    table = app.query_one(DataTable)
    return [str(table.get_row_at(index)[0]) for index in range(table.row_count)]


async def test_the_view_shows_ranks_memory_and_pace_and_sorts() -> None:
    app = TopApp(four, first=four(), every_s=60)
    async with app.run_test(size=(130, 30)) as pilot:
        await pilot.pause()
        assert "ml/gpt  Running" in shown(app, "head")
        assert "20s to go" in shown(app, "head")
        assert re.search(r"host +█+░+ +50 % +1 GiB of 2 GiB", shown(app, "memory"))
        assert re.search(r"nvme +3 GiB \(not planned\)", shown(app, "memory"))
        assert "slowest rank 0.900, fastest 0.500" in shown(app, "paces")
        bar = app.query_one(ProgressBar)
        assert (bar.total, bar.progress) == (100, 61)
        assert ranks_in(app) == ["0", "1", "2", "3"]
        await pilot.press("s")
        assert ranks_in(app)[0] == "2"
        picture = app.export_screenshot()
    assert "straggler" in picture


async def test_a_lost_cluster_keeps_the_picture_and_a_lost_job_ends_it() -> None:
    answers: list[Callable[[], Snapshot]] = []

    def take() -> Snapshot:
        return answers[0]()

    def lost() -> Snapshot:
        raise ClientError("the API server\x1b[2J is away")

    def gone() -> Snapshot:
        raise JobNotFoundError("there is no job gpt")

    app = TopApp(take, first=four(), every_s=60)
    async with app.run_test(size=(130, 30)) as pilot:
        answers[:] = [lost]
        await pilot.press("r")
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert "the API server is away" in shown(app, "problem")
        assert ranks_in(app) == ["0", "1", "2", "3"]
        answers[:] = [lambda: snapshot(row(0, step=62))]
        await pilot.press("r")
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert (shown(app, "problem"), ranks_in(app)) == ("", ["0"])
        answers[:] = [gone]
        await pilot.press("r")
        for _ in range(int(PATIENCE_S / 0.02)):
            if app.return_value is not None:
                break
            await asyncio.sleep(0.02)
    assert app.return_value == "there is no job gpt"


async def test_a_pause_sends_no_requests() -> None:
    asked: list[int] = []

    def take() -> Snapshot:
        asked.append(1)
        return four()

    app = TopApp(take, first=four(), every_s=60)
    async with app.run_test(size=(130, 30)) as pilot:
        await pilot.press("p")
        assert "PAUSED" in shown(app, "head")
        await pilot.press("r")
        await app.workers.wait_for_complete()
        assert asked == []
        await pilot.press("p", "r")
        await app.workers.wait_for_complete()
        assert asked == [1]


async def test_markup_of_a_pod_is_shown_and_not_obeyed() -> None:
    hostile = snapshot(row(0, pod="[red]x[/nope]\x1b]0;title\x07"), problem="[bold]no[/x]")
    app = TopApp(lambda: hostile, first=hostile, every_s=60)
    async with app.run_test(size=(130, 30)) as pilot:
        await pilot.pause()
        assert str(app.query_one(DataTable).get_row_at(0)[9]) == "[red]x[/nope]"
        assert shown(app, "problem") == "[bold]no[/x]"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (four(), "12:00:00 Running attempt 2 step 61/100, 0.5 s a step, loss 2.5, 1,234 tokens/s, "),
        (four(), ", 3.21 TFLOP a step, MFU 41.3%, "),
        (four(), "rank 2 straggler (gpt-2-1)"),
        (snapshot(problem="no worker answers"), "step 60/100, "),
        (snapshot(problem="no worker answers"), ", no worker answers"),
    ],
)
def test_off_a_terminal_it_is_one_line(given: Snapshot, words: str) -> None:
    assert words in one_line(given)


def test_one_look_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    """The keys are an interface: a change of one is a decision made here."""
    show_record(as_record(snapshot(row(0, pod="a\x1b[2J"), row(1, step_seconds=None))), Output.JSON)
    text = capsys.readouterr().out
    found = json.loads(text)
    assert "\x1b" not in text
    assert set(found) == {
        *("name", "namespace", "phase", "attempt", "step", "time", "is_kept", "problem", "ranks", "tiers")
    }
    assert set(found["ranks"][0]) == {
        *("rank", "pod", "node", "phase", "step", "step_seconds", "waits_s", "idle_s", "mark"),
        *("gpu_bytes", "host_bytes", "spill_bytes"),
    }
    assert set(found["tiers"][0]) == {"tier", "planned", "taken"}
    assert (found["name"], found["ranks"][0]["host_bytes"], found["ranks"][1]["step_seconds"]) == (
        *("gpt", GIB, None),
    )


def test_a_record_is_one_look() -> None:
    done = zerotrain("top", "gpt", "-o", "json")
    assert (done.code, done.out) == (2, "")
    assert "give --once" in done.err

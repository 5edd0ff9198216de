"""`zerotrain report`: one page that says what happened, loads nothing, and is robust to any name of a job."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.browser import Browser, find_browser, paper
from tests.support.report_run import HOSTILE, START, run_folder
from zerotrain.cli.errors import CliError
from zerotrain.cli.main import app
from zerotrain.cli.report.cluster import of_job
from zerotrain.cli.report.facts import Tone, kept_points, totals
from zerotrain.cli.report.folders import of_folder
from zerotrain.cli.report.page import render
from zerotrain.client.job import Job
from zerotrain.contract.history import HISTORY_DIR, files_of

TITLES = (
    "Time line",
    "Loss",
    "Gradient norm",
    "Step time",
    "Throughput",
    "MFU",
    "Learning rate",
    "Memory against plan",
    "Attempts",
    "Failures",
)


class Page(HTMLParser):
    """Elements, attributes and headings of a document."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.headings: list[str] = []
        self._in_heading = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self._in_heading = tag in ("h1", "h2")

    def handle_data(self, data: str) -> None:
        if self._in_heading:
            self.headings.append(data)
        self._in_heading = False


def check_self_contained(text: str) -> None:
    """Check that the page has no script, no handler and nothing to fetch, and only links within itself."""
    page = Page(text)
    assert not page.tags & {
        "script",
        "iframe",
        "object",
        "embed",
        "link",
        "img",
        "base",
        "form",
        "foreignobject",
    }
    for name, value in page.attributes:
        assert not name.startswith("on"), (name, value)
        if name in ("src", "href", "xlink:href", "action", "data", "srcset"):
            assert value.startswith("#"), (name, value)
        assert not re.search(r"url\((?!#)", value), value
    assert "default-src 'none'" in text
    assert not re.search(r"@import|url\((?![#\"']*#)", text)


@pytest.mark.unit
@pytest.mark.parametrize(
    "planted",
    [
        "<script>1</script>",
        "<img src='x.png'>",
        "<p onclick='x()'>",
        "<use href='https://example.org/a.svg'/>",
        "<style>@import 'a.css';</style>",
        "<p style='background: url(https://example.org/a.png)'>",
    ],
)
def test_the_check_of_a_page_sees_a_violation(planted: str) -> None:
    with pytest.raises(AssertionError):
        check_self_contained(f"<meta content=\"default-src 'none'\">{planted}")


@pytest.mark.ranks
def test_a_run_with_failures_becomes_one_page(tmp_path: Path) -> None:
    file = tmp_path / "out.html"
    done = CliRunner().invoke(app, ["report", str(run_folder(tmp_path / "run")), "--file", str(file)])
    assert done.exit_code == 0, done.output
    text = file.read_text()
    headings = Page(text).headings
    assert set(TITLES) <= set(headings)
    assert headings[0] == "gpt"
    assert "Attempt 3 ended with 0" in text
    assert "Step 120 of 120" in text
    assert text.count("<svg") == 8
    assert "mathdefault" not in text, "the labels of a logarithmic axis are code"
    assert not re.search(r"#0([1-9a-e])0\1", text), "a stand-in colour was left"
    check_self_contained(text)
    assert list(tmp_path.glob(".*")) == []


@pytest.mark.unit
def test_the_steps_that_count_are_those_that_later_attempts_built_on(tmp_path: Path) -> None:
    report = of_folder(run_folder(tmp_path))
    assert [item.step for item in kept_points(report.attempts)] == list(range(1, 121))
    useful, lost = totals(report.attempts)
    assert lost == pytest.approx(20, rel=0.2)
    assert useful == pytest.approx(120, rel=0.2)
    assert [span.tone for span in report.spans] == [Tone.BAD, Tone.BAD, Tone.GOOD]
    assert [row.attempt for row in report.failures] == [2, 1]
    planned = {row.name: (row.planned, row.measured) for row in report.memory}
    assert planned["spill file"] == (512 << 20, 512 << 20)


@pytest.mark.unit
def test_a_checkpoint_folder_is_enough(tmp_path: Path) -> None:
    folder = run_folder(tmp_path) / "checkpoints" / "gpt"
    report = of_folder(folder)
    assert (report.name, report.tone, len(report.attempts)) == ("gpt", Tone.GOOD, 3)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CliError, match="neither the folder of a run nor one with checkpoints"):
        of_folder(tmp_path / "empty")


@pytest.mark.ranks
def test_hostile_names_and_messages_are_text(tmp_path: Path) -> None:
    run_folder(tmp_path)
    folder = tmp_path / "checkpoints" / "gpt" / HISTORY_DIR
    for path in files_of(folder):
        text = path.read_text().replace('"job":"gpt"', '"job":' + _json(HOSTILE))
        path.write_text(text.replace('"precision":"bf16"', f"{_json(HOSTILE)}:{_json(HOSTILE)}"))
    text = render(of_folder(tmp_path))
    check_self_contained(text)
    assert "&lt;script&gt;" in text
    assert "{{7*7}}" in text
    assert not {"\x1b", "\u202e"} & set(text)


def _json(text: str) -> str:
    import json

    return json.dumps(text)


@pytest.mark.ranks
def test_a_page_is_written_whatever_the_history_holds(tmp_path: Path) -> None:
    folder = run_folder(tmp_path) / "checkpoints" / "gpt" / HISTORY_DIR
    damaged = ("garbage", '{"kind":"attempt","attempt":1,"job":"j","time":1e308}')
    for path, line in zip(files_of(folder), damaged, strict=False):
        path.write_text(line)
    text = render(of_folder(tmp_path))
    check_self_contained(text)
    assert "1 lines of the history could not be read" in text


class FakeClient:
    """A cluster with one job and one worker."""

    namespace = "ml"

    class transport:
        class server:
            url = "https://api.example.org"

    def __init__(self, raw: dict[str, Any], history: str | None) -> None:
        self._raw, self._history = raw, history

    def get(self, name: str) -> Job:
        return Job.of(self._raw)

    def worker_text(self, name: str, path: str) -> str | None:
        assert path == "/history"
        return self._history


def job_object(**status: Any) -> dict[str, Any]:
    moment = datetime.fromtimestamp(START + 66, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    failure = {
        "attempt": 1,
        "time": moment,
        "reason": "OutOfMemory",
        "message": HOSTILE,
        "rank": 2,
        "node": "n1",
    }
    return {
        "metadata": {"name": "gpt", "namespace": "ml", "uid": "local"},
        "spec": {"workers": 2, "steps": 120},
        "status": {
            "phase": "Running",
            "attempt": 3,
            "progress": {"step": 120, "loss": 1.4},
            "memoryPlan": {"verdict": "Fits", "hostBytes": 3 << 30, "observed": {"hostBytes": 2 << 30}},
            "failures": [failure],
            "checkpoint": {"last": {"step": 120, "path": "/c/gpt/x", "time": moment, "durable": True}},
            "conditions": [
                {
                    "type": "Progressing",
                    "status": "True",
                    "reason": "StepAdvanced",
                    "message": HOSTILE,
                    "lastTransitionTime": moment,
                }
            ],
            **status,
        },
    }


@pytest.mark.ranks
def test_a_live_job_with_what_its_worker_serves(tmp_path: Path) -> None:
    folder = run_folder(tmp_path) / "checkpoints" / "gpt" / HISTORY_DIR
    history = "".join(path.read_text() for path in files_of(folder))
    client: Any = FakeClient(job_object(), history)
    report = of_job(client, "gpt", history_folder=None)
    assert (report.state, report.tone, len(report.attempts)) == ("Running", Tone.GOOD, 3)
    assert report.notes == ()
    assert report.memory[0].planned_by == "memory planner"
    assert report.failures[0].way_out.startswith("raise resources.memory")
    text = render(report)
    check_self_contained(text)
    assert text.count("<svg") == 8
    same = of_job(client, "gpt", history_folder=folder.parent)
    assert same.attempts == report.attempts


@pytest.mark.ranks
def test_the_report_of_a_job_without_pods_names_what_is_missing() -> None:
    client: Any = FakeClient(job_object(phase="Completed", completionTime="2026-11-21T22:00:00Z"), None)
    report = of_job(client, "gpt", history_folder=None)
    assert "--history" in report.notes[0]
    text = render(report)
    assert "Conditions" in Page(text).headings
    check_self_contained(text)


@pytest.fixture
def browser(tmp_path: Path) -> Browser:
    return find_browser(tmp_path)


@pytest.mark.ranks
def test_a_real_browser_shows_it_in_light_dark_and_print(tmp_path: Path, browser: Browser) -> None:
    from matplotlib.image import imread

    page = tmp_path / "page.html"
    page.write_text(render(of_folder(run_folder(tmp_path / "run")), now=START))
    shown = Page(browser.dom(page))
    assert set(TITLES) <= set(shown.headings)
    assert "script" not in shown.tags
    edge: dict[bool, float] = {}
    for dark in (False, True):
        image = tmp_path / f"{dark}.png"
        browser.screenshot(page, image, width=1000, height=2600, dark=dark)
        assert imread(image).shape[:2] == (2600, 1000)
        edge[dark] = paper(image, parts=3)
    assert edge[False] > 0.9
    assert edge[True] < 0.3
    browser.pdf(page, tmp_path / "page.pdf")
    printed = (tmp_path / "page.pdf").read_bytes()
    assert printed.startswith(b"%PDF-")
    assert len(printed) > 20_000

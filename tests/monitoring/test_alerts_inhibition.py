"""The example configuration of Alertmanager: amtool accepts it, and a real Alertmanager applies it."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.monitoring.rules.rulebook import REPOSITORY, load
from tests.support.devcluster import PATIENCE_S, wait_until
from tests.support.ports import free_port
from tests.support.tools import run_program

CONFIG = REPOSITORY / "dashboards" / "alertmanager" / "alertmanager.yaml"
SEVERITY = {rule.name: rule.severity for rule in load() if rule.alerting}
SICK = {"namespace": "ml", "job_name": "gpt"}
OTHER = {"namespace": "ml", "job_name": "other"}
SAME_NAME = {"namespace": "ml-2", "job_name": "gpt"}

SILENCED_BY = (
    ("ZeroTrainJobStalled", "ZeroTrainStepTimeRegression"),
    ("ZeroTrainJobStalled", "ZeroTrainCheckpointStale"),
    ("ZeroTrainJobStalled", "ZeroTrainGoodputBudgetBurn"),
    ("ZeroTrainJobFailed", "ZeroTrainMetricsAbsent"),
    ("ZeroTrainJobFailed", "ZeroTrainJobStalled"),
    ("ZeroTrainJobFailed", "ZeroTrainRestartLoop"),
    ("ZeroTrainRestartLoop", "ZeroTrainThroughputLow"),
    ("ZeroTrainGpuThrottled", "ZeroTrainStraggler"),
    ("ZeroTrainGpuFault", "ZeroTrainStepTimeRegression"),
    ("ZeroTrainStraggler", "ZeroTrainAllGatherP99"),
    ("ZeroTrainStraggler", "ZeroTrainReduceScatterP99"),
    ("ZeroTrainMetricsAbsent", "ZeroTrainRankMissing"),
)
NOT_SILENCED_BY = (
    ("ZeroTrainJobStalled", "ZeroTrainSpillAuthFailure"),
    ("ZeroTrainJobFailed", "ZeroTrainCheckpointVerifyFailed"),
    ("ZeroTrainStraggler", "ZeroTrainDataStarved"),
    ("ZeroTrainStepTimeRegression", "ZeroTrainDataStarved"),
)


@pytest.mark.tools
@pytest.mark.parametrize(
    ("labels", "receiver"),
    [
        ("alertname=ZeroTrainJobStalled severity=critical namespace=ml job_name=gpt", "pager"),
        ("alertname=ZeroTrainDataStarved severity=warning namespace=ml job_name=gpt", "tickets"),
        ("alertname=ZeroTrainOperatorDown severity=critical", "platform"),
        ("alertname=ZeroTrainGpuThrottled severity=warning namespace=ml job_name=gpt", "platform"),
        ("alertname=ZeroTrainGpuMemoryHeadroomLow severity=warning namespace=ml", "tickets"),
    ],
)
def test_routes(amtool: Path, labels: str, receiver: str) -> None:
    output = run_program([amtool, "config", "routes", "test", f"--config.file={CONFIG}", *labels.split()])
    assert output.split() == [receiver]


@pytest.mark.tools
def test_amtool_accepts_it(amtool: Path) -> None:
    output = run_program([amtool, "check-config", CONFIG])
    assert "SUCCESS" in output
    assert re.search(r"(\d+) inhibit rules", output), output


@pytest.mark.unit
def test_it_names_only_alerts_that_exist() -> None:
    for word in re.findall(r"ZeroTrain\w+", CONFIG.read_text()):
        assert any(re.match(word, alert) for alert in SEVERITY), word


@pytest.mark.tools
def test_alerts_of_the_same_job_are_inhibited(alertmanager: Path, amtool: Path, tmp_path: Path) -> None:
    pairs = (*NOT_SILENCED_BY, *SILENCED_BY)
    expected = {(target, f"pair-{pairs.index(pair)}", "gpt") for pair in SILENCED_BY for target in pair[1:]}
    with _running(alertmanager, tmp_path) as url:
        for number, (source, target) in enumerate(pairs):
            # A namespace per pair: all are judged at once, and none by another's source.
            job = {**SICK, "namespace": f"pair-{number}"}
            _raise(amtool, url, source, job)
            _raise(amtool, url, target, job)
            _raise(amtool, url, target, {**OTHER, "namespace": job["namespace"]})
            _raise(amtool, url, target, {**SAME_NAME, "namespace": f"elsewhere-{number}"})
        # Alertmanager processes the alerts one after the other, after it has answered the request. Once the
        # last target is inhibited, it knows all sources.
        last = (pairs[-1][1], f"pair-{len(pairs) - 1}", "gpt")
        wait_until(lambda: last in _inhibited(amtool, url), "the last source to be taken in")
        assert _inhibited(amtool, url) == expected


@pytest.mark.tools
def test_the_page_on_goodput_inhibits_its_ticket(alertmanager: Path, amtool: Path, tmp_path: Path) -> None:
    with _running(alertmanager, tmp_path) as url:
        name = "ZeroTrainGoodputBudgetBurn"
        for severity in ("critical", "warning"):
            _raise(amtool, url, name, SICK, severity=severity)
        _raise(amtool, url, name, OTHER, severity="warning")
        wait_until(lambda: _inhibited(amtool, url), "the source to be taken in")
        assert _inhibited(amtool, url) == {(name, "ml", "gpt")}


def _raise(
    amtool: Path, url: str, alert: str, labels: dict[str, str], *, severity: str | None = None
) -> None:
    words = {"alertname": alert, "severity": severity or SEVERITY[alert], **labels}
    pairs = [f"{key}={value}" for key, value in words.items()]
    run_program([amtool, f"--alertmanager.url={url}", "alert", "add", *pairs])


def _inhibited(amtool: Path, url: str) -> set[tuple[str, str, str]]:
    """Return (alert, namespace, job) of every inhibited alert."""
    base: list[str | Path] = [amtool, f"--alertmanager.url={url}", "--output=json", "alert", "query"]
    found = json.loads(run_program([*base, "--inhibited"]))
    return {
        (alert["labels"]["alertname"], alert["labels"]["namespace"], alert["labels"]["job_name"])
        for alert in found
        if alert["status"]["inhibitedBy"]
    }


@contextmanager
def _running(alertmanager: Path, folder: Path) -> Iterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    log = folder / "alertmanager.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                str(alertmanager),
                f"--config.file={CONFIG}",
                f"--storage.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--cluster.listen-address=",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _await_ready(f"{url}/-/ready", process, log)
        yield url
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def _await_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    while True:
        if process.poll() is not None:
            raise AssertionError(f"Alertmanager ended:\n{log.read_text()}")
        try:
            with urllib.request.urlopen(url, timeout=60):
                return
        except OSError:
            time.sleep(0.05)

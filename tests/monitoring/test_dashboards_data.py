"""Every query of every panel returns data from a real Prometheus that holds what real ranks exported.

A job of two ranks trains with a spill file and checkpoints; its exposition is read again and again and
becomes blocks of Prometheus' database. What a run on CPUs cannot have (GPUs, the operator, alerts) is added
from the catalogue and DCGM's counters by tests/support/synthetic_series.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from deploy.dashboards.boards import BOARDS
from deploy.dashboards.model import Dashboard, Panel, Query, Row, Scope
from deploy.dashboards.variables import ANNOTATIONS, VARIABLES
from deploy.monitoring.client import PrometheusClient, QueryError
from deploy.monitoring.panels import View, answers
from tests.support.backfill import Scrape, backfilled
from tests.support.local_jobs import running
from tests.support.synthetic_series import gpu_uuid, synthetic_scrapes
from zerotrain.contract.metrics import ALL_METRICS, Source

pytestmark = pytest.mark.tools


OPENMETRICS = "application/openmetrics-text; version=1.0.0"
NAMESPACE, JOB, POD, RANKS = "training", "gpt", "gpt-1-0", 2
EVERY_S = 0.5
TARGET = {
    "namespace": NAMESPACE,
    "pod": POD,
    "node": "node-0",
    "container": "worker",
    "instance": "10.0.0.2:8080",
    "job": "zerotrain-workers",
}
JOB_FILE = {
    "apiVersion": "zerotrain.dev/v1alpha1",
    "kind": "ZeroTrainingJob",
    "metadata": {"name": JOB},
    "spec": {
        "workers": RANKS,
        "image": "example.org/image:1",
        "model": {"gpt": {"dModel": 32, "layers": 1, "heads": 2, "context": 64}},
        "data": {"path": str(Path(__file__).resolve())},
        "steps": 100000,
        "nvme": {"size": "256Mi", "encryption": "AEAD"},
        "checkpoint": {"volume": {"persistentVolumeClaim": {"claimName": "c"}}, "everySteps": 5},
        "config": {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "bf16": {"enabled": True},
            "fp8": {"enabled": True},
            "peak_tflops": 1.0,
        },
    },
}
ENOUGH_SNAPSHOTS = 3
"""Number of differing expositions of a rank after the first checkpoint, which rates need. A rank exports
every two seconds.
"""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The database and the values to choose on the dashboards."""

    client: PrometheusClient
    view: View
    scrapes: list[Scrape]


@pytest.fixture(scope="module")
def recorded(
    tmp_path_factory: pytest.TempPathFactory, promtool: Path, prometheus: Path
) -> Iterator[Recorded]:
    folder = tmp_path_factory.mktemp("job")
    scrapes = scraped(folder)
    times = [scrape.at for scrape in scrapes]
    made = synthetic_scrapes(times, namespace=NAMESPACE, job=JOB, pod=POD, ranks=RANKS)
    view = View(
        variables={"namespace": NAMESPACE, "job": JOB, "rank": ".*", "operator": ".*"},
        start=times[0],
        end=times[-1],
        rate_interval_s=10,
        step_s=1.0,
    )
    both = [with_gpu(scrape) for scrape in scrapes] + made
    with backfilled(both, folder / "tsdb", promtool=promtool, prometheus=prometheus) as client:
        yield Recorded(client=client, view=view, scrapes=scrapes)


def chosen(recorded: Recorded, board: Dashboard) -> View:
    """Return the view of a board; the variables of a board of many jobs select all."""
    if board.scope is not Scope.FLEET:
        return recorded.view
    return replace(recorded.view, variables={**recorded.view.variables, "namespace": ".*", "job": ".*"})


def scraped(folder: Path) -> list[Scrape]:
    """Return expositions of a real job while it trains, until enough of them differ and a checkpoint is
    durable.
    """
    job = folder / "job.yaml"
    job.write_text(json.dumps(JOB_FILE))
    found: list[Scrape] = []
    with running(job, folder / "run") as command:
        http = folder / "run" / "attempts" / "1" / "http.json"
        deadline = time.monotonic() + 240
        while len(steps_seen(found)) < ENOUGH_SNAPSHOTS or not checkpoints_seen(found):
            assert command.popen.poll() is None, command.finish()
            assert time.monotonic() < deadline, (steps_seen(found), checkpoints_seen(found))
            if http.exists() and (text := exposition(json.loads(http.read_text())["port"])):
                found.append(Scrape.of_text(text, at=time.time(), target=TARGET))
            time.sleep(EVERY_S)
        command.popen.terminate()
    return found


def exposition(port: int) -> str | None:
    """Return the launcher's metrics; None while it does not answer."""
    request = Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": OPENMETRICS})
    try:
        with urlopen(request, timeout=5) as answer:
            return str(answer.read().decode())
    except (URLError, OSError):
        return None


def values(scrapes: list[Scrape], name: str) -> set[float]:
    return {
        sample.value
        for scrape in scrapes
        for family in scrape.families
        for sample in family.samples
        if sample.name == name and sample.labels["rank"] == "0"
    }


def steps_seen(scrapes: list[Scrape]) -> set[float]:
    return {value for value in values(scrapes, "zerotrain_step") if value > 0}


def checkpoints_seen(scrapes: list[Scrape]) -> set[float]:
    return {value for value in values(scrapes, "zerotrain_last_checkpoint_step") if value > 0}


def with_gpu(scrape: Scrape) -> Scrape:
    """Return the scrape with the label that a rank on a GPU adds to zerotrain_rank_info, the join key of
    DCGM's series.
    """
    for family in scrape.families:
        if family.name == "zerotrain_rank":
            family.samples = [
                sample._replace(labels={**sample.labels, "gpu_uuid": gpu_uuid(int(sample.labels["rank"]))})
                for sample in family.samples
            ]
    return scrape


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_every_query_of_every_panel_brings_data(recorded: Recorded, board: Dashboard) -> None:
    empty = [
        f"{answer.panel}: {answer.query}"
        for answer in answers(recorded.client, board, chosen(recorded, board))
        if not answer.num_series
    ]
    assert empty == []


def test_a_query_without_data_is_seen_and_a_wrong_one_refused(recorded: Recorded) -> None:
    board = BOARDS[0]

    def asking(expr: str) -> Dashboard:
        panel = Panel(title="planted", description="x", queries=(Query(expr=expr),))
        return replace(board, rows=(Row(title="planted", panels=(panel,)),))

    (nothing,) = answers(recorded.client, asking('zerotrain_step{JOB, rank="99"}'), recorded.view)
    assert nothing.num_series == 0
    with pytest.raises(QueryError, match="many-to-many"):
        list(answers(recorded.client, asking("zerotrain_step * on (pod) zerotrain_step"), recorded.view))


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_annotations_and_variables_bring_data(recorded: Recorded, board: Dashboard) -> None:
    view, client = chosen(recorded, board), recorded.client
    for annotation in ANNOTATIONS[board.scope]:
        expr = view.fill(annotation.expr)
        assert client.over(expr, start=view.start, end=view.end, step_s=view.step_s), annotation
    for variable in VARIABLES[board.scope]:
        found = client.instant(view.fill(variable.series), view.end)
        assert any(series["metric"].get(variable.values_of) for series in found), variable


def test_what_is_synthetic_is_what_a_run_on_processors_lacks(recorded: Recorded) -> None:
    """No series of a real rank is replaced: every metric that the catalogue promises everywhere came from the
    job.
    """
    real = {sample.name for s in recorded.scrapes for family in s.families for sample in family.samples}
    promised = {
        name
        for spec in ALL_METRICS
        if spec.source in {Source.RANK, Source.LAUNCHER, Source.WORKER} and "GPU" not in spec.only
        for name, _ in spec.samples()
    }
    assert promised <= real, promised - real

"""A Prometheus server with past samples: expositions and their times become blocks of its database.

`promtool tsdb create-blocks-from openmetrics` makes the blocks, so the series are those that a scrape would
have made, the target's labels included.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from deploy.monitoring.client import PrometheusClient
from tests.support.devcluster import PATIENCE_S
from tests.support.ports import free_port
from tests.support.tools import run_program

_NON_PRINTABLE = re.compile(r"\n")


@dataclass(frozen=True, kw_only=True)
class Scrape:
    """The answer of one target at one moment."""

    at: float
    """Unix seconds."""
    families: tuple[Metric, ...]
    target: Mapping[str, str]
    """Labels that the scrape adds. The target's own labels keep their values (honorLabels: true)."""

    @classmethod
    def of_text(cls, text: str, *, at: float, target: Mapping[str, str]) -> Scrape:
        """Parse an answer in the OpenMetrics format. Raises ValueError if it is not in that format."""
        parsed = text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
        return cls(at=at, families=tuple(parsed), target=target)


def write_openmetrics(scrapes: Iterable[Scrape], path: Path) -> int:
    """Write the samples of all scrapes with their times, in promtool's order; return their number."""
    by_family: dict[str, tuple[str, list[str]]] = {}
    num_samples = 0
    for scrape in sorted(scrapes, key=lambda item: item.at):
        for family in scrape.families:
            lines = by_family.setdefault(family.name, (family.type, []))[1]
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    lines.append(_line(sample, scrape))
                    num_samples += 1
    with path.open("w") as out:
        for name, (kind, lines) in by_family.items():
            out.write(f"# TYPE {name} {kind}\n" + "".join(lines))
        out.write("# EOF\n")
    return num_samples


def _line(sample: Sample, scrape: Scrape) -> str:
    labels = {**scrape.target, **sample.labels}
    text = ",".join(f'{key}="{_escaped(value)}"' for key, value in sorted(labels.items()))
    return f"{sample.name}{{{text}}} {sample.value} {scrape.at:.3f}\n"


def _escaped(value: str) -> str:
    return _NON_PRINTABLE.sub(r"\\n", value.replace("\\", "\\\\").replace('"', '\\"'))


@contextmanager
def backfilled(
    scrapes: Iterable[Scrape], folder: Path, *, promtool: Path, prometheus: Path
) -> Iterator[PrometheusClient]:
    """Run a real Prometheus that holds these samples and scrapes nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    exposition, data = folder / "samples.om", folder / "data"
    assert write_openmetrics(scrapes, exposition), "nothing was scraped"
    run_program([promtool, "tsdb", "create-blocks-from", "openmetrics", exposition, data])
    (folder / "prometheus.yml").write_text("scrape_configs: []\n")
    port = free_port()
    command = [
        str(prometheus),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={data}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    log = folder / "prometheus.log"
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as server:
        client = PrometheusClient(f"http://127.0.0.1:{port}")
        try:
            _wait(client, server, log)
            yield client
        finally:
            server.kill()


def _wait(client: PrometheusClient, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not client.is_ready():
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)

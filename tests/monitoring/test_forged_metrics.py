"""Forged metrics of a training program: a real Prometheus keeps none that claim to be another job's."""

from __future__ import annotations

import http.server
import json
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.monitoring.client import PrometheusClient, is_ready
from deploy.monitoring.config import worker_limits
from tests.support.devcluster import wait_until
from tests.support.metric_names import of_source
from tests.support.ports import free_port
from zerotrain.contract.metrics import Source

FORGED = """\
zerotrain_step 7
zerotrain_operator_leader 1
zerotrain_job_phase{phase="Succeeded",namespace="victim",job_name="gpt"} 1
namespace_job_name:zerotrain_step_age_seconds:min 0
DCGM_FI_DEV_XID_ERRORS 79
"""
FLOOD = "".join(f'zerotrain_step{{n="{number}"}} 1\n' for number in range(21_000))
SECRET = "secret_of_another 1\n"
"""Metrics that Prometheus may read and the tenant may not."""
OF_OTHERS = '{__name__=~"zerotrain_operator_.*|zerotrain_job_.*|.*:.*|DCGM_.*"}'


class Program(http.server.BaseHTTPRequestHandler):
    """Server of forged metrics; the path selects what it serves."""

    def do_GET(self) -> None:
        if self.path == "/elsewhere":
            self.send_response(302)
            self.send_header("Location", "/secret")
            self.end_headers()
            return
        body = {"/forged": FORGED, "/flood": FLOOD, "/secret": SECRET}[self.path].encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the output belongs to the test."""


@contextmanager
def serving(program: Path, folder: Path, **limits: object) -> Iterator[PrometheusClient]:
    """Run Prometheus over programs that forge, flood, and send it elsewhere."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Program)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    target = {
        "static_configs": [{"targets": [f"127.0.0.1:{server.server_address[1]}"]}],
        "scrape_interval": "1s",
    }
    jobs = [
        {"job_name": name, "metrics_path": f"/{name}", "scrape_timeout": "1s", **target, **limits}
        for name in ("forged", "flood", "elsewhere")
    ]
    folder.mkdir()
    (folder / "prometheus.yml").write_text(json.dumps({"scrape_configs": jobs}))
    address = f"127.0.0.1:{free_port()}"
    command = [
        str(program),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--log.level=error",
    ]
    with subprocess.Popen(command) as running:
        try:
            wait_until(lambda: is_ready(f"http://{address}/-/ready"), "Prometheus")
            yield PrometheusClient(f"http://{address}")
        finally:
            running.terminate()
            server.shutdown()
            server.server_close()


def names(client: PrometheusClient) -> set[str]:
    return {series["metric"]["__name__"] for series in client.instant(OF_OTHERS)}


@pytest.mark.tools
def test_only_what_a_worker_reports_about_itself_is_kept(prometheus: Path, tmp_path: Path) -> None:
    with serving(prometheus, tmp_path / "bounded", **worker_limits()) as client:
        wait_until(lambda: client.instant('zerotrain_step{job="forged"}'), "the honest series")
        wait_until(lambda: client.instant('up{job="flood"}'), "the flood's first scrape")
        assert names(client) == set()
        (up,) = client.instant('up{job="flood"}')
        assert up["value"][1] == "0", "more than the limit is nothing at all, and seen as down"
        assert client.instant('zerotrain_step{job="flood"}') == []
        wait_until(lambda: client.instant('up{job="elsewhere"}'), "the redirected scrape")
        assert client.instant("secret_of_another") == []


@pytest.mark.tools
def test_without_the_limits_they_would_arrive(prometheus: Path, tmp_path: Path) -> None:
    with serving(prometheus, tmp_path / "open") as client:
        wait_until(lambda: client.instant('zerotrain_step{job="flood"}'), "the flood")
        wait_until(lambda: len(names(client)) == 4, "the forged series")
        wait_until(lambda: client.instant('secret_of_another{job="elsewhere"}'), "what the redirect led to")


@pytest.mark.unit
def test_no_name_of_a_worker_is_dropped() -> None:
    (drop,) = worker_limits()["metric_relabel_configs"]
    families = of_source(Source.RANK) | of_source(Source.WORKER) | of_source(Source.LAUNCHER)
    assert len(families) > 20
    assert [name for name in families if re.fullmatch(drop["regex"], name)] == []
    of_operator = of_source(Source.OPERATOR)
    assert [name for name in of_operator if not re.fullmatch(drop["regex"], name)] == []

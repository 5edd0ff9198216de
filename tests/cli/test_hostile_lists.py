"""Commands that list jobs survive malformed stored objects: all are listed, and unreadable ones are
marked.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.support.jobs import job_json
from zerotrain.cli.get import _row, _why
from zerotrain.cli.options import Format
from zerotrain.client import Job
from zerotrain.client.kubeconfig import Server
from zerotrain.client.reading import JobReader
from zerotrain.client.transport import Transport

pytestmark = pytest.mark.ranks


def stored(name: str, config: str, **status: Any) -> str:
    body = job_json({"metadata": {"name": name, "namespace": "ml", "uid": name, "resourceVersion": "2"}})
    body["spec"]["config"] = "CONFIG"
    whole = {**dict(sorted(body.items())), **({"status": status} if status else {})}
    return json.dumps(whole, separators=(",", ":")).replace('"CONFIG"', config)


DEEP = '{"a":' * 3000 + "1" + "}" * 3000
FAT = "[" + ",".join(["{}"] * 400_000) + "]"
JOBS = {
    "a": stored("a", "{}", phase="Running"),
    "deep": stored("deep", DEEP),
    "fat": stored("fat", FAT, phase="Stalled"),
    "z": stored("z", "{}"),
}


class ApiServer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        name = path.rpartition("/")[2]
        if name in JOBS:
            text = JOBS[name]
        elif "watch=" in query:
            text = "".join(f'{{"type":"MODIFIED","object":{job}}}\n' for job in JOBS.values())
        else:
            text = '{"items":[' + ",".join(JOBS.values()) + '],"kind":"L","metadata":{"resourceVersion":"5"}}'
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def reader() -> Iterator[JobReader]:
    from kubernetes import client

    server = ThreadingHTTPServer(("127.0.0.1", 0), ApiServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    configuration = client.Configuration()
    configuration.host = f"http://127.0.0.1:{server.server_port}"
    transport = Transport(Server(configuration=configuration, namespace="ml", context="test"))
    yield JobReader(transport, "ml")
    transport.close()
    server.shutdown()
    server.server_close()


def test_all_jobs_are_listed_and_the_unreadable_are_marked(reader: JobReader) -> None:
    jobs = {job.name: job for job in reader.list(all_namespaces=True)}
    assert list(jobs) == list(JOBS)
    assert [job.is_unread for job in jobs.values()] == [False, True, True, False]
    assert _row(jobs["deep"], Format.WIDE)[1] == "Unreadable"
    assert _why(jobs["deep"]) == "InvalidSpec"
    assert jobs["fat"].phase == "Stalled"
    assert sum(len(json.dumps(dict(job.raw))) for job in jobs.values()) < 16_384


def test_one_that_is_deep_is_shown_by_its_name(reader: JobReader) -> None:
    assert reader.get("deep").is_unread
    assert not reader.get("fat").is_unread, "one fat job is shown whole"


def test_they_pass_through_a_watch(reader: JobReader) -> None:
    batches = reader.watch_list(all_namespaces=True)
    first = next(batches)
    assert set(first) == {f"ml/{name}" for name in JOBS}
    later: dict[str, Job | None] = {}
    for batch in batches:
        later |= batch
        if len(later) == len(JOBS):
            break
    deep = later["ml/deep"]
    assert deep is not None
    assert deep.is_unread

"""A name that the hub does not give: the error names field, reason and way out. The hub is a server here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.hf_jobs import finish_finetune
from tests.support.ports import free_port
from zerotrain.compat.finetune.hub import check_name
from zerotrain.compat.refusal import CompatError
from zerotrain.contract.exit_codes import ExitCode
from zerotrain.contract.finetune_spec import FinetuneSpec
from zerotrain.contract.unreachable import reports_unreachable_host

pytestmark = pytest.mark.ranks

NAMES: dict[str, tuple[int, str]] = {
    "org/gated": (403, "GatedRepo"),
    "org/private": (401, "RepoNotFound"),
    "org/missing": (404, "RepoNotFound"),
    "org/busy": (429, ""),
    "org/broken": (503, ""),
    "org/public": (200, ""),
}
"""Status and error code of the hub's answer about each name, as the real one sends them."""


class Hub(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, code = next(answer for name, answer in NAMES.items() if f"/{name}/" in self.path)
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        return None


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def endpoint(hub: str, monkeypatch: pytest.MonkeyPatch) -> str:
    return at(hub, monkeypatch)


def at(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let the libraries of this process ask there; return the address."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return endpoint


GIVEN: dict[str, Any] = {
    "model": "/x", "data": "/x", "method": "full", "learning_rate": 1e-3, "batch_size": 1, "max_length": 8,
    "steps": 1,
}  # fmt: skip


def spec_of(**changes: Any) -> FinetuneSpec:
    return FinetuneSpec(**{**GIVEN, **changes})


READ = """
import json, sys
from zerotrain.compat.finetune.rows import load_rows
from zerotrain.compat.refusal import CompatError
from zerotrain.contract.finetune_spec import FinetuneSpec
for name in sys.argv[2:]:
    try:
        load_rows(FinetuneSpec(**{**json.loads(sys.argv[1]), "data": name}))
    except CompatError as error:
        print(error)
"""


def test_a_data_set_that_the_hub_refuses(hub: str, tmp_path: Path) -> None:
    """The libraries read their endpoint when they are imported, so a process of its own asks."""
    own = {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", "HF_TOKEN": ""}
    names = ("org/gated", "org/private", "org/missing")
    done = subprocess.run(
        [sys.executable, "-c", READ, json.dumps(GIVEN), *names],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        check=True,
    )
    not_given = (
        "with no token): it is private or gated, or there is no such dataset; name a Secret with a token"
    )
    expected = (
        f"does not give org/gated to this job (403, {not_given}",
        f"does not give org/private to this job (401, {not_given}",
        "has no dataset org/missing (404, with no token); correct it, or give an absolute path that",
    )
    for line, start in zip(done.stdout.splitlines(), expected, strict=True):
        assert line.startswith(f"spec.finetune.data: {hub} {start}")


def test_a_token_that_is_not_enough_differs_from_none(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    with pytest.raises(CompatError, match=r"\(403, with the token that it was given\).* as tokenFrom"):
        check_name(spec_of(), "data", "org/gated", "dataset", OSError())


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = at(f"http://127.0.0.1:{free_port()}", monkeypatch)
    with pytest.raises(CompatError) as refused:
        check_name(spec_of(), "eval.data", "org/rows", "dataset", OSError("offline"))
    text = str(refused.value)
    assert text.startswith(f"spec.finetune.eval.data: cannot reach {closed} for org/rows (")
    assert "spec.network.egressCidrs, or give an absolute path that podTemplate.volumes mounts" in text
    assert reports_unreachable_host(text), "the operator adds what the job's network policy allows"


@pytest.mark.parametrize("name", ["org/busy", "org/broken"])
def test_a_hub_that_may_answer_later_is_no_fault_of_the_spec(endpoint: str, name: str) -> None:
    error = OSError("try again")
    with pytest.raises(OSError, match="try again") as raised:
        check_name(spec_of(), "model", name, "model", error)
    assert raised.value is error


def test_a_job_that_has_trained_could_reach_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at(f"http://127.0.0.1:{free_port()}", monkeypatch)
    (tmp_path / "checkpoint-4").mkdir()
    with pytest.raises(OSError, match="try again"):
        check_name(spec_of(output=str(tmp_path)), "model", "org/a", "model", OSError("try again"))


def test_other_faults_are_not_the_hubs(endpoint: str) -> None:
    check_name(spec_of(), "model", "org/public", "model", OSError("no config.json"))
    check_name(spec_of(), "model", "/models/a", "model", OSError("no config.json"))


@pytest.mark.slow(cheaper="tests/compat/test_finetune_hub.py::test_a_data_set_that_the_hub_refuses")
def test_a_job_with_a_gated_model_ends_with_the_code_of_a_wrong_configuration(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "red"}) + "\n")
    code, output = finish_finetune(tmp_path, spec_of(model="org/gated", data=str(rows)), ranks=1)
    assert code == ExitCode.BAD_CONFIG, output
    assert f"spec.finetune.model: {hub} does not give org/gated to this job (403" in output

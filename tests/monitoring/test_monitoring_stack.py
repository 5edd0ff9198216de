"""The servers beside a cluster: Prometheus and Alertmanager accept their configurations, and `down` ends
them.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.monitoring import stack
from deploy.monitoring.access import AccessError, read_access
from deploy.monitoring.client import PrometheusClient, is_ready
from deploy.monitoring.config import RULES
from tests.support.tools import run_program
from tests.test_repo_shape import ROOT

CA = b"-----BEGIN CERTIFICATE-----\n"


def kubeconfig(folder: Path, user: dict[str, Any], **cluster: Any) -> Path:
    path = folder / "kubeconfig"
    document = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"} | cluster}],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(json.dumps(document))
    return path


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.unit
def test_a_token_goes_into_a_file_of_the_owner(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path, {"token": "secret"}, **{"certificate-authority-data": encoded(CA)})
    access = read_access(path, tmp_path)
    assert (access.scheme, access.host) == ("https", "127.0.0.1:1")
    token = Path(access.settings["authorization"]["credentials_file"])
    assert token.read_text() == "secret"
    assert token.stat().st_mode & 0o777 == 0o600
    assert Path(access.settings["tls_config"]["ca_file"]).read_bytes() == CA
    assert "secret" not in json.dumps(access.settings)


@pytest.mark.unit
def test_certificates_may_be_files_next_to_the_kubeconfig(tmp_path: Path) -> None:
    (tmp_path / "me.crt").write_bytes(b"certificate")
    (tmp_path / "here").mkdir()
    user = {"client-certificate": "me.crt", "client-key-data": encoded(b"key")}
    access = read_access(kubeconfig(tmp_path, user, server="https://example.org"), tmp_path / "here")
    assert access.host == "example.org:443"
    assert Path(access.settings["tls_config"]["cert_file"]).read_bytes() == b"certificate"
    assert Path(access.settings["tls_config"]["key_file"]).read_bytes() == b"key"


@pytest.mark.unit
@pytest.mark.parametrize(("user", "word"), [({"exec": {"command": "aws"}}, "exec"), ({}, "nothing")])
def test_another_way_to_log_in_is_refused_with_a_way_out(
    tmp_path: Path, user: dict[str, Any], word: str
) -> None:
    with pytest.raises(AccessError, match=f"logs in with {word}.*PodMonitor"):
        read_access(kubeconfig(tmp_path, user), tmp_path)


@pytest.mark.unit
def test_a_context_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path, {"token": "x"})
    path.write_text(path.read_text().replace('"current-context": "here"', '"current-context": "there"'))
    with pytest.raises(AccessError, match="'there' under contexts"):
        read_access(path, tmp_path)


@pytest.mark.tools
def test_both_start_and_end_and_take_their_configuration(
    tmp_path: Path, promtool: Path, amtool: Path, prometheus: Path, alertmanager: Path
) -> None:
    assert prometheus.exists()
    assert alertmanager.exists()
    ca = {"insecure-skip-tls-verify": True}
    settings = stack.Settings(
        kubeconfig=kubeconfig(tmp_path, {"token": "x"}, **ca), test_alert=True, any_port=True
    )
    folder = tmp_path / "stack"
    started = stack.start(folder, settings)
    try:
        assert stack.load(folder) == started
        with pytest.raises(stack.StackError, match="runs already"):
            stack.start(folder, settings)
        assert (folder / "token").exists()
        client = PrometheusClient(started.prometheus)
        assert client.targets() == [], "there is no cluster at that address"
        rules = run_program([promtool, "check", "config", folder / "prometheus.yml"])
        assert all(path.name in rules for path in RULES.glob("*.yaml"))
        assert "test-alert.yaml" in rules
        assert "SUCCESS" in run_program([amtool, "check-config", folder / "alertmanager.yml"])
    finally:
        assert stack.stop(folder)
    assert stack.load(folder) is None
    assert not (folder / "token").exists()
    assert not is_ready(f"{started.prometheus}/-/ready")
    assert not stack.stop(folder)


@pytest.mark.tools
def test_a_server_that_ends_at_once_shows_its_log(tmp_path: Path, prometheus: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("groups: [{name: x, rules: [{alert: Y, expr: 'rate(zerotrain_step)'}]}]")
    user = {"token": "x"}
    settings = stack.Settings(kubeconfig=kubeconfig(tmp_path, user), extra_rules=(broken,), any_port=True)
    with pytest.raises(stack.StackError, match=r"prometheus ended(.|\n)*rate"):
        stack.start(tmp_path / "stack", settings)
    assert stack.load(tmp_path / "stack") is None
    assert prometheus.exists()


@pytest.mark.ranks
def test_another_folder_is_another_stack_of_the_same_name(tmp_path: Path) -> None:
    """A test that ends `dev` must not end the developer's own stack."""
    own, other = tmp_path / "own", tmp_path / "other"
    (own / "dev").mkdir(parents=True)
    running = subprocess.Popen([sys.executable, "-c", "input()", str(own / "dev")], stdin=subprocess.PIPE)
    state = {"folder": str(own / "dev"), "prometheus": "", "alertmanager": "", "pids": {"p": running.pid}}
    (own / "dev" / stack.STATE_FILE).write_text(json.dumps(state))
    try:
        assert "nothing runs under the name dev" in ended(other)
        assert running.poll() is None
        assert "ended" in ended(own)
        assert running.wait(timeout=180) != 0
    finally:
        running.kill()


def ended(folder: Path) -> str:
    """Return the output of `down` with `folder` as the folder of all stacks."""
    environ = {**os.environ, "ZEROTRAIN_MONITORING_FOLDER": str(folder)}
    command = [sys.executable, "-m", "deploy.monitoring", "down"]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True).stdout

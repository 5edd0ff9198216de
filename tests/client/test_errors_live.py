"""Every command about a cluster when something is wrong: the code, the cause and the next step."""

from __future__ import annotations

import json
import secrets
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.operator.operator_process import write_kubeconfig
from tests.support.certificates import certificate
from tests.support.commands import Done, zerotrain
from tests.support.crd import install_crd
from tests.support.devcluster import Cluster
from tests.support.jobs import job_json
from tests.support.ports import closed_port
from zerotrain.cli.main import app
from zerotrain.client import reading
from zerotrain.client.command_exits import CommandExit

JOB = "gpt"
ABOUT_A_JOB = {
    "get": ("get", JOB),
    "describe": ("describe", JOB),
    "logs": ("logs", JOB),
    "top": ("top", JOB, "--once"),
    "wait": ("wait", JOB, "--timeout", "5"),
    "suspend": ("suspend", JOB),
    "resume": ("resume", JOB),
    "scale": ("scale", JOB, "--workers", "2"),
    "delete": ("delete", JOB),
    "report": ("report", JOB),
}
OTHERS = {"submit", "doctor"}
"""Commands that take a cluster but no job's name; they have rows of their own in `all_commands`."""
IN_PODS = ("doctor", "--pod", "--image", "example.org/zerotrain:1", "--timeout", "1")


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    raw = job_json()
    raw["metadata"] = {"name": JOB}
    path.write_text(json.dumps(raw))
    return path


@pytest.fixture
def served(control_plane: Cluster, namespace: str) -> str:
    """Namespace of a cluster with the CRD installed."""
    install_crd(control_plane)
    return namespace


def write(path: Path, server: str, **user: str) -> Path:
    """Write a kubeconfig without a certificate authority."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "ml"}}],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": user or {"token": "t"}}],
    }
    path.write_text(json.dumps(config))
    return path


def check_failure(done: Done, code: CommandExit, *words: str) -> None:
    """Check that the command failed with the code, these words and a next step, without traceback or standard
    output.
    """
    assert done.code == code, f"{done.code}: {done.out}{done.err}"
    assert f"error ({int(code)}):" in done.err
    assert "next:" in done.err
    assert "Traceback" not in done.err
    assert done.out == ""
    for word in words:
        assert word in done.err, done.err


def about_jobs(job_file: Path) -> dict[str, tuple[str, ...]]:
    return {**ABOUT_A_JOB, "submit": ("submit", str(job_file)), "list": ("get",)}


def all_commands(job_file: Path) -> dict[str, tuple[str, ...]]:
    return {**about_jobs(job_file), "doctor": IN_PODS}


def with_a_cluster(group: Any, before: str = "") -> set[str]:
    """Return the commands that take --kubeconfig, by their words."""
    found: set[str] = set()
    for name, command in group.commands.items():
        words = f"{before} {name}".strip()
        if hasattr(command, "commands"):
            found |= with_a_cluster(command, words)
        elif any("--kubeconfig" in option.opts for option in command.params):
            found.add(words)
    return found


@pytest.mark.unit
def test_no_command_about_a_cluster_is_left_out(job_file: Path) -> None:
    assert with_a_cluster(typer.main.get_command(app)) == set(ABOUT_A_JOB) | OTHERS
    assert set(all_commands(job_file)) == set(ABOUT_A_JOB) | OTHERS | {"list"}


@pytest.mark.ranks
def test_with_the_cluster_down(tmp_path: Path, job_file: Path) -> None:
    with closed_port() as port:
        kubeconfig = write(tmp_path / "kubeconfig", f"https://127.0.0.1:{port}")
        for command in all_commands(job_file).values():
            done = zerotrain(*command, kubeconfig=kubeconfig)
            check_failure(done, CommandExit.UNREACHABLE, "127.0.0.1", "context here")


@pytest.mark.unit
def test_with_a_name_that_no_server_has(tmp_path: Path) -> None:
    kubeconfig = write(tmp_path / "kubeconfig", "https://cluster.invalid:6443")
    check_failure(zerotrain("get", kubeconfig=kubeconfig), CommandExit.UNREACHABLE, "cannot be resolved")


@pytest.mark.unit
def test_without_a_kubeconfig_or_with_a_wrong_context(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    check_failure(zerotrain("get", kubeconfig=missing), CommandExit.NO_KUBECONFIG, str(missing))
    env = {"KUBECONFIG": "", "HOME": str(tmp_path), "KUBERNETES_SERVICE_HOST": ""}
    check_failure(zerotrain("get", env=env), CommandExit.NO_KUBECONFIG)
    there = write(tmp_path / "kubeconfig", "https://127.0.0.1:1")
    check_failure(
        zerotrain("get", "--context", "prod", kubeconfig=there),
        CommandExit.NO_KUBECONFIG,
        "no context 'prod'",
        "it has here",
    )
    broken = tmp_path / "broken"
    broken.write_text("clusters: [}")
    check_failure(zerotrain("get", kubeconfig=broken), CommandExit.NO_KUBECONFIG, str(broken))


@pytest.mark.cluster
def test_with_a_wrong_name(control_plane: Cluster, served: str) -> None:
    raw = job_json({"metadata": {"name": "gpt-large"}})
    control_plane.apply(raw, namespace=served)
    for name, command in ABOUT_A_JOB.items():
        done = zerotrain(*command, "-n", served, kubeconfig=control_plane.kubeconfig)
        check_failure(
            done, CommandExit.NOT_FOUND, f"no job {JOB} in namespace {served}", "did you mean gpt-large"
        )
        assert name in command


@pytest.mark.cluster
def test_in_a_namespace_that_does_not_exist(control_plane: Cluster, served: str, job_file: Path) -> None:
    done = zerotrain("submit", job_file, "-n", "nowhere", kubeconfig=control_plane.kubeconfig)
    check_failure(
        done, CommandExit.NOT_FOUND, "there is no namespace nowhere", "kubectl create namespace nowhere"
    )


@pytest.mark.cluster
def test_without_permission(served: str, unprivileged: Path, job_file: Path) -> None:
    for command in about_jobs(job_file).values():
        done = zerotrain(*command, "-n", served, kubeconfig=unprivileged)
        check_failure(done, CommandExit.FORBIDDEN, "cannot", "zerotrainingjobs", "zerotrain-editor")
    done = zerotrain(*IN_PODS, "-n", served, kubeconfig=unprivileged)
    check_failure(done, CommandExit.FORBIDDEN, "cannot create", "pods, pods/log and networkpolicies")
    assert "could not be deleted" not in done.err


@pytest.mark.cluster
def test_with_an_unknown_token(control_plane: Cluster, served: str, tmp_path: Path) -> None:
    kubeconfig = write_kubeconfig(control_plane, secrets.token_hex(8), tmp_path / "wrong.kubeconfig")
    check_failure(
        zerotrain("get", "-n", served, kubeconfig=kubeconfig), CommandExit.UNAUTHENTICATED, "log in again"
    )


@pytest.mark.cluster
def test_where_zerotrain_is_not_installed(
    control_plane: Cluster, namespace: str, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real API server does not serve this group, as it does not serve ours where the CRD is missing."""
    monkeypatch.setattr(reading, "GROUP", "zerotrain.example.org")
    for command in about_jobs(job_file).values():
        done = zerotrain(*command, "-n", namespace, kubeconfig=control_plane.kubeconfig)
        check_failure(done, CommandExit.NOT_INSTALLED, "does not know ZeroTrainingJobs", "install the chart")


@pytest.mark.cluster
def test_a_wrong_field_is_refused_here_and_there(control_plane: Cluster, served: str, job_file: Path) -> None:
    raw = json.loads(job_file.read_text())
    raw["spec"]["workres"] = 3
    job_file.write_text(json.dumps(raw))
    done = zerotrain("submit", job_file, "-n", served, kubeconfig=control_plane.kubeconfig)
    check_failure(done, CommandExit.INVALID, "spec.workres", "did you mean workers")
    from zerotrain.client import Client, InvalidJobError

    client = Client.connect(control_plane.kubeconfig, namespace=served)
    with pytest.raises(InvalidJobError, match="workres"):
        client.submit(raw)
    raw["spec"].pop("workres")
    raw["spec"]["workers"] = 0
    with pytest.raises(InvalidJobError, match=r"spec\.workers"):
        client.submit(raw)


@pytest.fixture
def expired_server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """URL of a TLS server whose certificate has expired, and the file of that certificate."""
    cert_file, key_file = certificate(tmp_path, "server", days=-1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert_file, key_file)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.2)
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            try:
                connection, _ = listener.accept()
                context.wrap_socket(connection, server_side=True).close()
            except OSError:
                continue

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"https://localhost:{listener.getsockname()[1]}", cert_file
    stop.set()
    thread.join(timeout=60)
    listener.close()


def trusting(path: Path, server: str, authority: Path, **user: str) -> Path:
    config = json.loads(write(path, server, **user).read_text())
    config["clusters"][0]["cluster"]["certificate-authority"] = str(authority)
    path.write_text(json.dumps(config))
    return path


@pytest.mark.ranks
def test_with_a_server_whose_certificate_has_expired(
    tmp_path: Path, expired_server: tuple[str, Path]
) -> None:
    server, authority = expired_server
    kubeconfig = trusting(tmp_path / "kubeconfig", server, authority)
    done = zerotrain("get", kubeconfig=kubeconfig)
    check_failure(done, CommandExit.UNREACHABLE, "expired", "has to be renewed")


@pytest.mark.cluster
def test_with_another_authority_and_with_an_expired_client_certificate(
    control_plane: Cluster, tmp_path: Path
) -> None:
    other, _ = certificate(tmp_path, "other", days=10)
    kubeconfig = trusting(tmp_path / "kubeconfig", control_plane.api_url, other)
    check_failure(
        zerotrain("get", kubeconfig=kubeconfig), CommandExit.UNREACHABLE, "trusts another authority"
    )
    authority = tmp_path / "real.crt"
    authority.write_bytes(control_plane.ca)
    cert_file, key_file = certificate(tmp_path, "client", days=-2)
    user = {"client-certificate": str(cert_file), "client-key": str(key_file)}
    kubeconfig = trusting(tmp_path / "expired", control_plane.api_url, authority, **user)
    done = zerotrain("get", kubeconfig=kubeconfig)
    check_failure(done, CommandExit.UNAUTHENTICATED, "your client certificate", "expired at")

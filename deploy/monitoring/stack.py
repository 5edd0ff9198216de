"""Start and stop of the two servers.

They keep running after `up` and are found again by their state file.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from deploy.devcluster import cluster
from deploy.monitoring.access import SECRET_FILES, read_access
from deploy.monitoring.client import is_ready
from deploy.monitoring.config import RULES, alertmanager_config, prometheus_config, test_alert_rules

STATE_FILE = "state.json"
READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
_PREFERRED = {"prometheus": 9090, "alertmanager": 9093}


class StackError(RuntimeError):
    """The servers could not be started; the message says what to look at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """Two running servers."""

    folder: str
    prometheus: str
    alertmanager: str
    """Address of Alertmanager; `prometheus` is that of Prometheus."""
    pids: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of `up`."""

    kubeconfig: Path
    interval_s: int = 5
    test_alert: bool = False
    extra_rules: tuple[Path, ...] = ()
    any_port: bool = False
    """Whether to skip the usual ports."""


def start(folder: Path, settings: Settings) -> Stack:
    """Write the configuration, start both servers and wait until they answer.

    Raises StackError, AccessError.
    """
    if (running := load(folder)) is not None:
        raise StackError(f"it runs already: {running.prometheus}; end it with `down` first")
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)  # it holds the credentials of the kubeconfig
    programs = cluster.build_tool("monitoring")
    ports = {name: _port(0 if settings.any_port else wanted) for name, wanted in _PREFERRED.items()}
    _write_configuration(folder, settings, alertmanager=f"127.0.0.1:{ports['alertmanager']}")
    commands = {
        "prometheus": _prometheus(programs, folder, ports["prometheus"]),
        "alertmanager": _alertmanager(programs, folder, ports["alertmanager"]),
    }
    pids = {name: _spawn(command, folder / f"{name}.log") for name, command in commands.items()}
    stack = Stack(
        folder=str(folder),
        prometheus=f"http://127.0.0.1:{ports['prometheus']}",
        alertmanager=f"http://127.0.0.1:{ports['alertmanager']}",
        pids=pids,
    )
    (folder / STATE_FILE).write_text(json.dumps(asdict(stack)))
    try:
        _wait(stack)
    except StackError:
        stop(folder)
        raise
    return stack


def load(folder: Path) -> Stack | None:
    """Return the servers of that folder; None unless both run."""
    path = folder / STATE_FILE
    if not path.exists():
        return None
    stack = Stack(**json.loads(path.read_text()))
    return stack if all(_is_ours(pid, folder) for pid in stack.pids.values()) else None


def stop(folder: Path) -> bool:
    """End both servers and remove the copied credentials; the data is kept. Returns True if any ran."""
    for name in SECRET_FILES:
        (folder / name).unlink(missing_ok=True)
    path = folder / STATE_FILE
    if not path.exists():
        return False
    pids = [pid for pid in json.loads(path.read_text())["pids"].values() if _is_ours(pid, folder)]
    for sent in (signal.SIGTERM, signal.SIGKILL):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, sent)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while any(_is_ours(pid, folder) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
    path.unlink()
    return bool(pids)


def _write_configuration(folder: Path, settings: Settings, *, alertmanager: str) -> None:
    rules = [str(RULES / "*.yaml"), *map(str, settings.extra_rules)]
    if settings.test_alert:
        (folder / "test-alert.yaml").write_text(json.dumps(test_alert_rules(), indent=1))
        rules.append(str(folder / "test-alert.yaml"))
    config = prometheus_config(
        read_access(settings.kubeconfig, folder),
        kubeconfig=settings.kubeconfig,
        alertmanager=alertmanager,
        rules=rules,
        interval_s=settings.interval_s,
    )
    (folder / "prometheus.yml").write_text(json.dumps(config, indent=1))
    (folder / "alertmanager.yml").write_text(json.dumps(alertmanager_config(), indent=1))


def _prometheus(programs: Path, folder: Path, port: int) -> list[str]:
    return [
        str(programs / "prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
        # An alert that fires before Alertmanager is found would be sent again only after a minute.
        "--rules.alert.resend-delay=5s",
        "--log.level=warn",
    ]


def _alertmanager(programs: Path, folder: Path, port: int) -> list[str]:
    return [
        str(programs / "alertmanager"),
        f"--config.file={folder / 'alertmanager.yml'}",
        f"--storage.path={folder / 'alerts'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",  # one instance: no gossip
        "--log.level=warn",
    ]


def _spawn(command: list[str], log: Path) -> int:
    with log.open("wb") as output:
        popen = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    return popen.pid


def _wait(stack: Stack) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    for name, url in (("prometheus", stack.prometheus), ("alertmanager", stack.alertmanager)):
        while not is_ready(f"{url}/-/ready"):
            log = Path(stack.folder, f"{name}.log")
            if not _is_ours(stack.pids[name], Path(stack.folder)):
                raise StackError(f"{name} ended; its log {log}:\n{log.read_text()[-2000:]}")
            if time.monotonic() > deadline:
                raise StackError(f"{name} did not become ready in {READY_TIMEOUT_S:.0f} s; see {log}")
            time.sleep(0.1)


def _is_ours(pid: int, folder: Path) -> bool:
    """Return whether the process runs and was started for this folder, since pids are reused."""
    try:
        if os.waitpid(pid, os.WNOHANG)[0] == pid:
            return False
    except ChildProcessError:
        pass  # started by an earlier command
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    if not command:  # a zombie, or the kernel is about to start it
        return state != "Z"
    return str(folder).encode() in command


def _port(preferred: int) -> int:
    """Return the preferred port, or a free one if it is taken."""
    for wanted in (preferred, 0):
        with socket.socket() as probe:
            # A port whose last connections are still closing counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", wanted))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise StackError("no free port on 127.0.0.1")

"""Checks of names and connections: locally only DNS, inside pods also whether a NetworkPolicy holds."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from zerotrain.cli.doctor.finding import Finding, Group, State

SLOW_S = 1.0
CONNECT_TIMEOUT_S = 4.0
PATIENCE_S = 20.0
"""Seconds to retry a port that should be open, because its pod and its policy may have just started."""
CLUSTER_NAME = "kubernetes.default.svc"


def dns() -> list[Finding]:
    """Return findings about the resolution of the host's own name, and in a pod of the API server's name."""
    group = Group("network")
    names = [socket.gethostname(), "localhost"]
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        names.append(CLUSTER_NAME)
    for name in names:
        began = time.perf_counter()
        try:
            found = sorted(
                {str(item[4][0]) for item in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
            )
        except OSError as error:
            group.add(
                f"DNS {name}",
                State.FAIL,
                "",
                f"{error}; ranks find each other by name: look at /etc/resolv.conf",
            )
            continue
        took = time.perf_counter() - began
        group.check(
            f"DNS {name}",
            f"{', '.join(found[:3])} in {took * 1000:.0f} ms",
            good=took < SLOW_S,
            note="slow answers delay every rendezvous: look at the cluster's DNS and `ndots`",
        )
    servers = [
        line.split()[1]
        for line in _lines(Path("/etc/resolv.conf"))
        if line.startswith("nameserver ") and len(line.split()) > 1
    ]
    group.add("name servers", State.OK if servers else State.WARN, ", ".join(servers) or "none")
    return group.findings


def listen(ports: Sequence[int], *, seconds: float) -> list[socket.socket]:
    """Accept and close connections on these ports for `seconds`, in one thread per port."""
    servers = [socket.create_server(("", port)) for port in ports]
    until = time.monotonic() + seconds
    for server in servers:
        server.settimeout(0.5)
        threading.Thread(target=_serve, args=(server, until), daemon=True).start()
    return servers


def _serve(server: socket.socket, until: float) -> None:
    while time.monotonic() < until:
        try:
            connection, _ = server.accept()
        except OSError:
            continue
        connection.close()


def reach(allowed: Sequence[str], denied: Sequence[str]) -> list[Finding]:
    """Return whether NetworkPolicies hold: `host:port` in `allowed` must be reachable, in `denied` not."""
    group = Group("network")
    opened = [_opens(target, PATIENCE_S) for target in allowed]
    for target, is_open in zip(allowed, opened, strict=True):
        group.check(
            f"reach {target}",
            "open" if is_open else "closed",
            good=is_open,
            note="the policy allows it, so something else is in the way: the network plug-in, another "
            "policy, a firewall between nodes",
            bad=State.FAIL,
        )
    for target in denied:
        is_open = _opens(target, 0.0)
        if not is_open and not all(opened):
            group.add(f"refuse {target}", State.SKIP, "closed", "nothing can be reached: no proof")
            continue
        group.check(
            f"refuse {target}",
            "open" if is_open else "closed",
            good=not is_open,
            note="NetworkPolicies are not enforced here: any pod of the cluster can reach the ranks. Install "
            "a network plug-in that does, such as Calico or Cilium",
        )
    return group.findings


def _opens(target: str, patience_s: float) -> bool:
    host, _, port = target.rpartition(":")
    until = time.monotonic() + patience_s
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
            return True
        except OSError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.5)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []

"""Runs in a pod under `helm test`: every replica of the operator is healthy and ready, and one leads."""

import os
import socket
import sys
import time
import urllib.request

PORT = 8080
PATIENCE_S = 60.0


def ask(address: str, path: str) -> str:
    host = f"[{address}]" if ":" in address else address
    with urllib.request.urlopen(f"http://{host}:{PORT}{path}", timeout=5) as answer:
        return answer.read().decode()


def leads(address: str) -> bool:
    lines = ask(address, "/metrics").splitlines()
    return any(
        line.startswith("zerotrain_operator_leader") and float(line.split()[-1]) == 1 for line in lines
    )


def check() -> str:
    """What was found. Raises OSError or ValueError while something is not as it should be."""
    found = socket.getaddrinfo(os.environ["SERVICE"], PORT, type=socket.SOCK_STREAM)
    addresses = sorted({str(entry[4][0]) for entry in found})
    for address in addresses:
        ask(address, "/healthz")
        ask(address, "/readyz")
    leaders = [address for address in addresses if leads(address)]
    if len(leaders) != 1:
        raise ValueError(f"{len(leaders)} of {len(addresses)} replicas lead; exactly one must")
    return f"{len(addresses)} of the operator's replicas are ready, {leaders[0]} leads"


deadline = time.monotonic() + PATIENCE_S
while True:
    try:
        print(check())
        break
    except (OSError, ValueError) as error:
        print(f"not yet: {error}", file=sys.stderr)
        if time.monotonic() > deadline:
            sys.exit(f"gave up after {PATIENCE_S:.0f} s: {error}")
        time.sleep(1)

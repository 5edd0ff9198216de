"""TCP ports on loopback that are this process's alone until it ends.

A port that the kernel gave a moment ago may be the source of somebody's connection by the time a server binds
it, or another test's. These lie below the kernel's range (32768 up) and the development cluster's (20000 up);
the claim on one is a name that a process can have once on a machine, and loses when it ends.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

FIRST, LAST = 11_000, 19_999

_claims: list[socket.socket] = []


def free_port() -> int:
    """One that nobody listens on and that no other test will be given."""
    count = LAST - FIRST + 1
    for number in range(count):
        port = FIRST + (os.getpid() * 37 + len(_claims) + number) % count
        claim = _claimed(port)
        if claim is None:
            continue
        _claims.append(claim)
        if _is_free(port):
            return port
    raise RuntimeError(f"no free TCP port between {FIRST} and {LAST}; stop what holds them")


@contextmanager
def closed_port() -> Iterator[int]:
    """One that refuses connections for the length of the block: it is bound, and nobody listens."""
    with closing(socket.socket()) as holder:
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def _claimed(port: int) -> socket.socket | None:
    """None when somebody has it. Not for children: they would keep the claim."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0zerotrain-test-port-{port}")
    except OSError:
        claim.close()
        return None
    return claim


def _is_free(port: int) -> bool:
    with closing(socket.socket()) as probe:
        # As servers do: a port whose last connections still wind down is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True

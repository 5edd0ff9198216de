"""TCP ports on loopback that belong to this process alone until it ends.

A port that the kernel has just assigned may be the source port of another connection, or taken by another
test, before the server binds it. These ports lie below the kernel's range (32768 up) and the development
cluster's (20000 up). A process claims a port by binding a name that only one process of a machine can have,
and that is released when the process ends.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

FIRST, LAST = 11_000, 19_999

_claims: list[socket.socket] = []


def free_port() -> int:
    """Return a port on which no process listens and that no other test is given."""
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
    """Provide a port that refuses connections for the length of the block: it is bound without a listener."""
    with closing(socket.socket()) as holder:
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def _claimed(port: int) -> socket.socket | None:
    """Claim a port; return None if it is claimed already. Child processes do not inherit the claim."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0zerotrain-test-port-{port}")
    except OSError:
        claim.close()
        return None
    return claim


def _is_free(port: int) -> bool:
    with closing(socket.socket()) as probe:
        # As servers do: a port with connections in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True

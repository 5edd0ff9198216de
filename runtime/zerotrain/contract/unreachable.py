"""Detection of an unreachable network in the last output of a program.

Only texts about name resolution and about connections to hosts with a name or a URL count: ranks that lose
each other report it in the words of gloo and NCCL, which does not concern the network policy.
"""

from __future__ import annotations

import re
from typing import Final

MAX_CHARS: Final = 4096

_BETWEEN_RANKS: Final = re.compile(
    r"gloo|nccl|tcpstore|c10d|rendezvous|connectFullMesh|:29400\b", re.IGNORECASE
)

_UNREACHED: Final = re.compile(
    "|".join(
        (
            # Name resolution: libc, curl, wget, Go, Node, Java, musl.
            r"name or service not known",
            r"temporary failure in name resolution",
            r"could not resolve (host|proxy)",
            r"no address associated with hostname",
            r"nodename nor servname provided",
            r"bad address '",
            r"no such host",
            r"\bEAI_AGAIN\b|\bENOTFOUND\b",
            r"failed to resolve '",
            r"nameresolutionerror|unknownhostexception|server misbehaving",
            # Connections.
            r"failed to establish a new connection",
            r"max retries exceeded with url",
            r"connecttimeout(error)?\b|newconnectionerror",
            r"could not connect to the endpoint url|endpointconnectionerror",
            r"connect timeout on endpoint url",
            r"couldn't connect to '?https?://|can't connect to '?https?://",
            r"we couldn't connect to 'https?://",
            r"failed to connect to \S+ port \d+",
            r"dial (tcp|udp) \S+ (i/o timeout|connect: )",
            r"\burlopen error\b",
            r"network is unreachable|no route to host",
            r"\bENETUNREACH\b|\bEHOSTUNREACH\b|\bETIMEDOUT\b",
            r"cannot reach https?://|unable to access 'https?://",
            r"connection (timed out|refused)[^\n]{0,80}https?://",
            r"https?://[^\n]{0,80}connection (timed out|refused)",
        )
    ),
    re.IGNORECASE,
)


def reports_unreachable_host(text: str) -> bool:
    """Return whether the text says that a host outside of the job could not be reached."""
    text = text[-MAX_CHARS:]
    return _UNREACHED.search(text) is not None and _BETWEEN_RANKS.search(text) is None

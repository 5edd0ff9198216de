"""Loopback addresses through which a test reaches a server that listens on all addresses."""

from __future__ import annotations

import errno
import socket

import pytest

LOOPBACKS = ("127.0.0.1", "::1")


def need(address: str) -> None:
    """Skip the test if the machine lacks the address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise
        pytest.skip(f"this machine has no {address}: {error}")

"""Ranks share their memory files with the ranks of their group alone: a process that takes a rank's socket
name, or connects in its place, receives and sends nothing."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from zerotrain.runtime.comm.fd_exchange import FACTS_BYTES, FdExchange, Neighbour

pytestmark = pytest.mark.ranks

LISTENER = """
import socket, sys
s = socket.socket(socket.AF_UNIX)
s.bind(b"\\0zerotrain-" + sys.argv[1].encode())
s.listen(1)
print("listening", flush=True)
connection, _ = s.accept()
message, descriptors, _, _ = socket.recv_fds(connection, 4096, 8)
print("got", len(message), len(descriptors), flush=True)
"""


@pytest.fixture
def memory() -> Iterator[int]:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    yield fd
    os.close(fd)


def group_of(*exchanges: FdExchange) -> list[Neighbour]:
    return [Neighbour.parse(exchange.facts()) for exchange in exchanges]


def test_both_ends_get_each_others_memory(memory: int) -> None:
    exchanges = [FdExchange(), FdExchange()]
    group = group_of(*exchanges)
    with ThreadPoolExecutor() as pool:
        ends = [pool.submit(exchange.run, rank, group, memory) for rank, exchange in enumerate(exchanges)]
        received = [end.result() for end in ends]
    assert [list(peer_fds) for peer_fds in received] == [[1], [0]]
    for peer_fds in received:
        for peer_fd in peer_fds.values():
            assert peer_fd.pid == os.getpid()
            assert os.path.sameopenfile(peer_fd.fd, memory)
            os.close(peer_fd.fd)
    for exchange in exchanges:
        exchange.close()


def test_no_secret_is_in_a_name() -> None:
    exchange = FdExchange()
    [neighbour] = group_of(exchange)
    with open("/proc/net/unix") as lines:
        names = [line for line in lines if "@zerotrain-" in line]
    assert any(neighbour.name.hex() in name for name in names)
    assert not any(neighbour.token.hex() in name for name in names)
    assert len(exchange.facts()) == FACTS_BYTES
    exchange.close()


def test_who_took_a_name_gets_nothing(memory: int) -> None:
    """Another process of the same user listens under a name that the rank has just lost."""
    own, lost = FdExchange(), FdExchange()
    group = group_of(own, lost)
    lost.close()
    taker = subprocess.Popen(
        [sys.executable, "-c", LISTENER, group[1].name.hex()], stdout=subprocess.PIPE, text=True
    )
    assert taker.stdout is not None
    assert taker.stdout.readline() == "listening\n"
    with pytest.raises(OSError, match=rf"listens on its socket is {taker.pid} of user "):
        own.run(0, group, memory)
    own.close()
    output, _ = taker.communicate(timeout=60)
    assert output == "got 0 0\n"


def test_a_process_of_another_user_is_not_the_rank(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may have the same pid as the rank's process had."""
    own, other = FdExchange(), FdExchange()
    group = group_of(own, other)
    here = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: here + 1)
    with pytest.raises(OSError, match=f"listens on its socket is .* of user {here}, .* of user {here + 1}$"):
        own.run(0, group, memory)
    own.close()
    other.close()


def test_a_process_that_connects_with_the_groups_token_must_be_the_rank(memory: int) -> None:
    own, other = FdExchange(), FdExchange()
    group = group_of(own, other)
    group = [group[0], replace(group[1], pid=1)]
    connect(group, memory, token=group[0].token)
    with pytest.raises(OSError, match=r"that connected is .*, but the rank is process 1 "):
        own._receive(group)
    own.close()
    other.close()


@pytest.mark.parametrize("rank", [-1, 2, 1 << 40])
def test_a_rank_that_is_not_there_is_refused(rank: int, memory: int) -> None:
    own, other = FdExchange(), FdExchange()
    group = group_of(own, other)
    connect(group, memory, token=group[0].token, rank=rank)
    with pytest.raises(OSError, match="not a member of this process group"):
        own._receive(group)
    own.close()
    other.close()


def test_without_the_token_nothing_is_taken(memory: int) -> None:
    own, other = FdExchange(), FdExchange()
    group = group_of(own, other)
    for token in (group[0].name, group[1].token):
        connect(group, memory, token=token)
        with pytest.raises(OSError, match="not a member of this process group"):
            own._receive(group)
    own.close()
    other.close()


def connect(group: list[Neighbour], memory: int, *, token: bytes, rank: int = 1) -> None:
    """Connect to the socket of rank 0 as rank 1."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(b"\0zerotrain-" + group[0].name.hex().encode())
        socket.send_fds(peer, [struct.pack("16sq", token, rank)], [memory])

"""Hands every rank's memory file to every other rank of the host, as a descriptor of an unnamed file.

The sockets are in the abstract namespace. They leave nothing behind, and ranks in different network
namespaces, which cannot share memory either, cannot reach each other. Socket names are public
(`/proc/net/unix`), and a name is free again once its socket is closed. So both ends ask the kernel for the
process at the other end (SO_PEERCRED): it must be of the same user and be the process that the group named
through its own collective. The sender must also know the group's token, which is in no name.
"""

from __future__ import annotations

import array
import hashlib
import os
import platform
import secrets
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HANDSHAKE_SECONDS = 20.0
_HELLO = struct.Struct("16sq")  # token of the group, rank of the sender
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred

_FACTS = struct.Struct("32s16s16sq")  # key of the host, name of the socket, token, pid
FACTS_BYTES = _FACTS.size
"""Size of `FdExchange.facts()` in bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbour:
    """Address and identity of a rank, which it sends to the group."""

    host: bytes
    """Key of the host, equal for ranks that may share memory; zeros if the rank cannot share memory."""
    name: bytes
    """Name of the rank's socket."""
    token: bytes
    pid: int

    @classmethod
    def parse(cls, facts: bytes) -> Neighbour:
        host, name, token, pid = _FACTS.unpack(facts)
        return cls(host=host, name=name, token=token, pid=pid)


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerFd:
    """Memory file and process of another rank."""

    fd: int
    pid: int


class FdExchange:
    """Listening socket of this rank, for the exchange of memory files."""

    def __init__(self) -> None:
        self._name, self._token = secrets.token_bytes(16), secrets.token_bytes(16)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(_address(self._name))
        self._socket.listen(4096)

    def facts(self) -> bytes:
        """Return what the other ranks must know of this one: the key of its host, its socket, its token and
        its pid."""
        return _FACTS.pack(host_key(), self._name, self._token, os.getpid())

    def run(self, rank: int, group: Sequence[Neighbour], fd: int) -> dict[int, PeerFd]:
        """Send `fd` to every other rank and return theirs by rank. Raises OSError, also on a timeout."""
        for peer, neighbour in enumerate(group):
            if peer != rank:
                self._send(neighbour, rank, fd, token=group[0].token)
        received: dict[int, PeerFd] = {}
        self._socket.settimeout(HANDSHAKE_SECONDS)
        while len(received) < len(group) - 1:
            peer, peer_fd = self._receive(group)
            received[peer] = peer_fd
        return received

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    @staticmethod
    def _send(to: Neighbour, rank: int, fd: int, *, token: bytes) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.settimeout(HANDSHAKE_SECONDS)
            peer.connect(_address(to.name))
            _check_process(peer, to, "that listens on its socket")
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
            peer.sendmsg([_HELLO.pack(token, rank)], rights)

    def _receive(self, group: Sequence[Neighbour]) -> tuple[int, PeerFd]:
        connection, _ = self._socket.accept()
        with connection:
            connection.settimeout(HANDSHAKE_SECONDS)
            message, fd = receive_descriptor(connection, _HELLO.size)
            token, peer = _HELLO.unpack(message)
            try:
                if not secrets.compare_digest(token, group[0].token) or not 0 <= peer < len(group):
                    raise OSError("a process that is not a member of this process group connected")
                pid = _check_process(connection, group[peer], "that connected")
            except OSError:
                os.close(fd)
                raise
            return peer, PeerFd(fd=fd, pid=pid)


def _check_process(connection: socket.socket, expected: Neighbour, what: str) -> int:
    """Return the pid of the process at the other end. Raises OSError unless it is the expected one."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    if uid != os.getuid() or pid != expected.pid:
        raise OSError(
            f"the process {what} is {pid} of user {uid}, but the rank is process {expected.pid} of user "
            f"{os.getuid()}"
        )
    return int(pid)


def receive_descriptor(connection: socket.socket, num_bytes: int) -> tuple[bytes, int]:
    """Return a message of `num_bytes` bytes and the descriptor that came with it. Raises OSError.

    Programs that this one starts do not inherit the descriptor (`socket.recv_fds` ignores its flags).
    """
    descriptors = array.array("i")
    message, attached, _, _ = connection.recvmsg(
        num_bytes, socket.CMSG_LEN(descriptors.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, data in attached:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data)
    if len(message) != num_bytes or len(descriptors) != 1:
        for descriptor in descriptors:
            os.close(descriptor)
        raise OSError("the message with another rank's memory file is incomplete")
    return message, descriptors[0]


def host_key() -> bytes:
    """Return 32 bytes that are equal for ranks which may share memory: same boot of the same machine, same
    network and pid namespaces, same user."""
    facts = [platform.node(), str(os.getuid())]
    for path in ("/proc/sys/kernel/random/boot_id", "/etc/machine-id"):
        try:
            facts.append(Path(path).read_text().strip())
        except OSError:
            facts.append("")
    for namespace in ("net", "pid"):
        try:
            facts.append(str(Path("/proc/self/ns", namespace).stat().st_ino))
        except OSError:
            facts.append("")
    return hashlib.sha256("|".join(facts).encode()).digest()


def _address(name: bytes) -> bytes:
    return b"\0zerotrain-" + name.hex().encode()

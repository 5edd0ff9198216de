"""The launcher's end of the channel: reads the ranks' messages and stores them in the rank table."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotrain.contract.progress import Progress
from zerotrain.contract.strict_json import strict_json
from zerotrain.runtime.channel import MAX_MESSAGE_BYTES
from zerotrain.runtime.launch.log import say
from zerotrain.runtime.launch.rank_table import RankTable


@dataclass(frozen=True, kw_only=True, slots=True)
class _Peer:
    """The rank at the other end of a connection."""

    rank: int
    channel: str
    """Name of the channel: the same after a reconnection, a different one for every `RankChannel`."""


class ChannelServer:
    """Listens on the worker's Unix socket; an invalid message ends that connection, never the launcher."""

    def __init__(self, rank_table: RankTable, *, on_failure: Callable[[int], None]) -> None:
        """`on_failure(rank)` is called in the loop when a rank announces its end."""
        self._rank_table = rank_table
        self._on_failure = on_failure
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def listen(self, path: Path) -> None:
        """Listen at `path`, which must not exist; the folder's mode decides who may connect."""
        self._server = await asyncio.start_unix_server(self._serve, path, limit=MAX_MESSAGE_BYTES)

    async def drain(self, timeout_s: float) -> None:
        """Read the messages that the ranks sent before they ended; the end of the last process closes a
        connection."""
        if self._connections:
            await asyncio.wait(self._connections, timeout=timeout_s)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()

    def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._read(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer: _Peer | None = None
        try:
            while line := await reader.readline():
                if not line.endswith(b"\n"):
                    break  # the sender died within a message
                # A metric that was never set, or a loss that diverged, is NaN.
                peer = self._accept(peer, strict_json(line, max_bytes=MAX_MESSAGE_BYTES, finite=False))
        except (ValueError, KeyError, TypeError) as error:
            # ValueError: also a line above the limit (asyncio) and bytes that are not JSON.
            say(f"message of rank {None if peer is None else peer.rank} refused: {str(error)[:300]}")
        except ConnectionError:
            return
        finally:
            writer.close()

    def _accept(self, peer: _Peer | None, message: Any) -> _Peer:
        """Apply one message; the first must be the hello that names the rank."""
        if not isinstance(message, dict):
            raise ValueError("a message must be a JSON object")
        kind = message.get("kind")
        if kind == "hello":
            rank_id = message["rank"]
            if rank_id not in self._rank_table.ranks:
                raise ValueError(
                    f"rank {rank_id!r} is not one of this worker's {list(self._rank_table.ranks)}"
                )
            peer = _Peer(rank=int(rank_id), channel=f"{message.get('pid')}/{message.get('channel')}")
            self._rank_table.connected(peer.rank, peer.channel)
            return peer
        if peer is None:
            raise ValueError(f"{kind!r} before hello")
        rank = peer.rank
        match kind:
            case "progress":
                self._rank_table.progressed(rank, Progress.from_json(json.dumps(message["progress"])))
            case "metrics":
                self._rank_table.measured(rank, message["families"])
            case "failure":
                self._rank_table.failing(rank, str(message["text"]), peer.channel)
                self._on_failure(rank)
            case "note":
                say(f"rank {rank}: {message['text']}")
            case _:
                raise ValueError(f"unknown kind {kind!r}")
        return peer

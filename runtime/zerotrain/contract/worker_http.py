"""The HTTP interface of every worker's launcher, which the operator (or `zerotrain run`) calls.

Requests that only read the worker's records are answered without a token: the job's NetworkPolicy admits only
the operator and the monitoring namespace. A token that the operator sends with them
(`channel_token.for_reading`) keeps it from being displaced by other clients that hold connections open.
Requests that affect the ranks, `POST /yield` and `GET /stacks`, carry the channel token of the attempt in a
separate header, because the API server's pod proxy, the way in from outside a cluster, removes
`Authorization`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from zerotrain.contract.progress import MAX_RANKS, CheckpointProgress, Progress, build
from zerotrain.contract.strict_json import JsonError, own_json, strict_json

TOKEN_HEADER = "Zerotrain-Channel-Token"
METRICS_PATH = "/metrics"
PROGRESS_PATH = "/progress"
HISTORY_PATH = "/history"
"""Path of the job's history as JSON lines (`contract.history`), of all attempts in its folder.

Only worker 0 has it.
"""
MAX_REPORT_BYTES = 64 << 20
"""Largest report that is read at all; the operator reads far less."""
READY_PATH = "/ready"
"""Path that answers 200 once every rank of this worker has passed its rendezvous, 503 before."""
STACKS_PATH = "/stacks"
"""Path that signals every rank of this worker and returns the stacks of all their threads as text.

It needs the token if the worker has one. A local run has none and answers only its own host.
"""
MAX_STACKS_BYTES = 512 << 10
"""Longest answer of STACKS_PATH, of which each rank has an equal share."""
YIELD_PATH = "/yield"
"""Path of the request to stop.

It answers 202 accepted (again: the call is idempotent), 401 no token, 403 wrong token, 409 other attempt.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerReport:
    """The body of `GET /progress`: one worker of one attempt."""

    job: str
    job_uid: str
    attempt: int
    node_rank: int
    world_size: int
    ready: bool = False
    stopping: bool = False
    """Whether a stop was requested (SIGTERM or POST /yield), so that the ranks will exit with 75."""
    ranks: tuple[Progress, ...] = ()
    """Newest record of every rank of this worker, in rank order.

    A rank that never reported (a user's own program) has a record with heartbeat_at 0.
    """

    @property
    def slowest(self) -> Progress | None:
        """The rank with the lowest step; None if the worker has no ranks."""
        return min(self.ranks, key=lambda rank: (rank.step, rank.rank), default=None)

    @property
    def checkpoint(self) -> CheckpointProgress | None:
        """The newest durable checkpoint that any rank knows of."""
        known = [rank.checkpoint for rank in self.ranks if rank.checkpoint is not None]
        return max(known, key=lambda checkpoint: checkpoint.step, default=None)

    def to_json(self) -> str:
        record = asdict(self)
        record["ranks"] = [own_json(rank.to_json()) for rank in self.ranks]
        return json.dumps(record, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str, *, max_ranks: int = MAX_RANKS) -> WorkerReport:
        """Parse a report. Raises ValueError for other text, a missing required key or too many ranks.

        A tenant's program may answer, and each record costs its reader time and memory.
        """
        try:
            data = strict_json(text, max_bytes=MAX_REPORT_BYTES)
        except JsonError as error:
            raise ValueError(f"worker report {error}") from error
        if not isinstance(data, dict):
            raise ValueError(f"worker report must be a JSON object; got {type(data).__name__}")
        known = {key: value for key, value in data.items() if key in cls.__dataclass_fields__}
        if not isinstance(known.get("ranks", []), list):
            raise ValueError(f"WorkerReport.ranks must be a list; got {type(known['ranks']).__name__}")
        count = len(known.get("ranks", ()))
        if count > max_ranks:
            raise ValueError(f"WorkerReport.ranks must have at most {max_ranks} entries; got {count}")
        known["ranks"] = tuple(Progress.from_record(rank) for rank in known.get("ranks", ()))
        return build(cls, known)


def yield_body(attempt: int) -> bytes:
    """Return the body of `POST /yield`."""
    return json.dumps({"attempt": attempt}).encode()


def yield_attempt(body: bytes) -> int:
    """Return the attempt that a `POST /yield` body names. Raises ValueError if it names none."""
    data: Any = strict_json(body)
    attempt = data.get("attempt") if isinstance(data, Mapping) else None
    if not isinstance(attempt, int) or isinstance(attempt, bool):
        raise ValueError('the body must be {"attempt": <number>}')
    return attempt


def bearer(token: str) -> dict[str, str]:
    """Return the header that carries the channel token."""
    return {TOKEN_HEADER: f"Bearer {token}"}

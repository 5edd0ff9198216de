"""The ConfigMap that keeps the stacks of a hung attempt: a summary of the ranks by stack, then each worker's
stacks.

The texts come from the tenant's program. They are bounded, and free of the control characters that could
manipulate a terminal that shows them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from zerotrain.contract.text import printable_lines
from zerotrain.operator.api import ZeroTrainingJob

from .identity import Json, attempt_labels, metadata

MAX_BYTES = 512 << 10
"""Bytes of all texts together; a ConfigMap may hold 1 MiB."""

MAX_SUMMARY_BYTES = 32 << 10
SUMMARY_KEY = "summary.txt"
FRAMES = 4
"""Number of innermost frames of the main thread by which ranks are grouped."""

CUT = "\n(cut here)\n"
_RANK = re.compile(r"^=== rank (\d{1,9}) \(pid \d+, ([^)\n]{0,60})\)$")
_FRAME = re.compile(r'^ {2}File "(?P<file>.{1,500})", line (?P<line>\d+) in (?P<name>.{1,200})$')


def stacks_name(job_name: str, attempt: int) -> str:
    return f"{job_name}-{attempt}-stacks"


def stacks_config_map(job: ZeroTrainingJob, attempt: int, texts: Mapping[int, str]) -> Json:
    """Return the ConfigMap of `texts` by worker, the blamed worker first; each gets an equal share of the
    size limit."""
    clean = {worker: "\n".join(printable_lines(text)) for worker, text in texts.items()}
    share = (MAX_BYTES - MAX_SUMMARY_BYTES) // max(len(clean), 1)
    data = {f"worker-{worker}.txt": _cut(text, share) for worker, text in clean.items()}
    data[SUMMARY_KEY] = _cut(summary(list(clean.values()), attempt), MAX_SUMMARY_BYTES)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job, stacks_name(job.name, attempt), attempt_labels(job, attempt)),
        "data": data,
    }


def summary(texts: Sequence[str], attempt: int) -> str:
    """Return the ranks grouped by stack, the smallest group first: the odd rank out is usually the cause."""
    places: dict[tuple[str, ...], list[int]] = {}
    for text in texts:
        for rank, place in _places(text):
            places.setdefault(place, []).append(rank)
    lines = [f"attempt {attempt}: innermost frames of the main threads, the rarest place first"]
    for place, ranks in sorted(places.items(), key=lambda item: (len(item[1]), item[1])):
        shown = ", ".join(str(rank) for rank in sorted(ranks)[:20]) + (", ..." if len(ranks) > 20 else "")
        lines += ["", f"{len(ranks)} ranks: {shown}" if len(ranks) > 1 else f"rank {shown}", *place]
    return "\n".join(lines) + "\n"


def _places(text: str) -> list[tuple[int, tuple[str, ...]]]:
    """Return each rank with the state of its process and the innermost frames of its main thread, which is
    dumped last."""
    found: list[tuple[int, tuple[str, ...]]] = []
    rank, state, frames = -1, "", list[str]()
    for line in [*text.splitlines(), "=== rank 0 (pid 0, end)"]:
        if header := _RANK.match(line):
            if rank >= 0:
                found.append((rank, (f"  process: {state}", *(frames[:FRAMES] or ["  (no stacks)"]))))
            rank, state, frames = int(header[1]), header[2], []
        elif line.startswith(("Thread 0x", "Current thread 0x")):
            frames = []
        elif frame := _FRAME.match(line):
            frames.append(f"  {frame['name']} ({frame['file']}:{frame['line']})")
    return found


def _cut(text: str, limit: int) -> str:
    encoded = text.encode(errors="replace")
    if len(encoded) <= limit:
        return encoded.decode()
    return encoded[: limit - len(CUT)].decode(errors="ignore") + CUT

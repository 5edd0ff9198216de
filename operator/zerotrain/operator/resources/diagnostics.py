"""The ConfigMaps that keep what failed and hung attempts left: the last log lines of failed ranks, and the
stacks of hung ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice

from zerotrain.contract.progress import MAX_RANKS
from zerotrain.contract.text import printable
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.api.status import MAX_FAILURES

from .identity import Json, attempt_labels, common_labels, metadata

_LOG_KEY = re.compile(r"attempt-(\d+)\.")


def failures_config_map(job: ZeroTrainingJob, data: Mapping[str, str]) -> Json:
    """Return the ConfigMap with the last log lines of the failed rank of the newest attempts.

    There is one per job, not per attempt: it is deleted with the job, and its size is bounded.
    """
    meta = metadata(job, f"{job.name}-failures", common_labels(job))
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": dict(data)}


def outdated_keys(keys: Iterable[str], newest: str) -> list[str]:
    """Return the keys of attempts beyond the number that status.failures shows, once `newest` is added."""
    attempts = {key: int(found[1]) for key in keys if (found := _LOG_KEY.match(key))}
    added = _LOG_KEY.match(newest)
    numbers = sorted({*attempts.values(), *([int(added[1])] if added else [])})
    kept = set(numbers[-MAX_FAILURES:])
    return sorted(key for key, number in attempts.items() if number not in kept)


MAX_STACKS_BYTES = 512 << 10
"""Bytes of all texts together; a ConfigMap may hold 1 MiB."""

MAX_SUMMARY_BYTES = 32 << 10
MAX_STACKS_LINES = 20_000
"""Number of lines of one worker's stacks that are read: twice those of the longest answer of a launcher."""

SUMMARY_KEY = "summary.txt"
FRAMES = 4
"""Number of innermost frames of the main thread by which ranks are grouped."""

CUT = "\n(cut here)\n"
_RANK = re.compile(r"^=== rank (\d{1,9}) \(pid \d+, ([^)\n]{0,60})\)$")
_FRAME = re.compile(r'^ {2}File "(?P<file>.{1,500})", line (?P<line>\d+) in (?P<name>.{1,200})$')


@dataclass(frozen=True, slots=True)
class WorkerStacks:
    """Part of one worker's stacks that is kept."""

    text: str
    places: tuple[tuple[int, tuple[str, ...]], ...]
    """Each rank, with the state of its process and the innermost frames of its main thread."""


def read_stacks(text: str, *, workers: int) -> WorkerStacks:
    """Read the stacks of one of so many workers, each of which gets an equal share of the size limit.

    They come from the tenant's program, so they are freed of the control characters that could manipulate a
    terminal that shows them, and bounded in lines, which cost more than their length.
    """
    lines = [printable(line) for line in text.split("\n", MAX_STACKS_LINES)[:MAX_STACKS_LINES]]
    share = (MAX_STACKS_BYTES - MAX_SUMMARY_BYTES) // max(workers, 1)
    return WorkerStacks(_cut("\n".join(lines), share), tuple(islice(_places(lines), MAX_RANKS)))


def stacks_config_map(job: ZeroTrainingJob, attempt: int, stacks: Mapping[int, WorkerStacks]) -> Json:
    """Return the ConfigMap of a hung attempt: a summary of the ranks by stack, then each worker's stacks.

    `stacks` are by worker, the blamed worker first.
    """
    data = {f"worker-{worker}.txt": found.text for worker, found in stacks.items()}
    data[SUMMARY_KEY] = _cut(summary(stacks.values(), attempt), MAX_SUMMARY_BYTES)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job, f"{job.name}-{attempt}-stacks", attempt_labels(job, attempt)),
        "data": data,
    }


def summary(stacks: Iterable[WorkerStacks], attempt: int) -> str:
    """Return the ranks grouped by stack, the smallest group first: the odd rank out is usually the cause."""
    places: dict[tuple[str, ...], list[int]] = {}
    for worker in stacks:
        for rank, place in worker.places:
            places.setdefault(place, []).append(rank)
    lines = [f"attempt {attempt}: innermost frames of the main threads, the rarest place first"]
    for place, ranks in sorted(places.items(), key=lambda item: (len(item[1]), item[1])):
        shown = ", ".join(str(rank) for rank in sorted(ranks)[:20]) + (", ..." if len(ranks) > 20 else "")
        lines += ["", f"{len(ranks)} ranks: {shown}" if len(ranks) > 1 else f"rank {shown}", *place]
    return "\n".join(lines) + "\n"


def _places(lines: Iterable[str]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield each rank with the state of its process and the innermost frames of its main thread, which is
    dumped last."""
    rank, state, frames = -1, "", list[str]()
    for line in chain(lines, ["=== rank 0 (pid 0, end)"]):
        if header := _RANK.match(line):
            if rank >= 0:
                yield rank, (f"  process: {state}", *(frames[:FRAMES] or ["  (no stacks)"]))
            rank, state, frames = int(header[1]), header[2], []
        elif line.startswith(("Thread 0x", "Current thread 0x")):
            frames = []
        elif len(frames) < FRAMES and (frame := _FRAME.match(line)):
            frames.append(f"  {frame['name']} ({frame['file']}:{frame['line']})")


def _cut(text: str, limit: int) -> str:
    encoded = text.encode(errors="replace")
    if len(encoded) <= limit:
        return encoded.decode()
    return encoded[: limit - len(CUT)].decode(errors="ignore") + CUT

"""State of the ranks as the launcher knows it, shared by the event loop (writes) and the HTTP threads
(read)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from zerotrain.contract.metrics import LAUNCHER_METRICS, WORKER_METRICS
from zerotrain.contract.progress import Phase, Progress
from zerotrain.contract.worker_environment import LaunchSpec
from zerotrain.contract.worker_http import WorkerReport
from zerotrain.runtime.launch.activity import MotionTracker
from zerotrain.runtime.launch.library_status import with_status
from zerotrain.runtime.metrics import Families, MergedCollector, restore
from zerotrain.runtime.offload.free_memory import free_memory

BEFORE_RENDEZVOUS = frozenset({Phase.INIT, Phase.RENDEZVOUS})

OF_AN_END = frozenset({Phase.CHECKPOINT, Phase.DONE})
"""Phases that a failing rank may still enter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Failure:
    """A rank's announcement that it is about to end."""

    text: str
    at: float
    """Monotonic seconds."""
    channel: str
    phase: Phase
    step: int


@dataclass(kw_only=True, slots=True)
class _RankState:
    progress: Progress
    motion: MotionTracker
    running: bool = False
    connected: bool = False
    """Whether the rank has sent its hello over the channel at least once."""
    failure: _Failure | None = None

    def update(self, progress: Progress) -> None:
        """Store a progress record. Another step, or a phase of training, revokes a failure: the program has
        caught it. A heartbeat does not, since it repeats the record, also from a rank that is stuck."""
        failed, place = self.failure, (progress.phase, progress.step)
        if failed is not None and progress.phase not in OF_AN_END and place != (failed.phase, failed.step):
            self.failure = None
        # `motion` is measured by the launcher, not reported by the rank.
        self.progress = replace(progress, motion=None)


class RankTable:
    """State of one worker. Every method may be called from any thread and none blocks."""

    def __init__(
        self,
        spec: LaunchSpec,
        *,
        built_in_trainer: bool,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`built_in_trainer`: the ranks are known to report, so a silent one is not ready yet."""
        self._spec = spec
        self._built_in_trainer = built_in_trainer
        self._clock = clock
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._stopping = False
        self._ranks = {
            rank: _RankState(
                progress=Progress(rank=rank, attempt=spec.attempt), motion=MotionTracker(monotonic())
            )
            for rank in spec.ranks
        }
        self._families = {
            rank: Families(LAUNCHER_METRICS, {"job_name": spec.job, "rank": str(rank)}) for rank in spec.ranks
        }
        for families in self._families.values():
            families.gauge("zerotrain_attempt_start_timestamp_seconds").set(clock())
            families.gauge("zerotrain_world_size").set(spec.world_size)
        self._container = Families(WORKER_METRICS, {"job_name": spec.job, "worker": str(spec.node_rank)})
        self._merged = MergedCollector(spec.job)

    @property
    def built_in_trainer(self) -> bool:
        """Whether the ranks run the built-in trainer, and not a program of the user's."""
        return self._built_in_trainer

    @property
    def ranks(self) -> Sequence[int]:
        return self._spec.ranks

    def set_running(self, rank: int, running: bool) -> None:
        with self._lock:
            self._ranks[rank].running = running
            if not running:
                self._ranks[rank].motion.ended(self._monotonic())

    def set_stopping(self) -> None:
        with self._lock:
            self._stopping = True

    def connected(self, rank: int, channel: str) -> None:
        """Record a rank's hello; a new channel clears a failure that was announced over another one."""
        with self._lock:
            state = self._ranks[rank]
            state.connected = True
            if state.failure is not None and state.failure.channel != channel:
                state.failure = None
        self._message_arrived(rank)

    def progressed(self, rank: int, progress: Progress) -> None:
        """Store a progress record. Raises ValueError when it is another rank's or another attempt's."""
        if (progress.rank, progress.attempt) != (rank, self._spec.attempt):
            raise ValueError(
                f"rank {rank} of attempt {self._spec.attempt} sent a record "
                f"of rank {progress.rank}, attempt {progress.attempt}"
            )
        with self._lock:
            state = self._ranks[rank]
            state.update(progress)
            state.motion.progress_arrived(progress, self._monotonic())
        self._message_arrived(rank)

    def library_progressed(self, body: bytes) -> None:
        """Store what a library posted about a program whose rank 0 never reported; the record stays one that
        nobody judges. Raises ValueError for a body that is no status."""
        with self._lock:
            state = self._ranks.get(0)
            if state is not None and not state.progress.heartbeat_at:
                state.progress = with_status(state.progress, body)

    def measured(self, rank: int, families: Sequence[Mapping[str, Any]]) -> None:
        """Store a new metrics snapshot of the rank. Raises ValueError when it is invalid."""
        self._merged.update(rank, restore(families))
        self._message_arrived(rank)

    def failing(self, rank: int, text: str, channel: str) -> None:
        """Store the rank's reason for its coming end; the first reason stays, unless the rank goes on."""
        with self._lock:
            state = self._ranks[rank]
            if state.failure is None:
                phase, step = state.progress.phase, state.progress.step
                state.failure = _Failure(
                    text=text, at=self._monotonic(), channel=channel, phase=phase, step=step
                )

    def failure_of(self, rank: int) -> tuple[str | None, float | None]:
        """Return the reason that the rank gave and when (monotonic seconds)."""
        with self._lock:
            failure = self._ranks[rank].failure
        return (None, None) if failure is None else (failure.text, failure.at)

    def report(self) -> WorkerReport:
        """Return the body of GET /progress."""
        spec = self._spec
        with self._lock:
            return WorkerReport(
                job=spec.job,
                job_uid=spec.job_uid,
                attempt=spec.attempt,
                node_rank=spec.node_rank,
                world_size=spec.world_size,
                ready=all(self._is_ready(state) for state in self._ranks.values()),
                stopping=self._stopping,
                ranks=tuple(self._record(self._ranks[rank]) for rank in spec.ranks),
            )

    def registry(self) -> CollectorRegistry:
        """Return a fresh registry with the newest metrics of all ranks, the launcher's own of each rank, and
        the container's."""
        with self._lock:
            seen = {rank: (state.running, state.progress) for rank, state in self._ranks.items()}
        own = MergedCollector(self._spec.job)
        for rank, families in self._families.items():
            is_running, progress = seen[rank]
            families.gauge("zerotrain_rank_up").set(is_running)
            for phase in Phase:
                is_now = progress.heartbeat_at > 0 and progress.phase is phase
                families.gauge("zerotrain_rank_phase", str(phase)).set(is_now)
            own.update(rank, list(families.collect()))
        memory = free_memory()
        self._container.gauge("zerotrain_host_memory_used_bytes").set(memory.used)
        self._container.gauge("zerotrain_host_memory_limit_bytes").set(memory.limit)
        collectors: tuple[Collector, ...] = (own, self._container, self._merged)
        registry = CollectorRegistry(auto_describe=False)
        for collector in collectors:
            registry.register(collector)
        return registry

    def _record(self, state: _RankState) -> Progress:
        if not state.progress.heartbeat_at and not self._built_in_trainer:
            return state.progress  # the motion of a program that never reported is not known
        return replace(state.progress, motion=state.motion.motion(self._monotonic()))

    def _message_arrived(self, rank: int) -> None:
        with self._lock:
            self._ranks[rank].motion.message_arrived(self._monotonic())
        self._families[rank].gauge("zerotrain_rank_last_report_timestamp_seconds").set(self._clock())

    def _is_ready(self, state: _RankState) -> bool:
        if not state.running:
            return False
        if not state.connected and not self._built_in_trainer:
            return True  # a user's program that never reports: only that it runs can be known
        return state.progress.phase not in BEFORE_RENDEZVOUS

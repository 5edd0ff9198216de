"""The workers of one attempt without any training: steps by the clock, the contract's HTTP on loopback."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from zerotrain.contract.channel_token import derive
from zerotrain.contract.exit_codes import ExitCode
from zerotrain.contract.progress import CheckpointProgress, Motion, Phase, Progress, Straggler
from zerotrain.contract.worker_environment import WORKER_HTTP_PORT, LaunchSpec
from zerotrain.contract.worker_http import (
    PROGRESS_PATH,
    STACKS_PATH,
    YIELD_PATH,
    WorkerReport,
    bearer,
    yield_attempt,
)


class Training:
    """The state that all workers of an attempt share."""

    def __init__(
        self,
        launch: LaunchSpec,
        *,
        first: int,
        total: int,
        step_s: float,
        every: int,
        may_end: threading.Event,
    ) -> None:
        self.job_uid, self.attempt = launch.job_uid, launch.attempt
        self.first, self.step = first, first
        """The step resumed from, and the newest one."""
        self.durable = first
        self.yields_asked = 0
        self.stacks_asked: list[int] = []
        """Workers that were asked for their stacks, with the right token."""
        self.stopped_rank: int | None = None
        """Rank that is stopped as by SIGSTOP: no rank gets past the step any more."""
        self.straggler: Straggler | None = None
        """Rank 0's record of the slowest rank."""
        self.exit_code: int | None = None
        """Exit code of every worker of the attempt from now on."""
        self._launch, self._total, self._step_s, self._every = launch, total, step_s, every
        self._may_end = may_end
        self._joined: set[int] = set()
        self._started_at: float | None = None
        self._saved_at = time.time()
        self._moved_at = time.monotonic()
        self._failed = False

    @property
    def joined(self) -> bool:
        return len(self._joined) == self._launch.num_workers

    @property
    def can_stop(self) -> bool:
        """Whether the ranks step, so that one may be stopped."""
        return self.joined and self.exit_code is None and not self._failed and self.stopped_rank is None

    def join(self, node_rank: int) -> None:
        self._joined.add(node_rank)
        if self.joined and self._started_at is None:
            self._started_at = time.monotonic()

    def advance(self) -> None:
        """Catch up with the clock. After a failure no rank gets past its next collective."""
        if self._started_at is None or self.exit_code is not None or self._failed:
            return
        if self.stopped_rank is not None:
            return
        gained = int((time.monotonic() - self._started_at) / self._step_s)
        reached = min(self.first + gained, self._total if self._may_end.is_set() else self._total - 1)
        if reached != self.step:
            self._moved_at = time.monotonic()
        self.step = reached
        self._save(self.step // self._every * self._every)
        if self.step == self._total:
            self._save(self.step)
            self.exit_code = ExitCode.DONE

    def request_stop(self) -> None:
        """Stop all ranks at the same step with a durable checkpoint."""
        self.advance()
        self.yields_asked += 1
        if self.stopped_rank is not None:
            return
        if self.exit_code is None and not self._failed and self.joined:
            self._save(self.step)
            self.exit_code = ExitCode.YIELDED

    def fail(self) -> None:
        self._failed = True

    def checkpoint(self) -> CheckpointProgress | None:
        if self.durable == 0:
            return None
        folder = self._launch.checkpoint_dir or "/checkpoints"
        return CheckpointProgress(step=self.durable, path=f"{folder}/{self.durable}", time=self._saved_at)

    def progress(self, rank: int) -> Progress:
        self.advance()  # ranks step whether or not their node polls them
        moved = 0.0 if self.step == self.first else time.time()
        return Progress(
            rank=rank,
            attempt=self.attempt,
            phase=Phase.STEP if self.joined else Phase.RENDEZVOUS,
            step=self.step,
            total_steps=self._total,
            loss=5.5 / (1 + self.step),
            step_seconds=self._step_s,
            step_at=moved,
            heartbeat_at=time.time(),
            checkpoint=self.checkpoint(),
            resumed_from=self.first or None,
            collective_wait_seconds=0.0 if rank == self.stopped_rank else 1.0,
            straggler=self.straggler if rank == 0 else None,
            motion=self._motion(rank),
        )

    def _motion(self, rank: int) -> Motion:
        idle_s = time.monotonic() - self._moved_at
        return Motion(
            idle_seconds=idle_s,
            silent_seconds=idle_s + 20 if rank == self.stopped_rank else 0.0,
            steps_seen=self.step - self.first,
            step_p99_seconds=self._step_s,
            longest_step_seconds=self._step_s,
            first_step_seconds=self._step_s,
        )

    def _save(self, step: int) -> None:
        if step > self.durable:
            self.durable, self._saved_at = step, time.time()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a caller that died before its answer came."""


class WorkerServer:
    """HTTP server of one worker."""

    def __init__(self, address: str, training: Training, launch: LaunchSpec, key: bytes) -> None:
        self.address = address
        token = derive(key, launch.job_uid, launch.attempt)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == STACKS_PATH:
                    self._stacks()
                    return
                if self.path != PROGRESS_PATH:
                    self._answer(404, "")
                    return
                report = WorkerReport(
                    job=launch.job,
                    job_uid=launch.job_uid,
                    attempt=launch.attempt,
                    node_rank=launch.node_rank,
                    world_size=launch.world_size,
                    ready=training.joined,
                    ranks=tuple(training.progress(rank) for rank in launch.ranks),
                )
                self._answer(200, report.to_json())

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                shown = all(self.headers.get(name) == value for name, value in bearer(token).items())
                if self.path != YIELD_PATH or not shown or yield_attempt(body) != launch.attempt:
                    self._answer(403, "{}")
                    return
                training.request_stop()
                self._answer(202, "{}")

            def _stacks(self) -> None:
                if not all(self.headers.get(name) == value for name, value in bearer(token).items()):
                    self._answer(403, "{}")
                    return
                training.stacks_asked.append(launch.node_rank)
                states = {
                    rank: "stopped by a signal" if rank == training.stopped_rank else "sleeping"
                    for rank in launch.ranks
                }
                self._answer(
                    200, "".join(f"=== rank {rank} (pid 9, {state})\n" for rank, state in states.items())
                )

            def _answer(self, code: int, text: str) -> None:
                self.send_response(code)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing."""

        self._server = _Server((address, WORKER_HTTP_PORT), Handler)
        self._server.daemon_threads = True
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

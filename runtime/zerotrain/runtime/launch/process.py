"""One rank's process: starting, signalling and ending it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zerotrain.contract.worker_environment import LaunchSpec, RankEnv
from zerotrain.runtime.launch.output import OutputPump, Sink

GUARD = Path(__file__).with_name("guard.py")


def guarded(program: Sequence[str], death_signal: signal.Signals = signal.SIGKILL) -> list[str]:
    """Return the command that runs `program` tied to the life of the calling process.

    Call it from the thread that starts the process: the kernel sends the signal when that thread ends.
    """
    return [sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), str(int(death_signal)), *program]


@dataclass(kw_only=True, slots=True)
class RankProcess:
    """A started rank. `status` is None while it runs."""

    rank: int
    popen: subprocess.Popen[bytes]
    pump: OutputPump
    stacks_path: Path
    status: int | None = None
    ended_at: float = field(default=0.0)
    """Monotonic seconds."""
    killed_by_launcher: bool = False

    @property
    def running(self) -> bool:
        return self.status is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the rank itself and not to its helpers: a data loader that dies spoils the last
        step."""
        if self.running:
            os.kill(self.popen.pid, number)

    def kill(self) -> None:
        """SIGKILL the rank and all processes that it started in its session."""
        if self.running:
            self.killed_by_launcher = True
            self.kill_group()

    def kill_group(self) -> None:
        """SIGKILL the process group, also after the rank's own end: its helpers may have outlived it."""
        try:
            os.killpg(self.popen.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return

    def reaped(self, status: int, at: float) -> None:
        """Record the status that the supervisor's waitpid got; Popen must not wait for the same process
        again."""
        self.status, self.ended_at = status, at
        self.popen.returncode = status
        self.kill_group()


def rank_environment(
    spec: LaunchSpec, rank: int, environ: Mapping[str, str], *, socket_path: Path, stacks_path: Path
) -> dict[str, str]:
    """Return the environment of `rank`; `environ` is the launcher's own, unfolded."""
    rank_env = RankEnv(
        rank=rank,
        local_rank=rank - spec.ranks.start,
        local_world_size=spec.ranks_per_worker,
        channel_socket=socket_path,
        stacks_path=stacks_path,
    )
    found = {**DEFAULTS, **allocator(environ), **compiler_caches(environ, spec.run_dir)}
    return {**found, **environ, **spec.to_env(), **rank_env.to_env()}


DEFAULTS = {
    # Unbuffered, so that the line before a SIGKILL is not lost in the process.
    "PYTHONUNBUFFERED": "1",
    # The engine's gathers and exchanges are two communicators in flight at the same time, whose kernels must
    # start in the same order on every GPU; NCCL 2.26 and later take the host's order.
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
}
"""Variables of a rank that the worker's own environment overrides."""


def allocator(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that makes torch's GPU allocator grow its segments.

    Storages of gathered weights are resized hundreds of times a step, in sizes that differ by unit, which
    fragments segments of a fixed size. Nothing is set if the environment has either of torch's names.
    """
    if environ.get("PYTORCH_ALLOC_CONF") or environ.get("PYTORCH_CUDA_ALLOC_CONF"):
        return {}
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def compiler_caches(environ: Mapping[str, str], run_dir: Path) -> dict[str, str]:
    """Return the variables that put the caches of torch.compile and Triton into the worker's own folder.

    Nothing is set where the home folder can be written, as in a pod whose home is its scratch volume: the
    libraries' own folders work there, and outlive a local run. A pod whose template or image names another
    home has a read-only one.
    """
    home = environ.get("HOME")
    if home and os.access(home, os.W_OK | os.X_OK):
        return {}
    folder = run_dir / "compiled"
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}


def start_rank(
    spec: LaunchSpec,
    rank: int,
    program: Sequence[str],
    *,
    environ: Mapping[str, str],
    socket_path: Path,
    sink: Sink,
) -> RankProcess:
    """Start `rank` with its static place in the job. Must run in the main thread (see `guarded`)."""
    stacks_path = spec.run_dir / f"stacks-{rank}.txt"
    stacks_path.unlink(missing_ok=True)  # an earlier launcher's; the rank makes it when it can dump
    popen = subprocess.Popen(
        guarded(program),
        env=rank_environment(spec, rank, environ, socket_path=socket_path, stacks_path=stacks_path),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        start_new_session=True,
    )
    if popen.stdout is None:
        raise RuntimeError(f"rank {rank} was started without a pipe for its output")
    pump = OutputPump(rank, popen.stdout, sink)
    pump.start()
    return RankProcess(rank=rank, popen=popen, pump=pump, stacks_path=stacks_path)

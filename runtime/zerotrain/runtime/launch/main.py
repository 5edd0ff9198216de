"""Assembly of the launcher; called by `__main__`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zerotrain.contract.exit_codes import ExitCode
from zerotrain.contract.history import HISTORY_DIR, history_lines, read_folder
from zerotrain.contract.launch_command import LaunchCommandError, arguments_of_rank, begins_with_launch
from zerotrain.contract.progress import Termination
from zerotrain.contract.worker_environment import LaunchError, LaunchSpec, unfolded
from zerotrain.runtime.launch import reaper, termination
from zerotrain.runtime.launch.channel_server import ChannelServer
from zerotrain.runtime.launch.http_server import WorkerApi, WorkerHttpServer
from zerotrain.runtime.launch.library_status import receiver_environment
from zerotrain.runtime.launch.log import say
from zerotrain.runtime.launch.rank_table import RankTable
from zerotrain.runtime.launch.refusal import refuse
from zerotrain.runtime.launch.rendezvous import RendezvousTimeout
from zerotrain.runtime.launch.supervisor import Limits, Supervisor

DEFAULT_PROGRAM = (sys.executable, "-m", "zerotrain.runtime.train")
COMPAT = "zerotrain.compat"
"""Package that runs a script whose `import deepspeed` gives the engine; it is above this one."""
SOCKET_NAME = "channel.sock"
HTTP_FILE = "http.json"
"""File in the run folder with this launcher's address, for a caller that let it take a free port."""
REPORT_FILE = "report.json"
"""File in the run folder with the last GET /progress, written at the end."""
MAX_SOCKET_PATH = 107
"""Longest path of a Unix socket in bytes: sun_path holds 108, the last of which is NUL."""
STACKS_TIMEOUT_S = 5.0


def main(
    argv: Sequence[str], environ: Mapping[str, str] = os.environ, *, limits: Limits | None = None
) -> int:
    """Run the worker that `environ` describes and return the container's exit code.

    `argv` is the job's command, after an optional `--`; empty for the built-in trainer.
    """
    command = list(argv[1:] if argv[:1] == ["--"] else argv)
    try:
        environ = unfolded(environ)  # the ranks see the variables one by one
        spec = LaunchSpec.from_env(environ)
    except LaunchError as error:
        return refuse(error)
    try:
        token = None if spec.token_path is None else _read_token(spec.token_path)
        program = _program(command)
        socket_path = _prepare_run_dir(spec.run_dir)
    except (LaunchError, LaunchCommandError, OSError) as error:
        return refuse(error, spec)
    reaper.adopt_orphans()
    worker = _Worker(
        spec=spec,
        rank_table=RankTable(spec, built_in_trainer=not command),
        program=program,
        environ=environ,
        token=token,
        socket_path=socket_path,
        limits=limits or Limits.of(spec),
        runs_script=begins_with_launch(command),
    )
    try:
        message = asyncio.run(worker.run())
    except OSError as error:  # the HTTP port is taken, the scratch volume is full
        return refuse(error, spec)
    finally:
        reaper.end_children()
        _remove(socket_path, spec.run_dir)
    return message.code


@dataclass(frozen=True, kw_only=True, slots=True)
class _Worker:
    """Inputs and limits of one launcher."""

    spec: LaunchSpec
    rank_table: RankTable
    program: Sequence[str]
    environ: Mapping[str, str]
    token: str | None
    socket_path: Path
    limits: Limits
    runs_script: bool
    """Whether the ranks run a script of `zerotrain launch`."""

    async def run(self) -> Termination:
        """Open the channel and the HTTP server, run the ranks, close everything."""
        supervisor = Supervisor(self.spec, self.rank_table, limits=self.limits)
        supervisor.install_signals()
        channel = ChannelServer(self.rank_table, on_failure=supervisor.rank_announced_failure)
        await channel.listen(self.socket_path)
        http = WorkerHttpServer(self.spec.http_host, self.spec.http_port, self._api(supervisor))
        environ = self.environ
        if self.runs_script:
            token, variables = receiver_environment(self.spec.run_dir, port=http.port)
            http.api, environ = replace(http.api, status_token=token), {**environ, **variables}
        http.start()
        _write_http_file(self.spec, http)
        try:
            message = await self._supervise(supervisor, channel, environ)
            # At once: processes that are still to be ended may be in the kernel, and SIGKILL near.
            termination.write(self.spec.termination_log, message)
            return message
        finally:
            supervisor.kill()
            channel.close()
            await asyncio.to_thread(http.shutdown)
            http.server_close()

    async def _supervise(
        self, supervisor: Supervisor, channel: ChannelServer, environ: Mapping[str, str]
    ) -> Termination:
        try:
            await supervisor.run(self.program, environ=environ, socket_path=self.socket_path)
        except RendezvousTimeout as error:
            say(str(error))
            code = int(ExitCode.RENDEZVOUS_TIMEOUT)
            return Termination(attempt=self.spec.attempt, code=code, exception=str(error))
        except OSError as error:  # no resources for another process; another attempt may succeed
            say(f"cannot start the ranks: {error}")
            return Termination(
                attempt=self.spec.attempt, code=1, exception=f"cannot start the ranks: {error}"
            )
        await channel.drain(supervisor.shutdown_budget.limit(self.limits.output_s))
        code, failed = supervisor.container_exit()
        try:
            _replace(self.spec.run_dir / REPORT_FILE, self.rank_table.report().to_json())
        except OSError as error:  # the scratch volume is full or gone; the exit code stays the same
            say(f"cannot write {self.spec.run_dir / REPORT_FILE}: {error.strerror}")
        last_line = supervisor.last_line(failed[0].rank) if failed else None
        return termination.compose(code, failed, self.rank_table, last_line=last_line)

    def _api(self, supervisor: Supervisor) -> WorkerApi:
        loop = asyncio.get_running_loop()

        def request_stop() -> None:
            loop.call_soon_threadsafe(supervisor.request_stop)

        def collect_stacks() -> str:
            return asyncio.run_coroutine_threadsafe(supervisor.stacks(), loop).result(STACKS_TIMEOUT_S)

        return WorkerApi(
            rank_table=self.rank_table,
            attempt=self.spec.attempt,
            token=self.token,
            request_stop=request_stop,
            collect_stacks=collect_stacks,
            read_history=lambda: _history(self.spec),
        )


def _program(command: Sequence[str]) -> Sequence[str]:
    """Return the program of each rank. Of `zerotrain launch` it is the script alone: this launcher is the one
    that supervises the ranks. Raises LaunchCommandError."""
    if begins_with_launch(command):
        return (sys.executable, "-m", COMPAT, *arguments_of_rank(command))
    return command or DEFAULT_PROGRAM


def _history(spec: LaunchSpec) -> bytes:
    """Return the history, which rank 0 of worker 0 writes, with that of the job's earlier attempts in its
    folder."""
    if spec.node_rank != 0:
        return b""
    folder = (spec.checkpoint_dir or spec.run_dir) / HISTORY_DIR
    return "".join(history_lines(read_folder(folder, job_uid=spec.job_uid))).encode()


def _read_token(path: Path) -> str:
    token = path.read_text().strip()
    if not token:
        raise LaunchError(f"the token file {path} is empty; it must hold the attempt's channel token")
    return token


def _prepare_run_dir(run_dir: Path) -> Path:
    """Make the scratch folder and return the path of the channel's socket."""
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = run_dir / SOCKET_NAME
    path.unlink(missing_ok=True)  # left by a launcher that was killed
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
        return path
    return Path(tempfile.mkdtemp(prefix="zerotrain-")) / SOCKET_NAME


def _remove(socket_path: Path, run_dir: Path) -> None:
    try:
        socket_path.unlink(missing_ok=True)
        if socket_path.parent != run_dir:
            socket_path.parent.rmdir()
        (run_dir / HTTP_FILE).unlink(missing_ok=True)
    except OSError as error:  # a failing disk does not change how the worker ended
        say(f"cannot clean up {run_dir}: {error}")


def _write_http_file(spec: LaunchSpec, http: WorkerHttpServer) -> None:
    address = {"host": http.host, "port": http.port, "pid": os.getpid()}
    _replace(spec.run_dir / HTTP_FILE, json.dumps(address))


def _replace(path: Path, text: str) -> None:
    """Write by rename: a caller that polls for the file never reads half of it."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)

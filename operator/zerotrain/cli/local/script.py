"""A script as local ranks, without a job: one attempt under the launcher of `zerotrain run`, no restart."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from zerotrain.cli.errors import CliError
from zerotrain.cli.local.attempt import Attempt, AttemptEnd, free_port
from zerotrain.cli.local.stop import stop_on_signals
from zerotrain.cli.local.view import print_failure
from zerotrain.client.localrun import DEFAULT_GRACE_S, LOCAL_UID
from zerotrain.contract.exit_codes import ExitCode
from zerotrain.contract.train_spec import CONFIG_FILE
from zerotrain.contract.worker_environment import LaunchSpec

NAME = "zerotrain launch"
COUNT_GPUS = "import torch; print(torch.cuda.device_count())"


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """The machines that start the script, each with the same command, and the place of this one."""

    ranks: int
    """Ranks on each machine."""
    count: int = 1
    index: int = 0
    master: tuple[str, int] | None = None
    """Host and port of the first machine, where the ranks meet; None = here, at a free port."""

    def launch_spec(self, folder: Path) -> LaunchSpec:
        """Return the environment of this machine's launcher, whose files are in `folder`."""
        host, port = self.master or ("127.0.0.1", free_port())
        return LaunchSpec(
            job="script",
            job_uid=LOCAL_UID,
            attempt=1,
            master_addr=host,
            master_port=port,
            world_size=self.count * self.ranks,
            node_rank=self.index,
            ranks_per_worker=self.ranks,
            config_path=folder / CONFIG_FILE,  # of the built-in trainer; a script has its own
            http_host="127.0.0.1",
            http_port=0,
            grace_seconds=DEFAULT_GRACE_S,
            termination_log=folder / "termination.json",
            run_dir=folder,
        )


def run_script(arguments: Sequence[str], machines: Machines) -> int:
    """Run `zerotrain launch` with these arguments in each rank, and return the exit code.

    The ranks' output goes to that of this command.
    """
    with TemporaryDirectory(prefix="zerotrain-") as folder:
        end = _one_attempt(["zerotrain", "launch", *arguments], machines.launch_spec(Path(folder)))
    if end.code != ExitCode.DONE:
        print_failure(Console(stderr=True), NAME, end)
    return end.code


def _one_attempt(command: Sequence[str], spec: LaunchSpec) -> AttemptEnd:
    with stop_on_signals() as stop:
        attempt = Attempt(spec, command, environ={}, on_line=None)
        with stop.ending(attempt):
            while not attempt.ended():
                pass
        return attempt.finish()


def visible_gpus() -> int:
    """Return the number of GPUs that the ranks' torch sees. Raises CliError where torch does not start."""
    # In a process of its own: torch takes seconds and hundreds of megabytes, which this command then keeps.
    counted = subprocess.run(
        [sys.executable, "-c", COUNT_GPUS], capture_output=True, text=True, errors="replace", check=False
    )
    if counted.returncode != 0:
        reason = (counted.stderr.strip().splitlines() or ["no output"])[-1]
        raise CliError(
            f"torch does not start here: {reason}", next_step="correct the environment, or give --ranks"
        )
    return int(counted.stdout)

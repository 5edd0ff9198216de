"""`zerotrain launch` at the beginning of a job's command: which options it may have there.

The operator refuses the others before it starts a job, the launcher before it starts a rank. A launcher below
a launcher would lose the exit codes, signals and stacks of the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Final

PROGRAM: Final = "zerotrain"
COMMAND: Final = "launch"

REPLACE: Final = "--replace-deepspeed"
LOCAL_RANK: Final = "--pass-local-rank"
MODULE: Final = "-m"
OF_A_RANK: Final = frozenset({REPLACE, LOCAL_RANK})
"""Options that are passed to `python -m zerotrain.compat`, which each rank runs."""

OF_THE_JOB: Final[Mapping[str, str]] = {
    "--ranks": "spec.ranksPerWorker or resources.gpus.count",
    "--nodes": "spec.workers",
    "--node-rank": "the operator",
    "--master": "the operator",
}
"""Options of `zerotrain launch` with a value, and what sets the value in a job."""

_OF_DEEPSPEED: Final[Mapping[str, str]] = {
    "--num_gpus": "--ranks N",
    "--num_nodes": "--nodes N, on every node with its own --node-rank I and --master HOST:PORT",
    "--node_rank": "--node-rank I",
    "--master_addr": "--master HOST:PORT",
    "--master_port": "--master HOST:PORT",
    "--hostfile": "--nodes N --node-rank I --master HOST:PORT on every host (nothing is started by ssh)",
    "-H": "--nodes N --node-rank I --master HOST:PORT on every host (nothing is started by ssh)",
    "--include": "--ranks N, with CUDA_VISIBLE_DEVICES to choose GPUs",
    "-i": "--ranks N, with CUDA_VISIBLE_DEVICES to choose GPUs",
    "--exclude": "--ranks N, with CUDA_VISIBLE_DEVICES to choose GPUs",
    "-e": "--ranks N, with CUDA_VISIBLE_DEVICES to choose GPUs",
    "--module": "-m MODULE",
    "--no_local_rank": "nothing: --local_rank is passed only with --pass-local-rank",
}
"""Options of DeepSpeed's launcher, and what takes their place."""


class LaunchCommandError(ValueError):
    """A job's command begins with `zerotrain launch` and cannot be run as it is (exit code BAD_CONFIG)."""


def begins_with_launch(command: Sequence[str]) -> bool:
    """Return whether a job's command is `zerotrain launch ...`."""
    return len(command) > 1 and PurePosixPath(command[0]).name == PROGRAM and command[1] == COMMAND


def arguments_of_rank(command: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments of `python -m zerotrain.compat` in each rank of a job with this command.

    Raises LaunchCommandError for an option that a job does not take, or without a script.
    """
    given = tuple(command[2:])
    for index, argument in enumerate(given):
        if argument in OF_A_RANK:
            continue
        if argument.startswith("-") and argument != MODULE:
            raise LaunchCommandError(_refusal(argument.partition("=")[0]))
        if argument == MODULE and index + 1 == len(given):
            break
        return given
    raise LaunchCommandError("zerotrain launch is given no script; name it after the options")


def instead_of_deepspeeds(option: str) -> str | None:
    """Return what an option of DeepSpeed's launcher is called here; None for other options. A value after `=`
    is ignored."""
    name = option.partition("=")[0]
    if name not in _OF_DEEPSPEED:
        return None
    return f"{name} is an option of DeepSpeed's launcher; here it is {_OF_DEEPSPEED[name]}"


def _refusal(option: str) -> str:
    if option in OF_THE_JOB:
        return (
            f"{option} of zerotrain launch is for a run without a job; remove it: in a job, "
            f"{OF_THE_JOB[option]} says it"
        )
    if option in _OF_DEEPSPEED:
        return (
            f"{option} is an option of DeepSpeed's launcher; remove it: in a job, spec.workers and "
            "spec.ranksPerWorker say how many ranks there are"
        )
    taken = ", ".join([*sorted(OF_A_RANK), MODULE])
    return (
        f"{option} is not an option of zerotrain launch in a job ({taken}); the script's own follow its name"
    )

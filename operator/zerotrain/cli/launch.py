"""`zerotrain launch`: run a training script, unchanged, as local ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from zerotrain.cli.errors import CliError
from zerotrain.cli.options import usage_error
from zerotrain.contract.exit_codes import ExitCode
from zerotrain.contract.launch_command import (
    LOCAL_RANK,
    MODULE,
    OF_THE_JOB,
    REPLACE,
    instead_of_deepspeeds,
)
from zerotrain.contract.worker_environment import MASTER_PORT, RankEnv

EXAMPLE = "Example: zerotrain launch --ranks 2 train.py --deepspeed ds_config.json"
SETTINGS = {"allow_interspersed_args": False}
"""Settings of the command: options after SCRIPT are the script's."""


class LaunchCommand(TyperCommand):
    """Command that explains the options of DeepSpeed's launcher."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Raises CliError for an option of DeepSpeed's launcher before SCRIPT."""
        for option in _options_before_script(args):
            if (text := instead_of_deepspeeds(option)) is not None:
                raise usage_error(text, "see zerotrain launch --help")
        return super().parse_args(ctx, args)


def _options_before_script(arguments: Sequence[str]) -> list[str]:
    found: list[str] = []
    waiting = iter(arguments)
    for argument in waiting:
        if not argument.startswith("-"):
            break
        found.append(argument)
        if argument in OF_THE_JOB:
            next(waiting, None)  # its value
    return found


def launch(
    program: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT [ARG]...", help="A Python script (with -m, a module) and its arguments."
        ),
    ],
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Ranks on this machine; one for each GPU that torch sees unless given, 1 without GPUs.",
        ),
    ] = None,
    nodes: Annotated[
        int, typer.Option(min=1, help="Machines, on each of which you start the same command.")
    ] = 1,
    node_rank: Annotated[
        int | None, typer.Option(min=0, help="Index of this machine, from 0. Needed with --nodes.")
    ] = None,
    master: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:PORT]",
            help=f"Machine 0, where the ranks meet; port {MASTER_PORT} unless given. Needed with --nodes.",
        ),
    ] = None,
    module: Annotated[bool, typer.Option(MODULE, help="SCRIPT is the name of a module.")] = False,
    replace_deepspeed: Annotated[
        bool, typer.Option(REPLACE, help="Give the engine also where a real DeepSpeed is installed.")
    ] = False,
    pass_local_rank: Annotated[
        bool,
        typer.Option(LOCAL_RANK, help="Add --local_rank=N to the script's arguments, as DeepSpeed's does."),
    ] = False,
) -> None:
    """Run a training script unchanged, with this engine as `import deepspeed`: in place of `deepspeed
    --num_gpus=N script.py`.

    Options stand before SCRIPT. Ctrl-C sends SIGTERM to the ranks, a second one ends them. The exit code is
    that of the rank that failed first (zerotrain explain exit-codes). A job's spec.command may begin with it,
    too; the job then says the number of ranks.
    """
    # Imported late: the other commands need neither pydantic's models nor the runtime.
    from zerotrain.cli.local.script import Machines, run_script, visible_gpus

    _check_place()
    meeting = _meeting(nodes, node_rank, master)
    _check_program(program[0], module=module, replace=replace_deepspeed)
    machines = Machines(ranks=ranks or visible_gpus() or 1, count=nodes, index=node_rank or 0, master=meeting)
    options = {REPLACE: replace_deepspeed, LOCAL_RANK: pass_local_rank, MODULE: module}
    given = [option for option, is_given in options.items() if is_given]
    raise typer.Exit(run_script([*given, *program], machines))


def _check_place() -> None:
    if RankEnv.from_env(os.environ).channel_socket is not None:
        raise CliError(
            "a launcher started this process as a rank, and a launcher below it would lose the exit codes, "
            "signals and stacks of the ranks",
            next_step="let the job's spec.command begin with zerotrain launch, without a shell or another "
            "program before it",
        )


def _meeting(nodes: int, node_rank: int | None, master: str | None) -> tuple[str, int] | None:
    """Return host and port where the ranks meet; None on one machine. Raises CliError where options
    contradict each other."""
    if nodes == 1 and (master is not None or node_rank):
        raise usage_error("--node-rank and --master are for several machines", "give --nodes, too")
    if nodes > 1 and (master is None or node_rank is None):
        raise usage_error("--nodes needs --node-rank and --master", "give both, --node-rank 0 on machine 0")
    if (node_rank or 0) >= nodes:
        raise usage_error(f"--node-rank {node_rank} is not below --nodes {nodes}", "count from 0")
    if master is None:
        return None
    host, _, port = master.rpartition(":") if ":" in master else (master, "", str(MASTER_PORT))
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise usage_error(f"--master {master} is not HOST or HOST:PORT", "for example --master node-0:29400")
    return host.strip("[]"), int(port)


def _check_program(script: str, *, module: bool, replace: bool) -> None:
    """Raise CliError for what every rank would refuse."""
    from zerotrain.compat.refusal import CompatError, check_none_is_hidden

    if not module and not Path(script).is_file():
        raise CliError(
            f"{script} is not a file", code=int(ExitCode.BAD_CONFIG), next_step="give the path of a script"
        )
    try:
        check_none_is_hidden(replace=replace)
    except CompatError as error:
        raise CliError(str(error), next_step=f"remove it, or give {REPLACE}") from error

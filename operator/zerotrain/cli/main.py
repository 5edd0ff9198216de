"""The entry point, which registers the commands and turns their errors into messages and exit codes."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from zerotrain.cli import (
    checkpoint,
    config,
    describe,
    env,
    export,
    get,
    launch,
    lifecycle,
    logs,
    plan,
    run,
    submit,
    top,
)
from zerotrain.cli.doctor import command as doctor
from zerotrain.cli.errors import CliError, show
from zerotrain.cli.explain import commands as explain
from zerotrain.cli.init import command as init
from zerotrain.cli.report import command as report

PANEL = "Jobs in a cluster"


def register_job_commands(app: typer.Typer) -> None:
    """Add the commands about jobs in a cluster, in the order of a job's life."""
    for name, example, command in (
        ("submit", submit.EXAMPLE, submit.submit),
        ("get", get.EXAMPLE, get.get),
        ("describe", describe.EXAMPLE, describe.describe),
        ("logs", logs.EXAMPLE, logs.logs),
        ("top", top.EXAMPLE, top.top),
        ("wait", lifecycle.WAIT_EXAMPLE, lifecycle.wait),
        ("suspend", lifecycle.SUSPEND_EXAMPLE, lifecycle.suspend),
        ("resume", lifecycle.RESUME_EXAMPLE, lifecycle.resume),
        ("scale", lifecycle.SCALE_EXAMPLE, lifecycle.scale),
        ("delete", lifecycle.DELETE_EXAMPLE, lifecycle.delete),
    ):
        app.command(name, epilog=example, rich_help_panel=PANEL)(command)


app = typer.Typer(
    name="zerotrain",
    help="Train models that do not fit one GPU, on this machine or on Kubernetes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Inspect a DeepSpeed-style configuration.", no_args_is_help=True)
checkpoint_app = typer.Typer(
    help="Inspect, convert and export the checkpoints of a run.", no_args_is_help=True
)

app.add_typer(init.commands)
app.command("run", epilog=run.EXAMPLE)(run.run)
app.command("launch", epilog=launch.EXAMPLE, cls=launch.LaunchCommand, context_settings=launch.SETTINGS)(
    launch.launch
)
app.add_typer(plan.commands)
app.command("export", hidden=True, epilog=export.EXAMPLE)(export.export)  # its former name
app.command("zero-to-fp32", epilog=export.FP32_EXAMPLE)(export.zero_to_fp32)
app.command("doctor", epilog=doctor.EXAMPLE)(doctor.doctor)
app.command("env", epilog=env.EXAMPLE)(env.env)
app.command("report", epilog=report.EXAMPLE)(report.report)
register_job_commands(app)
app.command("version", epilog=env.VERSION_EXAMPLE)(env.version)
config_app.command("show", epilog=config.SHOW_EXAMPLE)(config.show_config)
config_app.command("check", epilog=config.CHECK_EXAMPLE)(config.check_config)
checkpoint_app.command("ls", epilog=checkpoint.LS_EXAMPLE)(checkpoint.ls)
checkpoint_app.command("verify", epilog=checkpoint.VERIFY_EXAMPLE)(checkpoint.verify_checkpoint)
checkpoint_app.command("export", epilog=export.EXAMPLE)(export.export)
checkpoint_app.command("diff", epilog=checkpoint.DIFF_EXAMPLE)(checkpoint.diff)
checkpoint_app.command("import", epilog=checkpoint.IMPORT_EXAMPLE)(checkpoint.import_checkpoint)
app.add_typer(config_app, name="config")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(explain.app, name="explain")


def main() -> None:
    """Run `zerotrain` or `kubectl zerotrain`. The exit code of `run` is that of the job."""
    try:
        app(prog_name=program_name(sys.argv[0]))
    except CliError as error:
        show(error)
        sys.exit(error.code)
    except RecursionError:
        deep = CliError(
            "the input nests its values too deeply", next_step="check which file or object was named"
        )
        show(deep)
        sys.exit(deep.code)


def program_name(path: str) -> str:
    """Return the name that the command was called by: kubectl runs its plugins by their file's name."""
    return "kubectl zerotrain" if Path(path).name.startswith("kubectl-zerotrain") else "zerotrain"

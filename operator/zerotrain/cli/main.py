"""The entry point: registers the commands and turns their errors into messages and exit codes."""

from __future__ import annotations

import sys

import typer

from zerotrain.cli import checkpoint, config_show, explain, export, plan, run, version
from zerotrain.cli.errors import CliError, show

app = typer.Typer(
    name="zerotrain",
    help="Train models that do not fit one GPU, here or on Kubernetes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Look at a DeepSpeed-style configuration.", no_args_is_help=True)
checkpoint_app = typer.Typer(help="Look at the checkpoints of a run.", no_args_is_help=True)
explain_app = typer.Typer(help="Explain what the product says.", no_args_is_help=True)

app.command("run", epilog=run.EXAMPLE)(run.run)
app.command("plan", epilog=plan.EXAMPLE)(plan.plan)
app.command("export", epilog=export.EXAMPLE)(export.export)
app.command("zero-to-fp32", epilog=export.FP32_EXAMPLE)(export.zero_to_fp32)
app.command("version", epilog=version.EXAMPLE)(version.version)
config_app.command("show", epilog=config_show.EXAMPLE)(config_show.show_config)
checkpoint_app.command("ls", epilog=checkpoint.LS_EXAMPLE)(checkpoint.ls)
checkpoint_app.command("verify", epilog=checkpoint.VERIFY_EXAMPLE)(checkpoint.verify_checkpoint)
checkpoint_app.command("diff", epilog=checkpoint.DIFF_EXAMPLE)(checkpoint.diff)
checkpoint_app.command("import", epilog=checkpoint.IMPORT_EXAMPLE)(checkpoint.import_checkpoint)
explain_app.command("exit-codes", epilog=explain.EXAMPLE)(explain.exit_codes)
explain_app.command("memory", epilog=explain.MEMORY_EXAMPLE)(explain.memory)
app.add_typer(config_app, name="config")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(explain_app, name="explain")


def main() -> None:
    """`zerotrain`; the exit code of `run` is the job's."""
    try:
        app()
    except CliError as error:
        show(error)
        sys.exit(error.code)

"""The command group `zerotrain explain`, which also accepts a bare word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from typer.core import TyperGroup

from zerotrain.cli.explain import lookup, tables
from zerotrain.cli.explain.lookup import Topic
from zerotrain.cli.explain.reasons import CONDITIONS, REASONS
from zerotrain.cli.options import Output, OutputOption
from zerotrain.cli.output import show_record, show_table

WORD = "word"


class BareWords(TyperGroup):
    """Command group in which `explain X` means `explain word X` unless X is a command."""

    def resolve_command(self, ctx, args):  # type: ignore[no-untyped-def]
        """Insert `word` before a bare word. click calls this with the arguments after `explain`."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            args = [WORD, *args]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=BareWords,
    help="Explain a name that zerotrain prints: zerotrain explain WORD, where WORD is an alert, an exit "
    "code, the type or the reason of a condition, a metric or a key of the configuration.",
    epilog="Example: zerotrain explain ZeroTrainJobStalled",
    no_args_is_help=True,
)


@app.command(WORD, hidden=True, epilog="Example: zerotrain explain DoesNotFit")
def word(
    name: Annotated[str, typer.Argument(metavar="WORD", help="The name to explain.")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Explain a name of any kind."""
    show(lookup.explain_word(name), output)


@app.command("alert", epilog="Example: zerotrain explain alert ZeroTrainJobStalled")
def alert(
    name: Annotated[str | None, typer.Argument(help="The alert; all of them unless given.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print an alert with its runbook: meaning, impact, diagnosis, mitigation; or list all alerts."""
    from zerotrain.cli.explain.alerts import alerts

    if name is not None:
        show(lookup.topics(name, [lookup.alert], "an alert", alerts()), output)
        return
    if output is not Output.TABLE:
        rows = [
            {"name": item.name, "severity": item.severity, "summary": item.summary}
            for item in alerts().values()
        ]
        show_record(rows, output)
        return
    show_table(
        ("alert", "severity", "summary"),
        ((item.name, item.severity, item.summary) for item in alerts().values()),
    )


@app.command("exit-code", epilog="Example: zerotrain explain exit-code 84")
def exit_code(
    code: Annotated[str, typer.Argument(help="Number or name.")], output: OutputOption = Output.TABLE
) -> None:
    """Print the meaning of an exit code of a worker or of a command, the budget of a retry, and the
    remedy."""
    finders = (lookup.exit_code, lookup.command_exit)
    show(lookup.topics(code, finders, "an exit code", lookup.exit_code_names()), output)


@app.command("condition", epilog="Example: zerotrain explain condition DoesNotFit")
def condition(
    name: Annotated[str, typer.Argument(help="Type or reason of a condition, an event or a failure.")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Print what the type or the reason of a job's condition means and what to do."""
    names = (*CONDITIONS, *REASONS)
    finders = (lookup.condition, lookup.reason)
    show(lookup.topics(name, finders, "a condition or a reason", names), output)


@app.command("metric", epilog="Example: zerotrain explain metric zerotrain_grad_norm")
def metric(
    name: Annotated[str, typer.Argument(help="With or without zerotrain_; also of a recording rule.")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Print what a metric means, who exports it, its labels and a query."""
    finders = (lookup.metric, lookup.recorded_metric)
    show(lookup.topics(name, finders, "a metric", lookup.metric_names()), output)


@app.command("key", epilog="Example: zerotrain explain key zero_optimization.stage")
def key(
    path: Annotated[str, typer.Argument(help="Dotted path in the DeepSpeed-style configuration.")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Print what a key of the configuration does here, its default and its values."""
    show(lookup.topics(path, [lookup.key], "a key", lookup.key_names()), output)


app.command("exit-codes", epilog=tables.EXAMPLE)(tables.exit_codes)
app.command("memory", epilog=tables.MEMORY_EXAMPLE)(tables.memory)


def show(topics: Sequence[Topic], output: Output) -> None:
    """Print topics as text, or as records for another program."""
    if output is not Output.TABLE:
        records = [{"kind": item.kind, "name": item.name, **dict(item.facts)} for item in topics]
        show_record(records, output)
        return
    console = Console(highlight=False)
    for at, topic in enumerate(topics):
        if at:
            console.print()
        console.print(f"{topic.kind} {topic.name}", style="bold", markup=False)
        for title, text in topic.facts:
            if not text:
                continue
            console.print(f"{title}:", style="bold", end=" " if "\n" not in text else "\n")
            console.print(text, markup=False, soft_wrap=True)

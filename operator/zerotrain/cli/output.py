"""Output of data from a cluster, as tables like kubectl's, JSON or YAML, without control characters."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from zerotrain.cli.options import Format, Output
from zerotrain.contract.strict_json import own_json
from zerotrain.contract.text import printable
from zerotrain.operator.constants import GROUP, SINGULAR

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Column
    from rich.text import Text

GAP = "   "


def print_message(text: str) -> None:
    """Print a line for the user on standard error, so that a pipe receives only results."""
    typer.echo(printable(text), err=True)


def show(text: str) -> None:
    """Print a line of results, which may quote a cluster or a training program."""
    typer.echo(printable(text))


def show_table(
    columns: Sequence[str | Column], rows: Iterable[Sequence[str | Text]], console: Console | None = None
) -> None:
    """Print a table whose columns fold on a narrow terminal. Texts are not read as markup."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in columns:
        if isinstance(column, str):
            table.add_column(column, overflow="fold")
        else:
            table.columns.append(column)
    for row in rows:
        table.add_row(*(printable(text) if isinstance(text, str) else text for text in row))
    (console or Console()).print(table, markup=False)


def show_record(value: Any, form: Output) -> None:
    """Print a value for other programs.

    Both formats escape non-ASCII characters, so none can control a terminal.
    """
    if form is Output.YAML:
        typer.echo(as_yaml(own_json(json.dumps(value, default=str))), nl=False)
    else:
        typer.echo(json.dumps(value, indent=1, default=str))


def column_widths(
    header: Sequence[str], rows: Iterable[Sequence[str]], least: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the widths of a table's columns in characters, each at least that in `least`."""
    columns = zip(header, *map(_clean, rows), strict=True)
    widest = [max(map(len, column)) for column in columns]
    return tuple(map(max, widest, least or widest))


def table_lines(
    header: Sequence[str], rows: Iterable[Sequence[str]], widths: Sequence[int] = ()
) -> list[str]:
    """Return a table's lines, with columns as wide as their widest text or as `widths`.

    No text is folded or cut.
    """
    rows = list(rows)
    widths = widths or column_widths(header, rows)
    lines = [tuple(header), *map(_clean, rows)]
    return [
        GAP.join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def _clean(row: Sequence[str]) -> tuple[str, ...]:
    return tuple(printable(" ".join(text.split())) for text in row)


def print_objects(objects: Sequence[Mapping[str, Any]], form: Format, *, is_list: bool) -> None:
    """Print objects as JSON, YAML or names, without the API server's managedFields, as kubectl does."""
    cleaned = [_without_managed_fields(item) for item in objects]
    value: Any = {"apiVersion": "v1", "kind": "List", "items": cleaned} if is_list else cleaned[0]
    match form:
        case Format.JSON:
            typer.echo(json.dumps(value, indent=2))
        case Format.YAML:
            typer.echo(as_yaml(value), nl=False)
        case _:
            for item in objects:
                show(object_name(item))


def object_name(item: Mapping[str, Any]) -> str:
    """Return the name as kubectl accepts it: `zerotrainingjob.zerotrain.dev/gpt`."""
    return f"{SINGULAR}.{GROUP}/{item['metadata']['name']}"


def as_yaml(value: Any) -> str:
    from ruamel.yaml import YAML

    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.allow_unicode = False
    stream = io.StringIO()
    yaml.dump(value, stream)
    return stream.getvalue()


def on_terminal() -> bool:
    """Return whether results go to a terminal."""
    return sys.stdout.isatty()


def _without_managed_fields(item: Mapping[str, Any]) -> dict[str, Any]:
    meta = item.get("metadata")
    if not isinstance(meta, Mapping):
        return dict(item)
    return {**item, "metadata": {key: value for key, value in meta.items() if key != "managedFields"}}

"""The table of the chart's values, from the `# --` comments of values.yaml."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML

_DESCRIPTION = re.compile(r"^\s*# -- (?P<text>.*)$")
_KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z]+):")
_INDENT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """One documented value."""

    path: tuple[str, ...]
    description: str
    default: Any


def documented(text: str) -> list[Value]:
    """Return the values that have a `# --` comment above them, in their order."""
    defaults = YAML(typ="safe", pure=True).load(text)
    found: list[Value] = []
    path: list[str] = []
    description = ""
    for line in text.splitlines():
        if comment := _DESCRIPTION.match(line):
            description = comment["text"].strip()
        elif key := _KEY.match(line):
            path = [*path[: len(key["indent"]) // _INDENT], key["key"]]
            if description:
                found.append(Value(path=tuple(path), description=description, default=_at(defaults, path)))
            description = ""
    return found


def table(text: str) -> str:
    """Return a Markdown table with one row per value."""
    rows = [_row(value) for value in documented(text)]
    return "\n".join(["| Value | Default | What it does |", "|---|---|---|", *rows]) + "\n"


def _row(value: Value) -> str:
    description = value.description.replace("|", "\\|")
    return f"| `{'.'.join(value.path)}` | `{_shown(value.default)}` | {description} |"


def _at(document: Any, path: list[str]) -> Any:
    for key in path:
        document = document[key]
    return document


def _shown(default: Any) -> str:
    # A list of objects is too long for a table cell.
    if isinstance(default, list) and default and isinstance(default[0], dict):
        return "see values.yaml"
    return json.dumps(default)

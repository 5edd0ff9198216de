"""The alerts and their runbooks, read from the same files that Prometheus and users read.

Both folders are beside this package: in a checkout as links to where they are maintained, in a wheel as
copies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CLI = Path(__file__).resolve().parents[1]
RULES = _CLI / "rules"
RUNBOOKS = _CLI / "runbooks"

PREFIX = "ZeroTrain"
SECTIONS = ("Meaning", "Impact", "Diagnosis", "Mitigation")


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """One alert as Prometheus loads it."""

    name: str
    severity: str
    summary: str
    description: str
    expression: str
    duration: str
    """Duration for which the expression must hold; empty if the alert fires at once."""
    runbook_url: str

    @property
    def runbook(self) -> dict[str, str]:
        """The runbook's text by section, in the file's order; empty if this installation has none."""
        path = RUNBOOKS / f"{self.name}.md"
        return _sections(path.read_text()) if path.is_file() else {}


def alerts() -> dict[str, Alert]:
    """Return every alert by name, in the files' order; empty if this installation has no rules."""
    return {alert.name: alert for alert in _read()}


def find(text: str) -> Alert | None:
    """Find an alert by name, in any case, with or without the prefix."""
    wanted = text.casefold().removeprefix(PREFIX.casefold())
    return next(
        (
            alert
            for name, alert in alerts().items()
            if name.casefold().removeprefix(PREFIX.casefold()) == wanted
        ),
        None,
    )


def recorded() -> dict[str, str]:
    """Return the expression of each recording rule by its name."""
    return {str(rule["record"]): str(rule["expr"]).strip() for rule in _rules() if "record" in rule}


def _read() -> Iterator[Alert]:
    for rule in _rules():
        if "alert" not in rule:
            continue
        notes = rule.get("annotations") or {}
        yield Alert(
            name=str(rule["alert"]),
            severity=str((rule.get("labels") or {}).get("severity", "")),
            summary=str(notes.get("summary", "")).strip(),
            description=str(notes.get("description", "")).strip(),
            expression=str(rule["expr"]).strip(),
            duration=str(rule.get("for", "")),
            runbook_url=str(notes.get("runbook_url", "")),
        )


def _rules() -> Iterator[dict[str, Any]]:
    from ruamel.yaml import YAML

    for path in sorted(RULES.glob("*.yaml")):
        document = YAML(typ="safe", pure=True).load(path.read_text())
        for group in (document or {}).get("groups", ()):
            yield from group.get("rules", ())


def _sections(text: str) -> dict[str, str]:
    parts = re.split(r"^## +(.+?) *$", text, flags=re.MULTILINE)
    return {parts[at]: parts[at + 1].strip() for at in range(1, len(parts) - 1, 2)}

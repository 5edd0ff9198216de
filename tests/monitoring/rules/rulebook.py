"""The rule files as data: which rule needs which, and reduced files for promtool."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

REPOSITORY = Path(__file__).resolve().parents[3]
RULES = REPOSITORY / "dashboards" / "rules"

_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_:]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A recording or an alerting rule."""

    name: str
    expr: str
    alerting: bool
    wait: str | None = None
    """Duration of `for`."""
    labels: Mapping[str, str]
    annotations: Mapping[str, str]

    @property
    def severity(self) -> str:
        return self.labels.get("severity", "")

    def document(self) -> dict[str, Any]:
        """Return the rule as it stands in a rule file."""
        found: dict[str, Any] = {"alert" if self.alerting else "record": self.name, "expr": self.expr}
        if self.wait is not None:
            found["for"] = self.wait
        if self.labels:
            found["labels"] = dict(self.labels)
        if self.annotations:
            found["annotations"] = dict(self.annotations)
        return found


def load() -> tuple[Rule, ...]:
    """Return all rules, recording ones first, in the order in which they are evaluated."""
    rules: list[Rule] = []
    for path in (RULES / "recording.yaml", RULES / "alerts.yaml"):
        document = YAML(typ="safe", pure=True).load(path.read_text())
        for group in document["groups"]:
            rules += [rule_of(each) for each in group["rules"]]
    return tuple(rules)


def rule_of(raw: Mapping[str, Any]) -> Rule:
    """Return the rule that an entry of a rule file describes."""
    return Rule(
        name=raw.get("alert") or raw["record"],
        expr=raw["expr"],
        alerting="alert" in raw,
        wait=raw.get("for"),
        labels=raw.get("labels", {}),
        annotations=raw.get("annotations", {}),
    )


def closure(rules: Sequence[Rule], name: str) -> tuple[Rule, ...]:
    """Return the rules that an alert or a recorded name is made of, in order."""
    needed = {name}
    for rule in reversed(rules):  # a rule uses only what is recorded above it
        if rule.name in needed:
            needed |= set(_NAME.findall(rule.expr))
    return tuple(rule for rule in rules if rule.name in needed)


def dependents(rules: Sequence[Rule], name: str) -> tuple[str, ...]:
    """Return the alerts that change when `name` does."""
    alerts = dict.fromkeys(rule.name for rule in rules if rule.alerting)
    return tuple(alert for alert in alerts if any(rule.name == name for rule in closure(rules, alert)))


def rule_file(rules: Iterable[Rule]) -> str:
    """Return a rule file of one group, so that all rules are evaluated in this order; JSON, which is YAML."""
    return json.dumps({"groups": [{"name": "tested", "rules": [rule.document() for rule in rules]}]})


def with_rule(rules: Sequence[Rule], index: int, **changes: str | None) -> tuple[Rule, ...]:
    """Return the rules with one of them changed."""
    return (*rules[:index], replace(rules[index], **changes), *rules[index + 1 :])  # type: ignore[arg-type]

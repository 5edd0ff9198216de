"""The variables and annotations of a board, by its scope."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deploy.dashboards.model import Level, Scope
from deploy.dashboards.panels import DATASOURCE
from deploy.dashboards.selectors import expand

# The operator exports jobs without pods, and workers export the jobs of a cluster without a scraped operator.
_ANY_JOB = '__name__=~"zerotrain_job_phase|zerotrain_rank_up"'
_ON_TIME_RANGE_CHANGE = 2
_NUMERICAL_ASCENDING = 3
_ALPHABETICAL_ASCENDING = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Variable:
    """A variable whose values are those of a series' label."""

    name: str
    label: str
    series: str
    """Selector of the series; may use the variables before it."""
    values_of: str
    """Label of the series whose values are offered."""
    description: str
    multi: bool = False
    numeric: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Annotation:
    """A mark on the time axis of every panel."""

    name: str
    expr: str
    title: str
    text: str
    level: Level
    value_is_time: bool = False
    """Whether the series' value is the time, in milliseconds, instead of the sample's own time."""


_JOB_VARIABLES = (
    Variable(
        name="namespace",
        label="Namespace",
        series=f"{{{_ANY_JOB}}}",
        values_of="namespace",
        description="Namespace of the job.",
    ),
    Variable(
        name="job",
        label="Job",
        series=f'{{{_ANY_JOB}, namespace="$namespace"}}',
        values_of="job_name",
        description="The ZeroTrainingJob.",
    ),
    Variable(
        name="rank",
        label="Ranks",
        series='zerotrain_rank_up{namespace="$namespace", job_name="$job"}',
        values_of="rank",
        description="Ranks that the panels by rank show.",
        multi=True,
        numeric=True,
    ),
)
_FLEET_VARIABLES = (
    Variable(
        name="namespace",
        label="Namespaces",
        series=f"{{{_ANY_JOB}}}",
        values_of="namespace",
        description="Namespaces whose jobs are counted.",
        multi=True,
    ),
    Variable(
        name="job",
        label="Jobs",
        series=f'{{{_ANY_JOB}, namespace=~"$namespace"}}',
        values_of="job_name",
        description="Jobs that are counted.",
        multi=True,
    ),
)
_OPERATOR_VARIABLES = (
    Variable(
        name="operator",
        label="Scrape job",
        series="zerotrain_operator_leader",
        values_of="job",
        description="Prometheus' scrape job of the operator; several, where one Prometheus sees several.",
        multi=True,
    ),
)
VARIABLES = {
    Scope.JOB: _JOB_VARIABLES,
    Scope.FLEET: _FLEET_VARIABLES,
    Scope.OPERATOR: _OPERATOR_VARIABLES,
}

ATTEMPTS = Annotation(
    name="Attempts",
    expr='1000 * max by (namespace, job_name) (zerotrain_attempt_start_timestamp_seconds{JOB, rank="0"})',
    title="Attempt started",
    text="All ranks of {{job_name}} were started together, the first time or again.",
    level=Level.WARNING,
    value_is_time=True,
)
CHECKPOINTS = Annotation(
    name="Checkpoints",
    expr='1000 * max by (namespace, job_name) (zerotrain_last_checkpoint_timestamp_seconds{JOB, rank="0"})',
    title="Checkpoint durable",
    text="From here on a restart of {{job_name}} loses nothing before this moment.",
    level=Level.INFO,
    value_is_time=True,
)
ALERTS = Annotation(
    name="Alerts",
    expr='ALERTS{JOB, alertstate="firing", alertname=~"ZeroTrain.+"}',
    title="{{alertname}}",
    text="severity {{severity}}; `zerotrain explain alert {{alertname}}` shows the remedy",
    level=Level.CRITICAL,
)
_FLEET_ALERTS = Annotation(
    name="Critical alerts",
    expr='ALERTS{FLEET, alertstate="firing", severity="critical", alertname=~"ZeroTrain.+"}',
    title="{{alertname}}: {{namespace}}/{{job_name}}",
    text="`zerotrain explain alert {{alertname}}` shows the remedy",
    level=Level.CRITICAL,
)
_OPERATOR_ALERTS = Annotation(
    name="Alerts",
    expr='ALERTS{alertstate="firing", alertname=~"ZeroTrainOperator.+"}',
    title="{{alertname}}",
    text="severity {{severity}}; `zerotrain explain alert {{alertname}}` shows the remedy",
    level=Level.CRITICAL,
)
ANNOTATIONS = {
    Scope.JOB: (ATTEMPTS, CHECKPOINTS, ALERTS),
    Scope.FLEET: (_FLEET_ALERTS,),
    Scope.OPERATOR: (_OPERATOR_ALERTS,),
}


def templating(scope: Scope) -> dict[str, Any]:
    """Return the `templating` object of a board."""
    return {"list": [_datasource(), *(_variable(item) for item in VARIABLES[scope])]}


def annotation_list(scope: Scope) -> dict[str, Any]:
    """Return the `annotations` object of a board."""
    return {"list": [_built_in(), *(_annotation(item) for item in ANNOTATIONS[scope])]}


def _datasource() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Data source",
        "description": "The Prometheus that scrapes the jobs.",
        "type": "datasource",
        "query": "prometheus",
        "options": [],
        "regex": "",
        "refresh": 1,
        "hide": 0,
        "multi": False,
        "includeAll": False,
        "skipUrlSync": False,
    }


def _variable(variable: Variable) -> dict[str, Any]:
    query = f"label_values({variable.series}, {variable.values_of})"
    found: dict[str, Any] = {
        "name": variable.name,
        "label": variable.label,
        "description": variable.description,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": f"variable-{variable.name}", "qryType": 1},
        "regex": "",
        "refresh": _ON_TIME_RANGE_CHANGE,
        "sort": _NUMERICAL_ASCENDING if variable.numeric else _ALPHABETICAL_ASCENDING,
        "multi": variable.multi,
        "includeAll": variable.multi,
        "options": [],
        "hide": 0,
        "skipUrlSync": False,
    }
    if variable.multi:
        found["current"] = {"text": ["All"], "value": ["$__all"]}
        found["allValue"] = ".*"  # a list of all names would make the query too long for a large fleet
    return found


def _built_in() -> dict[str, Any]:
    return {
        "builtIn": 1,
        "datasource": {"type": "grafana", "uid": "-- Grafana --"},
        "enable": True,
        "hide": True,
        "iconColor": "rgba(0, 211, 255, 1)",
        "name": "Annotations & Alerts",
        "type": "dashboard",
    }


def _annotation(annotation: Annotation) -> dict[str, Any]:
    return {
        "name": annotation.name,
        "datasource": DATASOURCE,
        "enable": True,
        "hide": False,
        "iconColor": annotation.level.value,
        "expr": expand(annotation.expr),
        "titleFormat": annotation.title,
        "textFormat": annotation.text,
        "tagKeys": "",
        "step": "15s",
        "useValueForTime": annotation.value_is_time,
    }

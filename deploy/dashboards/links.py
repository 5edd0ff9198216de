"""Links of the boards: to each other, to a row's job, and to the runbooks."""

from __future__ import annotations

from typing import Any

from deploy.dashboards.model import Dashboard, Scope, uid

RUNBOOKS = "https://zerotrain.dev/docs/runbooks"
"""Base of the alert rules' `runbook_url`; a test compares the two."""

JOB_BOARD_URL = (
    "/d/{uid}?var-datasource=${{datasource}}&var-namespace=${{__data.fields.namespace}}"
    "&var-job=${{__data.fields.job_name}}&${{__url_time_range}}"
)
"""Link from a table's row that has the labels namespace and job_name."""

TAG = "zerotrain"
JOB_TAG = "zerotrain-job"
_ALWAYS = {"Fleet": "fleet", "Operator": "operator"}
"""Boards that every other board links to, by title."""


def runbook_url(alert: str) -> str:
    """Return the URL of an alert's runbook. `alert` has no prefix."""
    return f"{RUNBOOKS}/ZeroTrain{alert}.md"


def tags(board: Dashboard) -> list[str]:
    """Return the tags of a board. The boards of one job link to each other through a tag of their own."""
    return [TAG, JOB_TAG] if board.scope is Scope.JOB else [TAG]


def board_links(board: Dashboard) -> list[dict[str, Any]]:
    """Return the links of a board.

    Links between the boards of a job carry job and time range. The others carry only the time range, because
    the value `All` of namespaces has no meaning on a board of one job.
    """
    links = [_link(title, name) for title, name in _ALWAYS.items() if name != board.name]
    if board.scope is not Scope.JOB:
        return links
    others = {
        **_base("This job"),
        "type": "dashboards",
        "tags": [JOB_TAG],
        "includeVars": True,
        "icon": "external link",
        "tooltip": "The same job on the other boards",
    }
    return [others, *links]


def _link(title: str, name: str) -> dict[str, Any]:
    return {
        **_base(title),
        "type": "link",
        "url": f"/d/{uid(name)}?var-datasource=${{datasource}}",
        "icon": "dashboard",
        "tooltip": f"Open the board {title}",
        "tags": [],
        "includeVars": False,
    }


def _base(title: str) -> dict[str, Any]:
    return {"title": title, "asDropdown": False, "targetBlank": False, "keepTime": True}

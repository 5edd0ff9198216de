"""Where the boards point: each other, a row's job, and the runbooks."""

from __future__ import annotations

from typing import Any

from deploy.dashboards.model import Board, Scope, uid

RUNBOOKS = "https://zerotrain.dev/docs/runbooks"
"""The same base as the `runbook_url` of the alert rules; a test compares."""

JOB_BOARD_URL = (
    "/d/{uid}?var-datasource=${{datasource}}&var-namespace=${{__data.fields.namespace}}"
    "&var-job=${{__data.fields.job_name}}&${{__url_time_range}}"
)
"""Of a table's row that has the labels namespace and job_name."""

TAG = "zerotrain"
JOB_TAG = "zerotrain-job"
FLEET_BOARD = "fleet"
OPERATOR_BOARD = "operator"


def runbook_url(alert: str) -> str:
    """`alert` without its prefix."""
    return f"{RUNBOOKS}/ZeroTrain{alert}.md"


def tags(board: Board) -> list[str]:
    """The boards of one job find each other by a tag of their own."""
    return [TAG, JOB_TAG] if board.scope is Scope.JOB else [TAG]


def board_links(board: Board) -> list[dict[str, Any]]:
    """The boards of a job carry job and time range from one to the next; the others only the time range,
    because `All` namespaces mean nothing to a board of one job."""
    links = [_link("Fleet", FLEET_BOARD), _link("Operator", OPERATOR_BOARD)]
    links = [link for link in links if f"/d/{board.uid}" not in link["url"]]
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

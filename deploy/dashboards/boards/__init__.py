"""The boards, one module each, in the order in which a user meets them."""

from __future__ import annotations

from deploy.dashboards.boards.checkpoints import CHECKPOINTS
from deploy.dashboards.boards.communication import COMMUNICATION
from deploy.dashboards.boards.fleet import FLEET
from deploy.dashboards.boards.job_overview import JOB_OVERVIEW
from deploy.dashboards.boards.memory import MEMORY
from deploy.dashboards.boards.operator import OPERATOR
from deploy.dashboards.boards.ranks import RANKS
from deploy.dashboards.model import Dashboard

BOARDS: tuple[Dashboard, ...] = (FLEET, JOB_OVERVIEW, RANKS, MEMORY, COMMUNICATION, CHECKPOINTS, OPERATOR)

"""Between which sizes a job may be resized."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from zerotrain.operator.constants import MAX_WORKERS

from .base import ApiModel, Int, rule


class Elastic(ApiModel):
    """Between which numbers of workers the job may be resized."""

    RULES = (
        rule(
            "self.minWorkers <= self.maxWorkers",
            "minWorkers must not exceed maxWorkers",
            holds=lambda self: self.min_workers <= self.max_workers,
            field_path=".minWorkers",
        ),
    )

    min_workers: Annotated[Int, Field(ge=1, le=MAX_WORKERS)]
    """The fewest workers that the job goes on with."""

    max_workers: Annotated[Int, Field(ge=1, le=MAX_WORKERS)]
    """The most workers that the job grows to."""

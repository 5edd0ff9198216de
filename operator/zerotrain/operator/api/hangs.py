"""When a job whose step stopped moving counts as hung."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .base import ApiModel, Int, Seconds


class HangPolicy(ApiModel):
    """When a job whose step stopped moving counts as hung."""

    step_timeout_factor: Annotated[Int, Field(ge=2, le=1000)] | None = None
    """Hung after this many times the learned duration of a step, 2 to 1000."""

    min_timeout_seconds: Seconds | None = None
    """Never hung before so many seconds without a step."""

    startup_timeout_seconds: Seconds | None = None
    """Seconds that the first step of an attempt may take."""

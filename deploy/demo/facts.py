"""The requested and the actual settings of a job, from the object and from /metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from zerotrain.contract.config import load, resolve


def asked_for(spec: Mapping[str, Any]) -> str:
    """Return workers, ZeRO stage and number format of a job's spec, with the engine's defaults."""
    # The number of ranks changes only batch sizes, which are not part of the text.
    config = resolve(load(spec.get("config", {})), world_size=1)
    return f"{spec['workers']} workers, {_engine(str(config.zero.stage), config.precision.compute_dtype)}"


def ran_as(metrics: str) -> str | None:
    """Return ranks, ZeRO stage and number format from a worker's /metrics; None before they are exported."""
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            labels = sample.labels
            if sample.name == "zerotrain_rank_info" and labels.get("dtype"):
                return f"{labels['world_size']} ranks, {_engine(labels['zero_stage'], labels['dtype'])}"
    return None


def _engine(stage: str, dtype: str) -> str:
    return f"ZeRO stage {stage}, {dtype}"

"""What a job asks for and what its ranks say they run, read from the object and from /metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from zerotrain.contract.config import load, resolve


def asked_for(spec: Mapping[str, Any]) -> str:
    """Workers, ZeRO stage and number format of a job's spec; defaults are those of the engine."""
    # The number of ranks changes batch sizes alone, which are not said here.
    config = resolve(load(spec.get("config", {})), world_size=1)
    return f"{spec['workers']} workers, {_engine(str(config.zero.stage), config.precision.compute_dtype)}"


def ran_as(metrics: str) -> str | None:
    """Ranks, ZeRO stage and number format as a worker's /metrics say it; None before a rank has said so."""
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            labels = sample.labels
            if sample.name == "zerotrain_rank_info" and labels.get("dtype"):
                return f"{labels['world_size']} ranks, {_engine(labels['zero_stage'], labels['dtype'])}"
    return None


def _engine(stage: str, dtype: str) -> str:
    return f"ZeRO stage {stage}, {dtype}"

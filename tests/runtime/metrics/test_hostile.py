"""A training program may put anything into its snapshot: only its own metrics are affected."""

from __future__ import annotations

import json
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from zerotrain.contract.metrics import JOB_METRICS, LAUNCHER_METRICS, OPERATOR_METRICS, WORKER_METRICS
from zerotrain.runtime.metrics import MergedCollector
from zerotrain.runtime.metrics.snapshot import restore

pytestmark = pytest.mark.unit


FORGED = '\nforged{job_name="other",rank="0"} 1\n#'


def family(**changed: Any) -> dict[str, Any]:
    return {"name": "mine", "help": "", "type": "counter", "unit": "", "samples": []} | changed


def counting(exemplar: Any, name: str = "mine_total") -> dict[str, Any]:
    return family(samples=[[name, {}, 1.0, exemplar]])


def lines(families: list[Any]) -> list[str]:
    """Return lines of the pod's OpenMetrics answer, as a scrape gets it; both formats can be read."""
    merged = MergedCollector("gpt")
    merged.update(1, restore(json.loads(json.dumps(families))))
    registry = CollectorRegistry()
    registry.register(merged)
    generate_latest(registry)
    text: str = generate_openmetrics(registry).decode()  # type: ignore[no-untyped-call]
    assert list(parse_openmetrics(text)) is not None  # type: ignore[no-untyped-call]
    return text.splitlines()


@pytest.mark.parametrize(
    "hostile",
    [
        counting([{"step": "1"}, 1.0, f"now{FORGED}"]),
        counting([{"step": "1"}, f"1{FORGED}", 1.0]),
        counting([{'step"} 1\nforged 1\n#': "1"}, 1.0, 1.0]),
        counting([["step"], 1.0, 1.0]),
        counting([7, 1.0, 1.0]),
        counting([{"step": 7}, 1.0, 1.0]),
        counting([{"step": "1" * 200}, 1.0, 1.0]),
        counting([{"step": "1"}, 1.0, float("inf")]),
        counting([{"step": "1"}, 1.0]),
        family(type="gauge", samples=[["mine", {}, 1.0, [{"step": "1"}, 1.0, 1.0]]]),
        family(unit=f"x{FORGED}"),
        family(unit=7),
        family(unit="seconds"),  # not the end of the name
        family(type=["gauge"]),
        family(samples=[["mine_total", {"a": "\ud800"}, 1.0, None]]),
        family(help="\ud800"),
        family(samples=[["mine_total", {"__name__": "other"}, 1.0, None]]),
        family(
            name="zerotrain_rank",
            type="info",
            samples=[["zerotrain_rank_info", {"world_size": size}, 1.0, None] for size in ("2", "4")],
        ),
        family(samples=[["mine_bucket", {"le": "1"}, 1.0, None]]),  # a counter has no buckets
        family(name="zerotrain", type="gauge", samples=[["zerotrain_operator_leader", {}, 1.0, None]]),
        family(name="zerotrain_step", samples=[["zerotrain_step_total", {}, 1.0, None]]),  # a gauge of ours
    ],
)
def test_what_would_not_stay_in_its_place_is_refused(hostile: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        restore(json.loads(json.dumps([hostile])))


def test_an_honest_exemplar_and_a_unit_arrive() -> None:
    found = lines(
        [
            counting([{"step": "12"}, 1.0, 1700000000.5]),
            family(
                name="own_seconds", type="gauge", unit="seconds", samples=[["own_seconds", {}, 2.0, None]]
            ),
            family(
                name="own_time",
                type="histogram",
                samples=[
                    ["own_time_bucket", {"le": "1.0"}, 1.0, [{"step": "3"}, 0.5, None]],
                    ["own_time_bucket", {"le": "+Inf"}, 1.0, None],
                    ["own_time_count", {}, 1.0, None],
                    ["own_time_sum", {}, 0.5, None],
                ],
            ),
        ]
    )
    assert 'mine_total{job_name="gpt",rank="1"} 1.0 # {step="12"} 1.0 1700000000.5' in found
    assert "# UNIT own_seconds seconds" in found
    assert any(line.endswith('# {step="3"} 0.5') for line in found)


def test_names_of_others_are_left_out_and_the_rest_stays() -> None:
    names = [
        *(spec.name for spec in (*OPERATOR_METRICS, *JOB_METRICS, *LAUNCHER_METRICS, *WORKER_METRICS)),
        "zerotrain_of_tomorrow",
        "DCGM_FI_DEV_XID_ERRORS",
        "ALERTS",
        "up",
        "scrape_samples_scraped",
    ]
    found = lines(
        [
            *(family(name=name, type="gauge", samples=[[name, {}, 1.0, None]]) for name in names),
            family(name="upkeep", type="gauge", samples=[["upkeep", {}, 1.0, None]]),
        ]
    )
    assert [line for line in found if not line.startswith("#")] == ['upkeep{job_name="gpt",rank="1"} 1.0']

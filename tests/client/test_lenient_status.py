"""Lenient reading of a status: arbitrary JSON raises nothing, and the parts that are right survive."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.support.job_states import NOW, condition, failure, job, running_status, stamp
from zerotrain.cli.top_table import one_line
from zerotrain.client.diagnosis import diagnose
from zerotrain.client.job import job_html
from zerotrain.client.snapshot import Snapshot, kept_rows
from zerotrain.operator.api import Phase, ZeroTrainingJobStatus
from zerotrain.operator.api.lenient import read_leniently
from zerotrain.operator.api.status import MAX_FAILURES

pytestmark = pytest.mark.unit

FULL: dict[str, Any] = {
    **running_status(),
    "hang": {"attempt": 2, "detectedAt": stamp(9), "rank": 3, "step": 60, "limitSeconds": 300},
    "straggler": {"attempt": 2, "rank": 1, "percent": 180},
    "yieldRequest": {"reason": "Drain", "requestedAt": stamp(8)},
    "elastic": {"baseWorkers": 4, "requestedWorkers": 4, "reason": "Capacity", "message": "few nodes"},
    "shape": {"workers": 2, "tolerations": [{"key": "gpu", "operator": "Exists"}], "labels": {"a": "b"}},
    "excludedNodes": [{"name": "node-c", "until": stamp(-60)}],
    "failures": [failure(2, ranks=[{"rank": 2, "exitCode": 1}]), failure(1)],
    "conditions": [condition("Progressing", "True", "StepAdvanced"), condition("Ready", "False", "Waits")],
}
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.text(st.characters(codec=None), max_size=8)
    | st.sampled_from([stamp(1), "2026-01-01", "Running", "True"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def places(part: Any) -> Iterator[tuple[Any, Any]]:
    """Iterate over container and key of everything in JSON."""
    for key, item in list(part.items() if isinstance(part, dict) else enumerate(part)):
        yield part, key
        if isinstance(item, dict | list):
            yield from places(item)


NUM_PLACES = len(list(places(FULL)))


@settings(max_examples=20, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(0, NUM_PLACES - 1), JSON), max_size=4))
def test_arbitrary_parts_cost_no_others(changes: list[tuple[int, Any]]) -> None:
    value = copy.deepcopy(FULL)
    found, touched = list(places(value)), set()
    for number, part in changes:
        container, key = found[number]
        container[key] = part
    for name, item in FULL.items():
        if repr(value[name]) != repr(item):  # True equals 1
            touched.add(name)
    before = copy.deepcopy(value)
    read = read_leniently(ZeroTrainingJobStatus, value)
    assert repr(value) == repr(before)
    whole = ZeroTrainingJobStatus.model_validate(FULL)
    fields = {info.alias: name for name, info in ZeroTrainingJobStatus.model_fields.items()}
    for name in FULL.keys() - touched:
        assert getattr(read, fields[name]) == getattr(whole, fields[name]), name
    shown = job(value)
    diagnose(shown, now=NOW)
    job_html(shown)
    one_line(Snapshot(time=NOW, job=shown, rows=tuple(kept_rows(shown, NOW))))


@settings(max_examples=50, deadline=None)
@given(value=JSON | st.dictionaries(st.sampled_from(sorted(FULL)), JSON, max_size=5))
def test_arbitrary_json_is_a_status(value: Any) -> None:
    read = read_leniently(ZeroTrainingJobStatus, value)
    assert read.model_fields_set <= ZeroTrainingJobStatus.model_fields.keys()


def test_a_bad_item_costs_that_item_and_a_bad_field_that_field() -> None:
    bad = [{**failure(3), "exitCode": "one", "log": 7}, {"attempt": 2}, 7, failure(1)]
    found = job({"failures": bad, "attempt": 2**70}).failures
    assert [(item.attempt, item.exit_code, item.log) for item in found] == [
        (3, None, ""),
        (1, 1, "attempt-1.log"),
    ]


def test_values_of_a_newer_operator_are_kept_as_texts() -> None:
    newer = {
        "phase": "Migrating",
        "yieldRequest": {"reason": "Defragment", "requestedAt": stamp(8)},
        "failures": [failure(1, cause="weather")],
        "unknown": {"a": 1},
    }
    shown = job(newer)
    assert (shown.phase, shown.failures[0].cause) == ("Migrating", "weather")
    assert diagnose(shown, now=NOW).headline.startswith("gpt is Migrating")
    assert "checkpoint and stop, Defragment" in " ".join(diagnose(shown, now=NOW).situation)
    with pytest.raises(ValidationError):
        ZeroTrainingJobStatus.model_validate({"phase": "Migrating"})
    assert "Migrating" not in [phase.value for phase in Phase]


def test_a_list_that_is_longer_than_this_version_knows_is_cut() -> None:
    found = job({"failures": [failure(number) for number in range(MAX_FAILURES + 5)]}).failures
    assert [item.attempt for item in found] == list(range(MAX_FAILURES))


def test_a_time_without_a_zone_or_of_another_form_is_none() -> None:
    for value in ["2026-01-01", "2026-01-01T00:00:00", "yesterday", [], "9" * 400]:
        assert job({"startTime": value}).start_time is None

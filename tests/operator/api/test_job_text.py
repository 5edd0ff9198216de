"""A job is read within bounds: one that exceeds them keeps its name, its status and a reason, nothing
else.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.operator.reconcile_builders import NOW, job
from zerotrain.operator.api import Phase
from zerotrain.operator.api.job_text import UNREAD, kept, read_event, read_job
from zerotrain.operator.cluster import json_codec
from zerotrain.operator.cluster.api import Json
from zerotrain.operator.constants import MAX_SPEC_BYTES, MAX_SPEC_DEPTH, MAX_SPEC_VALUES
from zerotrain.operator.reconcile import Observed, reconcile

pytestmark = pytest.mark.unit

QUEUE = {"kueue.x-k8s.io/queue-name": "team"}
STATUS = {"phase": "Running", "attempt": 2, "zeroStage": 3, "workers": {"desired": 2}}


def text_of(config: str, **more: Any) -> bytes:
    """Return a job as it is stored, with this text for its configuration."""
    body = job(**more.pop("meta", {}))
    body["spec"] |= {"config": "CONFIG", **more.pop("spec", {})}
    whole = {**dict(sorted(body.items())), **more}
    return json.dumps(whole, separators=(",", ":")).replace('"CONFIG"', config).encode()


def deep(levels: int, kind: str = "{") -> str:
    return '{"a":' * levels + "1" + "}" * levels if kind == "{" else "[" * levels + "]" * levels


def bounded(text: bytes) -> Json:
    return kept(read_job(text))


@pytest.mark.parametrize("levels", [MAX_SPEC_DEPTH + 1, 300, 600, 1020, 1030, 3000, 200_000])
@pytest.mark.parametrize("kind", ["{", "["])
def test_a_deep_configuration_is_named_and_not_kept(levels: int, kind: str) -> None:
    found = bounded(text_of(deep(levels, kind), status=STATUS, spec={"suspend": True}))
    assert found["spec"] == {"suspend": True}
    assert "spec.config" in found[UNREAD]
    assert found["status"] == STATUS


def test_the_greatest_depth_is_read() -> None:
    found = bounded(text_of(deep(MAX_SPEC_DEPTH)))
    assert UNREAD not in found
    assert found["spec"]["config"] == json.loads(deep(MAX_SPEC_DEPTH))


def test_the_message_names_the_largest_field_and_its_size() -> None:
    text = text_of('{"x":[' + ",".join(["{}"] * 450_000) + "]}", status=STATUS)
    found = bounded(text)
    for part in ("spec.config", "1,350,", f"{MAX_SPEC_BYTES:,}", "mount"):
        assert part in found[UNREAD]
    assert found["status"] == STATUS
    assert len(json_codec.write(found)) < 4096


def test_small_values_are_counted() -> None:
    within_limits = bounded(text_of('{"x":[' + ",".join(["{}"] * (MAX_SPEC_VALUES - 100)) + "]}"))
    assert UNREAD not in within_limits
    many = bounded(text_of('{"x":[' + ",".join(["{}"] * MAX_SPEC_VALUES) + "]}"))
    assert f"{MAX_SPEC_VALUES:,}" in many[UNREAD]


def test_managed_fields_are_as_deep_as_what_they_manage() -> None:
    """Managed fields stand before the spec, and the operator does not read them."""
    fields = [{"manager": "kubectl", "fieldsV1": "FIELDS"}]
    text = text_of(deep(3000), meta={"managedFields": fields}).replace(b'"FIELDS"', deep(3000).encode())
    found = bounded(text)
    assert found["metadata"] == kept(job())["metadata"]
    assert UNREAD in found


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_watch_event_is_read_as_an_item_of_a_list_is(size: int) -> None:
    text = text_of('{"note":"' + "x" * size + '"}', status=STATUS)
    event = read_event(b'{"type":"MODIFIED","object":' + text + b"}\n")
    assert event["type"] == "MODIFIED"
    assert kept(event["object"]) == bounded(text)
    assert (UNREAD in event["object"]) == (size > MAX_SPEC_BYTES)


def test_text_inside_a_spec_is_not_taken_for_the_job() -> None:
    forged = '{"status":{"phase":"Completed"},"metadata":{"name":"other"},"spec":{"managedBy":"me"}}'
    found = bounded(text_of('{"forged":[' + ",".join([forged] * 5000) + "]}", status=STATUS))
    assert found["status"] == STATUS
    assert found["metadata"]["name"] == job()["metadata"]["name"]
    assert "managedBy" not in found["spec"]


def test_only_labels_and_annotations_that_are_read_are_kept() -> None:
    notes = {f"zerotrain.dev/{number:05}": "x" * 200 for number in range(2000)}
    ours = {"zerotrain.dev/ignore-memory-plan": "true"}
    found = bounded(text_of("{}", meta={"annotations": {**notes, **ours}, "labels": {"a": "b", **QUEUE}}))
    assert (found["metadata"]["annotations"], found["metadata"]["labels"]) == (ours, QUEUE)
    too_long = bounded(text_of("{}", meta={"annotations": dict.fromkeys(ours, "y" * 100_000)}))
    assert too_long["metadata"]["annotations"] == {}


@pytest.mark.parametrize("text", [b"", b"[" * 5000, b'{"metadata":', b'{"spec":{}}' + b" " * 70_000])
def test_what_is_no_job_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError):
        read_job(text)
    with pytest.raises(ValueError):
        read_event(b'{"type":"ADDED","object":' + text)


@pytest.mark.parametrize("levels", [600, 990, 1020, 1030, 2000, 9000])
def test_the_reader_raises_nothing_but_value_errors(levels: int) -> None:
    with pytest.raises(ValueError, match="nested"):
        json_codec.read(b'{"note":"\\ud800","x":' + deep(levels).encode() + b"}")


def test_a_job_that_is_too_large_stalls_and_its_pods_are_left_alone() -> None:
    body = bounded(text_of(deep(600)))
    plan = reconcile(body, Observed(), NOW)
    assert plan.status is not None
    assert plan.status.phase is Phase.STALLED
    stalled = next(item for item in plan.status.conditions if item.type == "Stalled")
    assert (stalled.status, stalled.reason) == ("True", "InvalidSpec")
    assert "spec.config" in stalled.message
    assert not plan.actions
    running = reconcile(bounded(text_of(deep(600), status=STATUS)), Observed(), NOW)
    assert running.status is not None
    assert running.status.phase is Phase.RUNNING
    assert not running.actions


def test_a_job_of_another_manager_stays_its_own() -> None:
    body = bounded(text_of(deep(600), spec={"managedBy": "kueue.x-k8s.io/multikueue"}))
    assert UNREAD in body
    assert reconcile(body, Observed(), NOW).status is None

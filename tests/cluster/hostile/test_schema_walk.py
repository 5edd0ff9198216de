"""The walk over the schema finds every place, and the values that it builds there match the schema."""

from __future__ import annotations

import json
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from tests.cluster.hostile.schema_values import texts, variants
from tests.cluster.hostile.schema_walk import (
    Place,
    is_free,
    least,
    matches,
    places,
    spec_with,
    union,
)
from tests.cluster.hostile.texts import raw_characters
from tests.support.jobs import ABSENT, job_json
from zerotrain.operator.api.crd import openapi_schema

pytestmark = pytest.mark.unit

SPEC: dict[str, Any] = openapi_schema()["properties"]["spec"]
PLACES = {str(place): place for place in places(SPEC)}
BASE = job_json({"spec.workers": 1, "spec.ranksPerWorker": 1, "spec.checkpoint": ABSENT})["spec"]


def test_every_string_list_and_map_is_a_place() -> None:
    """The places are counted in another way: as text, without knowing the nesting."""
    text = json.dumps(SPEC)
    kinds = ('"type": "string"', '"type": "array"', '"additionalProperties": {', '"x-kubernetes-preserve-')
    # A quantity names the type of its text in an alternative.
    assert len(PLACES) == sum(map(text.count, kinds))
    assert {"spec.config", "spec.image", "spec.args", "spec.args[]", "spec.resources.cpu"} <= PLACES.keys()
    assert "spec.podTemplate.volumes[].projected.sources[].secret.items[].path" in PLACES
    assert "spec.scheduling.nodeSelector{}" in PLACES


def test_what_is_put_around_a_value_is_the_least_that_the_schema_takes() -> None:
    schema = jsonschema.Draft202012Validator(SPEC)
    for name, place in PLACES.items():
        value = {} if is_free(place.schema) else least(place.schema)
        spec = spec_with(SPEC, BASE, place, value)
        assert next(schema.iter_errors(spec), None) is None, f"{name}: {spec}"


@pytest.mark.parametrize(
    ("name", "around"),
    [
        ("spec.podTemplate.volumes[].name", {"name": "V", "configMap": {}}),
        ("spec.podTemplate.volumes[].nfs.path", {"name": "a", "nfs": {"server": "a", "path": "V"}}),
    ],
)
def test_of_alternatives_one_is_given(name: str, around: dict[str, Any]) -> None:
    (volume,) = spec_with(SPEC, BASE, PLACES[name], "V")["podTemplate"]["volumes"]
    assert volume.keys() == around.keys()
    assert union(SPEC["properties"]["model"]) == ["gpt", "preset", "path", "factory"]
    (rule,) = spec_with(SPEC, BASE, PLACES["spec.failurePolicy.rules[].action"], "V")["failurePolicy"][
        "rules"
    ]
    assert rule.keys() == {"action", "onExitCodes"}


def test_texts_fit_the_pattern_and_are_as_long_as_may_be() -> None:
    for name, place in PLACES.items():
        if place.schema.get("type") != "string" or "enum" in place.schema:
            continue
        found = list(texts(place.schema, 2_000))
        assert found, name
        assert all(matches(place.schema.get("pattern", ""), text) for text in found), name
        longest = min(place.schema.get("maxLength", 2_000), 2_000)
        assert max(map(len, found)) >= 0.7 * longest, name


def test_dirt_comes_first_where_the_pattern_lets_it() -> None:
    assert raw_characters(next(texts(PLACES["spec.image"].schema)))
    assert raw_characters(next(texts(PLACES["spec.nvme.mountPath"].schema)))
    assert not raw_characters(next(texts(PLACES["spec.nvme.storageClassName"].schema)))


def test_free_form_values_are_as_deep_as_they_say() -> None:
    deepest, lists, *_ = variants(PLACES["spec.config"])
    text = next(deepest.values())
    assert text.count("{") == text.count("}") == 9_900
    assert next(lists.values()).count("[") == 9_900
    assert [str(variant) for variant in variants(PLACES["spec.args"])] == ["spec.args longest"]


def test_lists_and_maps_are_full() -> None:
    def first(name: str) -> Any:
        (variant,) = variants(PLACES[name])
        return json.loads(next(variant.values()))

    assert len(first("spec.args")) == SPEC["properties"]["args"]["maxItems"]
    labels = first("spec.scheduling.nodeSelector")
    assert len(labels) == SPEC["properties"]["scheduling"]["properties"]["nodeSelector"]["maxProperties"]
    assert all(raw_characters(key) for key in labels)
    patterns = first("spec.failurePolicy.rules[].onMessagePatterns")
    assert len(set(patterns)) == len(patterns) == 16


def test_a_dollar_is_the_very_end() -> None:
    assert matches("^a$", "a")
    assert not matches("^a$", "a\n")
    assert matches(r"^a\$", "a$b")


def test_a_place_reads_as_a_user_writes_it() -> None:
    place = Place(path=("podTemplate", "env", "[]", "value"), schema={})
    assert str(place) == "spec.podTemplate.env[].value"

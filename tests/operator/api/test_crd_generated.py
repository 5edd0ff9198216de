"""crds/ is generated from the models: the files are unedited and up to date."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from zerotrain.operator.api.crd import custom_resource_definition, render

pytestmark = pytest.mark.unit


CRD_FILE = Path(__file__).parents[3] / "crds" / "zerotrain.dev_zerotrainingjobs.yaml"
APPLY_LIMIT = 262_144
"""Bytes that the annotation of `kubectl apply` may hold."""


@cache
def rendered() -> str:
    return render()


def test_the_committed_file_is_the_generated_one() -> None:
    assert CRD_FILE.read_text() == rendered(), (
        "run: python -m zerotrain.operator.api.crd > crds/zerotrain.dev_zerotrainingjobs.yaml"
    )


def test_generating_twice_gives_the_same_text() -> None:
    assert rendered() == render()


def test_the_yaml_equals_the_models() -> None:
    assert yaml.load(rendered(), Loader=yaml.CSafeLoader) == custom_resource_definition()


def test_client_side_apply_still_works() -> None:
    # kubectl keeps the object as JSON without spaces, in which Go's encoder escapes these three signs.
    stored = json.dumps(custom_resource_definition(), separators=(",", ":"), ensure_ascii=False)
    escaped = sum(stored.count(sign) for sign in "<>&") * (len(r"\u003c") - 1)
    assert len(stored.encode()) + escaped < APPLY_LIMIT


def test_columns_for_kubectl_get() -> None:
    version = custom_resource_definition()["spec"]["versions"][0]
    columns = [column["name"] for column in version["additionalPrinterColumns"]]
    assert columns == [
        *("Phase", "Reason", "Step", "Ranks", "Stage", "Loss"),
        *("Tokens/s", "Restarts", "Checkpoint", "Age"),
    ]


def test_every_column_and_scale_path_names_a_field() -> None:
    version = custom_resource_definition()["spec"]["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]
    paths = [column["jsonPath"] for column in version["additionalPrinterColumns"]]
    for path in [*paths, *version["subresources"]["scale"].values()]:
        place = schema
        for name in path.removeprefix(".").replace('[?(@.type=="Ready")]', "").split("."):
            if name == "metadata":
                break
            place = place.get("items", place)["properties"][name]

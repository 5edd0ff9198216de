"""JSON of the API server: fast where it is plain, and never rejected for texts of a tenant's program."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from zerotrain.operator.cluster import json_codec

HALF = "half a pair: \ud800"


@pytest.mark.unit
def test_plain_objects_are_the_same_both_ways() -> None:
    body = {"a": [1, 2.5, None, True], "b": {"text": "ä"}, "big": 2**53 + 1}
    assert json_codec.read(json_codec.write(body)) == json.loads(json_codec.write(body)) == body


@pytest.mark.unit
def test_half_a_surrogate_pair_is_passed_on() -> None:
    assert json.loads(json_codec.write({"note": HALF})) == {"note": HALF}
    assert json_codec.read(json.dumps({"note": HALF}).encode()) == {"note": HALF}


@pytest.mark.unit
@pytest.mark.parametrize("text", [b"", b"{", b'{"type":', b"<html>"])
def test_what_is_no_json_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError):
        json_codec.read(text)


@pytest.mark.ranks
def test_the_operator_starts_without_the_validator_of_the_kubernetes_package() -> None:
    """The import would take seconds in which a restarted leader is not back, whether or not the validator is
    installed.
    """
    env = {**os.environ, "ZEROTRAIN_OPERATOR_NAMESPACES": "no*name"}
    command = [sys.executable, "-X", "importtime", "-m", "zerotrain.operator"]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert "is not a namespace name" in ended.stderr
    loaded = {line.rsplit("|", 1)[-1].strip() for line in ended.stderr.splitlines() if "|" in line}
    assert {"kopf", "kubernetes.dynamic.client"} <= loaded
    assert "jsonschema" not in loaded, "what the validator is made of"

"""Properties of the reader: valid JSON reads as `json` reads it, and any other text is a ConfigError."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerotrain.contract.config import ConfigError, load, loads, resolve

pytestmark = pytest.mark.unit


leaves = st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
objects = st.dictionaries(st.text(), values, max_size=5)
noise = st.sampled_from([" ", "\n", "\u00a0", "\ufeff", "\t", '// "x\n', "# {\n", '/* "}, */', "\u2003", ""])
pieces = st.sampled_from(
    [
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        '"',
        '"a"',
        "1",
        "-",
        "1e5",
        "_",
        "true",
        "/*",
        "*/",
        "//",
        "#",
        "\n",
        "\\",
        "é",
        "'",
    ]
)


@given(objects, st.sampled_from([None, 1, "\t"]), st.booleans())
@settings(max_examples=15, deadline=None)
def test_valid_json_reads_as_json_does(
    value: dict[str, Any], indent: int | str | None, ascii_only: bool
) -> None:
    text = (
        json.dumps(value, indent=indent, ensure_ascii=ascii_only, allow_nan=False) if _finite(value) else "{}"
    )
    expected = json.loads(text)
    assert json.dumps(loads(text)) == json.dumps(expected)


@given(objects, st.lists(noise, min_size=1, max_size=30))
@settings(max_examples=40, deadline=None)
def test_noise_between_tokens_changes_nothing(value: dict[str, Any], extra: list[str]) -> None:
    if not _finite(value):
        return
    encoder = json.JSONEncoder(ensure_ascii=False, indent=None)
    noisy = "".join(
        token + (extra[index % len(extra)] if not token.isspace() else "")
        for index, token in enumerate(_tokens(encoder.encode(value)))
    )
    assert json.dumps(loads(extra[0] + noisy)) == json.dumps(value)


@given(st.text(max_size=60) | st.lists(pieces, max_size=25).map("".join))
@settings(max_examples=150, deadline=None)
def test_nothing_but_a_config_error(text: str) -> None:
    error = None
    try:
        assert isinstance(loads(text), dict)
    except ConfigError as caught:
        error = caught
    assert error is None or str(error).startswith("text")


@given(st.lists(pieces, max_size=20).map("".join) | st.binary(max_size=40).map(lambda raw: raw.hex()))
@settings(max_examples=40, deadline=None)
def test_any_source_text(text: str) -> None:
    with contextlib.suppress(ConfigError):
        load(text)


BLOCKS = (
    *("zero_optimization", "optimizer", "scheduler", "bf16", "fp16", "aio"),
    *("train_batch_size", "gradient_clipping"),
)
NAMES = (
    "stage",
    "type",
    "params",
    "enabled",
    "offload_optimizer",
    "device",
    "lr",
    "betas",
    "loss_scale",
    "_x",
)
anything = st.recursive(
    leaves | st.sampled_from(["auto", "AdamW", "cpu", 5e8, 3]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(BLOCKS), anything, max_size=4), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_resolving_fails_with_a_config_error_only(value: dict[str, Any], world_size: int) -> None:
    if not _finite(value):
        return
    try:
        config = resolve(load(value), world_size=world_size)
    except ConfigError as error:
        complete = bool(error.path and error.rule and error.way_out)
    else:
        complete = True
        batch = config.batch
        product = batch.micro_batch_size * batch.gradient_accumulation_steps * world_size
        assert batch.train_batch_size == product
    assert complete


def _finite(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def _tokens(text: str) -> list[str]:
    """Return the tokens of compact JSON between which noise may stand."""
    found, inside, start = [], False, 0
    for index, character in enumerate(text):
        if character == '"' and not _escaped(text, index):
            inside = not inside
        if not inside and character in '{}[],:" ':
            found.append(text[start : index + 1])
            start = index + 1
    return [*found, text[start:]]


def _escaped(text: str, index: int) -> bool:
    slashes = len(text[:index]) - len(text[:index].rstrip("\\"))
    return slashes % 2 == 1

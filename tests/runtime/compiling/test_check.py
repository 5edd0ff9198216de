"""Refusals of what cannot be compiled, before anything is sharded, with the way out."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.forkserver import in_new_interpreter
from tests.support.free_form import config
from tests.support.ranks import run_ranks
from tests.support.tiny_models import TinyGPT
from zerotrain.contract.config import ConfigError

pytestmark = pytest.mark.ranks


def refusal(compiles: str, environ: dict[str, str], block: dict[str, Any]) -> str:
    """Return the error of `initialize`; `compiles` names what the caller compiles before."""
    os.environ.update(environ)
    model: Any = TinyGPT(layers=1)
    if compiles == "a block":
        model.blocks[0].compile(backend="eager")
    elif compiles == "the model":
        model = torch.compile(model, backend="eager")
    with pytest.raises(ConfigError) as raised:
        zt.initialize(model=model, config=config(3, compile={"enabled": True, **block}))
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    return str(raised.value)


def test_an_image_without_a_compiler(tmp_path: Any) -> None:
    environ = {"CXX": str(tmp_path / "g++"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    text = in_new_interpreter(refusal, "", environ, {})  # torch reads CXX when its compiler is imported
    assert text.startswith("compile.backend: cannot compile on this machine (InvalidCxxCompiler:")
    for part in ("needs a C++ compiler (g++, or what CXX names)", "'inductor'", "compile.enabled to false"):
        assert part in text


@pytest.mark.parametrize(
    ("compiles", "block", "words", "way_out"),
    [
        ("", {"backend": "inductr"}, "backend: is refused by torch.compile (InvalidBackend", "aot_eager"),
        ("", {"options": {"max_autotun": True}}, "options: is refused by torch.compile", "compile.mode"),
        ("a block", {}, "enabled: needs a model of which nothing is compiled; 'blocks.0' is", "Remove"),
        ("the model", {}, "enabled: needs a model of which nothing is compiled; 'the model' is", "Remove"),
    ],
)
def test_what_torch_or_the_caller_forbids(
    compiles: str, block: dict[str, Any], words: str, way_out: str
) -> None:
    (text,) = run_ranks(1, refusal, compiles, {}, block)
    assert text.startswith(f"compile.{words}")
    assert way_out in text

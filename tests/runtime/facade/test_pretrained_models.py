"""Folders of Llama, Qwen2, Qwen3, Mistral and GPT-2 give transformers' logits, also without the library."""

from __future__ import annotations

import importlib.abc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zerotrain.runtime as zt
from tests.support.hf_folders import CASES, model_of, save, token_ids
from zerotrain.runtime.activation import kept as kept_inputs
from zerotrain.runtime.activation.kept import Kept
from zerotrain.runtime.activation.settings import Settings, adopt
from zerotrain.runtime.models.huggingface import recompute_activations

pytestmark = pytest.mark.unit


def logits_of(folder: Path, implementation: str, **inputs: torch.Tensor) -> torch.Tensor:
    model = zt.materialize(zt.load_pretrained(folder, implementation=implementation)).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(**inputs).logits
    return logits


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_librarys(case: str, tmp_path: Path) -> None:
    original = save(case, tmp_path)
    ids = token_ids()
    with torch.no_grad():
        expected = original(input_ids=ids).logits
    torch.testing.assert_close(
        logits_of(tmp_path, "zerotrain", input_ids=ids), expected, rtol=1e-4, atol=2e-5
    )
    assert torch.equal(logits_of(tmp_path, "transformers", input_ids=ids), expected)


@pytest.mark.parametrize("case", ["qwen2 sliding", "gpt2"])
def test_padding_changes_nothing_for_tokens(case: str, tmp_path: Path) -> None:
    original = save(case, tmp_path)
    mask = torch.ones(2, 24, dtype=torch.int64)
    mask[0, :6] = 0
    mask[1, 20:] = 0
    inputs = {"input_ids": token_ids(), "attention_mask": mask}
    with torch.no_grad():
        expected = original(**inputs).logits
    found = logits_of(tmp_path, "zerotrain", **inputs)
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=2e-5)


def test_the_loss_is_the_librarys(tmp_path: Path) -> None:
    original = save("qwen3", tmp_path)
    ids = token_ids()
    labels = ids.masked_fill(ids < 20, -100)
    model = zt.materialize(zt.load_pretrained(tmp_path, implementation="zerotrain"))
    torch.testing.assert_close(
        model(input_ids=ids, labels=labels).loss, original(input_ids=ids, labels=labels).loss
    )


def test_names_are_the_librarys(tmp_path: Path) -> None:
    for case in ("llama tied", "qwen3", "gpt2"):
        model_of(case).save_pretrained(tmp_path)
        own, library = (
            zt.load_pretrained(tmp_path, implementation=kind) for kind in ("zerotrain", "transformers")
        )
        assert {name: value.shape for name, value in own.state_dict().items()} == {
            name: value.shape for name, value in library.state_dict().items()
        }
        assert all(parameter.is_meta for parameter in own.parameters())


class HideTransformers(importlib.abc.MetaPathFinder):
    """A finder that hides the library, as on a worker without it."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname.partition(".")[0] == "transformers":
            raise ModuleNotFoundError("No module named 'transformers'", name="transformers")


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = save("llama", tmp_path)
    ids = token_ids()
    with torch.no_grad():
        expected = original(input_ids=ids).logits
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [HideTransformers(), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError):
        import transformers  # noqa: F401
    torch.testing.assert_close(logits_of(tmp_path, "auto", input_ids=ids), expected, rtol=1e-4, atol=2e-5)
    with pytest.raises(ValueError, match="needs the transformers library"):
        zt.load_pretrained(tmp_path, implementation="transformers")


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama", {"model_type": "mamba"}, "model_type 'mamba'"),
        ("llama", {"hidden_size": None}, "hidden_size|int"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope' is not supported"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "need 'factor'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 0}},
            r"rope_parameters\.factor must be positive",
        ),
        ("llama", {"rope_parameters": "x"}, "no llama model can be built"),
        ("llama", {"hidden_size": -32}, "hidden_size must be positive; got -32"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
        ("llama", {"hidden_act": "xielu"}, "activation 'xielu'"),
        ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn"),
    ],
)
def test_what_is_not_supported_is_named(
    family: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save(family, tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    with pytest.raises(ValueError, match=message):
        zt.load_pretrained(tmp_path, implementation="zerotrain")


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Kept]]:
    """Collect the inputs of recomputed blocks that are kept elsewhere."""
    found: list[Kept] = []

    class Seen(Kept):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            found.append(self)

    monkeypatch.setattr(kept_inputs, "Kept", Seen)
    yield found
    adopt(Settings())


@pytest.mark.parametrize("in_host_memory", [False, True])
@pytest.mark.parametrize("implementation", ["zerotrain", "transformers"])
@pytest.mark.parametrize("case", ["llama", "qwen3", "gpt2"])
def test_recomputing_activations_changes_no_gradient(
    case: str, implementation: str, in_host_memory: bool, kept: list[Kept], tmp_path: Path
) -> None:
    """Dropout is included. On request a block's input goes to host memory, but nothing that blocks share."""
    save(case, tmp_path)
    zt.configure_checkpointing(checkpoint_in_cpu=in_host_memory)
    plain, recomputed = (
        zt.materialize(zt.load_pretrained(tmp_path, implementation=implementation)).train() for _ in range(2)
    )
    recompute_activations(recomputed)
    for model in (plain, recomputed):
        torch.manual_seed(2)
        logits = model(input_ids=token_ids()).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), token_ids().flatten())
        loss.backward()  # type: ignore[no-untyped-call]
    for one, other in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
    width = 2 * 24 * 32
    stored = [(held._slot.tensor.device.type, held._slot.tensor.numel()) for held in kept]
    assert stored == ([("cpu", width)] * 3 if in_host_memory else [])

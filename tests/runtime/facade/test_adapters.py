"""Adapters of PEFT are saved without gathering the base model, and load in plain PEFT."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import zerotrain.runtime as zt
from tests.support.hf_folders import model_of, token_ids
from tests.support.ranks import run_ranks
from tests.support.tiers import with_slow_rows
from tests.support.training import world
from tests.support.wrappers import compiled
from zerotrain.runtime.zero.layout import LayoutError
from zerotrain.runtime.zero.ledger import MemoryKind
from zerotrain.runtime.zero.names import unwrapped

pytestmark = pytest.mark.ranks

LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}


def adapter_configs(kind: str) -> list[Any]:
    """Return configurations by adapter; the first one is called "default", the next "second"."""
    import peft

    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], **LORA)
    made: dict[str, list[Any]] = {
        "lora": [lora],
        "all linear": [peft.LoraConfig(target_modules="all-linear", **LORA)],
        "dora": [peft.LoraConfig(target_modules=["q_proj"], use_dora=True, **LORA)],
        "saved modules": [
            peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"], **LORA)
        ],
        "embedding": [peft.LoraConfig(target_modules=["embed_tokens", "q_proj"], **LORA)],
        "ia3": [
            peft.IA3Config(
                target_modules=["k_proj", "down_proj"],
                feedforward_modules=["down_proj"],
                task_type="CAUSAL_LM",
            )
        ],
        "two": [lora, peft.LoraConfig(target_modules=["o_proj"], modules_to_save=["lm_head"], **LORA)],
        "prompt": [peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)],
        "prefix": [peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)],
    }
    return made[kind]


KINDS = ("lora", "all linear", "dora", "saved modules", "embedding", "ia3", "two", "prompt", "prefix")
PROMPTS = ("prompt", "prefix")
"""Kinds for which PEFT reads the model instead of the state dict that it gets."""


def base(case: str) -> Any:
    return model_of(case).train()


def adapted(case: str, kind: str) -> Any:
    import peft

    first, *others = adapter_configs(kind)
    model: Any = peft.get_peft_model(base(case), first)
    torch.manual_seed(1)
    for config in others:
        model.add_adapter("second", config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def config(stage: int, dtype: str = "fp32") -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        **({} if dtype == "fp32" else {dtype: {"enabled": True}}),
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }


def logits_of(model: Any) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        values: torch.Tensor = model.eval()(input_ids=token_ids(batch=1)).logits
    return values.float().numpy()


def trained(case: str, kind: str, stage: int) -> tuple[Any, Any]:
    model = adapted(case, kind)
    engine, *_ = zt.initialize(model=model, config=config(stage))
    ids = token_ids(batch=world()[1])[world()[0] :][:1]
    for _ in range(2):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    return engine, model


def saved(folder: str, case: str, stage: int, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Save the adapters of every kind in both ways; return the logits of each, by kind and adapter."""
    found: dict[str, Any] = {}
    for kind in kinds:
        engine, model = trained(case, kind, stage)
        if kind not in PROMPTS:
            state = engine.module_state_dict(exclude_frozen_parameters=True)
            if world()[0] == 0:
                model.save_pretrained(f"{folder}/{kind}/peft", state_dict=state)
        engine.save_16bit_model(f"{folder}/{kind}/engine", exclude_frozen_parameters=True)
        with zt.full_parameters(model):
            for adapter in model.peft_config:
                if kind == "two":
                    model.set_adapter(adapter)
                found[f"{kind}/{adapter}"] = logits_of(model)
        engine.close()
    return found


RUNS = {
    "llama, stage 3": ("llama", 3, KINDS),
    "llama tied, stage 3": ("llama tied", 3, ("lora", "saved modules", "embedding")),
    "llama tied, stage 2": ("llama tied", 2, ("lora", "saved modules", "embedding")),
}


def everything(folder: str) -> dict[str, Any]:
    """Run everything that needs ranks at once, as the libraries load slowly."""
    return {
        **{name: saved(f"{folder}/{name}", *run) for name, run in RUNS.items()},
        "counted": counted(),
        "whole": whole_model(f"{folder}/whole"),
        "masters": in_other_precision(f"{folder}/masters"),
        "compiled": wrapped(f"{folder}/compiled", compiled),
        "recomputed": wrapped(f"{folder}/recomputed", checkpoint_wrapper),
    }


def whole_model(folder: str) -> np.ndarray[Any, Any]:
    """Save a model with tied weights and without adapters by transformers from its whole state dict."""
    model = base("llama tied")
    engine, *_ = zt.initialize(model=model, config=config(3))
    state = engine.module_state_dict()
    if world()[0] == 0:
        model.save_pretrained(folder, state_dict=state)
    with zt.full_parameters(model):
        logits = logits_of(model)
    engine.close()
    return logits


def test_transformers_stores_tied_weights_of_a_whole_state_once(found: dict[str, Any], folder: Path) -> None:
    import transformers

    there = folder / "whole"
    names = load_file(there / "model.safetensors").keys()
    assert len(names) == len(list(base("llama tied").parameters()))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(there)
    assert np.array_equal(logits_of(loaded), found["whole"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    first: dict[str, Any] = run_ranks(2, everything, str(folder))[0]
    return first


def reloaded(case: str, folder: Path) -> Any:
    import peft

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing adapter keys")
        return peft.PeftModel.from_pretrained(base(case), str(folder))


@pytest.mark.parametrize("run", RUNS)
def test_plain_peft_loads_every_kind_of_adapter(run: str, found: dict[str, Any], folder: Path) -> None:
    case, _, kinds = RUNS[run]
    assert len(found[run]) == len(kinds) + ("two" in kinds)
    for name, logits in found[run].items():
        kind, adapter = name.split("/")
        for way in ("engine",) if kind in PROMPTS else ("engine", "peft"):
            there = folder / run / kind / way
            model = reloaded(case, there if adapter == "default" else there / adapter)
            assert np.abs(logits_of(model) - logits).max() <= 1e-5, (name, way)


def counted() -> dict[str, Any]:
    """Count the gathers at stage 3 for the adapter, and then for the whole model."""
    engine, model = trained("llama", "saved modules", 3)
    trained_names = {name for name, each in model.named_parameters() if each.requires_grad}
    kept = trained_names | {name for name, _ in model.named_buffers()}
    gathers: Counter[str] = Counter()
    for unit in engine.core.units:
        unit.start_gather = counting(gathers, unit.name, unit.start_gather)
    found: dict[str, Any] = {
        "trained": sorted(unit.name for unit in engine.core.units if unit.layout.trainable),
        "all": sorted(unit.name for unit in engine.core.units),
    }
    for what, exclude in (("adapter", True), ("whole", False)):
        gathers.clear()
        engine.memory.reset_peak()
        names = set(engine.module_state_dict(exclude_frozen_parameters=exclude))
        largest = max(unit.layout.num_bytes for unit in engine.core.units if unit.name in gathers)
        found[what] = {
            "gathered": sorted(gathers.elements()),
            "beyond one unit": engine.memory.peak_bytes(MemoryKind.GATHERED) - largest,
            "not asked for": sorted(names - kept) if exclude else [],
            "missing": sorted(trained_names - names),
        }
    engine.close()
    return found


def counting(gathers: Counter[str], name: str, gather: Any) -> Any:
    def count(**options: Any) -> None:
        gathers[name] += 1
        gather(**options)

    return count


def test_the_base_is_not_gathered(found: dict[str, Any]) -> None:
    """No two units are whole at once, even when the whole model is saved."""
    counts = found["counted"]
    assert len(counts["trained"]) < len(counts["all"])
    for what, units in (("adapter", counts["trained"]), ("whole", counts["all"])):
        assert counts[what]["gathered"] == units, "each once"
        assert counts[what]["beyond one unit"] <= 0
        assert (counts[what]["not asked for"], counts[what]["missing"]) == ([], [])


def wrapped(folder: str, wrap: Callable[[nn.Module], Any]) -> dict[str, Any]:
    """Save the adapter of a model whose blocks are compiled or recomputed by wrappers."""
    model = adapted("llama", "saved modules")
    layers = model.get_base_model().model.layers
    for index in range(len(layers)):
        layers[index] = wrap(layers[index])
    engine, *_ = zt.initialize(model=model, config=config(3))
    engine.save_16bit_model(folder, exclude_frozen_parameters=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.module_state_dict(exclude_frozen_parameters=True)
    with zt.full_parameters(model), unwrapped(model):
        logits = logits_of(model)
    engine.close()
    return {"logits": logits, "said": [str(each.message) for each in caught]}


@pytest.mark.parametrize("way", ["compiled", "recomputed"])
def test_blocks_may_be_wrapped(way: str, found: dict[str, Any], folder: Path) -> None:
    names = list(load_file(folder / way / "adapter_model.safetensors"))
    assert not [name for name in names if "_orig_mod" in name or "_checkpoint_wrapped" in name]
    logits = logits_of(reloaded("llama", folder / way))
    assert np.abs(logits - found[way]["logits"]).max() <= 1e-5
    way_out = "save_16bit_model(folder, exclude_frozen_parameters=True)"
    assert any(way_out in text for text in found[way]["said"])


def in_other_precision(folder: str) -> dict[str, np.ndarray[Any, Any]]:
    model = adapted("llama", "lora").bfloat16()
    engine, *_ = zt.initialize(model=model, config=config(3, "bf16"))
    ids = token_ids(batch=1)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    if world()[0] == 0:
        Path(folder).mkdir()
        Path(folder, "README.md").write_text("mine")
    engine.save_16bit_model(folder, exclude_frozen_parameters=True, dtype="fp32")
    named = {name: each for name, each in model.named_parameters() if each.requires_grad}
    masters = {name: zt.get_full_fp32(each).numpy() for name, each in named.items()}
    engine.close()
    return masters


def test_masters_are_written_on_request_and_other_files_stay(found: dict[str, Any], folder: Path) -> None:
    stored = load_file(folder / "masters" / "adapter_model.safetensors")
    assert len(stored) == len(found["masters"])
    for name, value in found["masters"].items():
        assert np.array_equal(stored[name.replace(".default", "")].numpy(), value), name
    assert (folder / "masters" / "README.md").read_text() == "mine"
    assert not list((folder / "masters").glob(".tmp*"))
    trained_alone = load_file(folder / "masters" / "model.safetensors")
    assert trained_alone.keys() == found["masters"].keys(), "under the model's own names"


def detached() -> list[str]:
    """Return what a script can read from a state dict at stage 3."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    engine, *_ = zt.initialize(model=model, config=config(3))
    state = model.state_dict()
    texts = [*state, str(tuple(state["0.weight"].shape)), repr(state["0.weight"])]
    try:
        state["1.bias"].sum()
    except zt.ParameterSharded as error:
        texts.append(error.fqn)
    engine.close()
    return texts


def test_keys_of_a_sharded_state_dict_can_be_read_and_values_not() -> None:
    keys = ["0.weight", "0.bias", "1.weight", "1.bias"]
    texts = run_ranks(2, detached)[0]
    assert texts[:5] == [*keys, "(8, 8)"]
    assert "values on other ranks" in texts[5]
    assert texts[6:] == ["1.bias"]


def added_late(stage: int) -> tuple[list[str], bool]:
    """Add an adapter while an engine trains another; return the errors, and whether training goes on with
    the first adapter."""
    import peft

    engine, model = trained("llama", "lora", stage)
    model.add_adapter("late", peft.LoraConfig(target_modules=["q_proj", "o_proj"], **LORA))
    model.set_adapter("late")
    ids = token_ids(batch=1)
    errors = []
    for call in (lambda: engine(input_ids=ids, labels=ids), engine.module_state_dict):
        try:
            call()
        except LayoutError as error:
            errors.append(str(error))
    model.set_adapter("default")
    losses = []
    for _ in range(3):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.close()
    return errors, losses[-1] < losses[0]


@pytest.mark.parametrize("stage", with_slow_rows([1, 3], quick=[3]))
def test_an_adapter_that_is_added_late_is_named_with_the_way_out(stage: int) -> None:
    for errors, trains in run_ranks(2, added_late, stage):
        assert len(errors) == 2
        assert trains
        for error in errors:
            assert "late" in error
            assert "were added to the model after initialize" in error

"""A model or adapter at stage 3 that a script saves by its own `save_pretrained` is whole in the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zerotrain.runtime as zt
from tests.support import hf_families
from tests.support.ranks import run_ranks
from tests.support.training import world
from zerotrain.runtime.weights.whole import whole_state

pytestmark = pytest.mark.ranks

FAMILY = "llama tied"


def trained(model: Any) -> Any:
    engine, *_ = zt.initialize(model=model, config=hf_families.config(world()[1]))
    batch = torch.arange(12).view(2, 6)[world()[0] :][:1]
    engine.backward(engine(input_ids=batch, labels=batch).loss)
    engine.step()
    return engine


def saves(folder: str, source: str) -> tuple[list[list[str]], set[str]]:
    """Save a model, a part of it and an adapter; return the names in each folder that differ in value, and
    the devices of what this rank gathered."""
    hf_families.use_stage_3()
    import peft
    from safetensors.torch import load_file

    from zerotrain.compat.libraries.mends import saving

    is_first = world()[0] == 0
    found: list[list[str]] = []
    devices: set[str] = set()

    def gathered(*args: Any, **options: Any) -> dict[str, Any]:
        state = whole_state(*args, **options)
        devices.update(value.device.type for value in state.values())
        return state

    vars(saving)["whole_state"] = gathered

    def compare(engine: Any, saved: Any, name: str, prefix: str = "", **options: Any) -> None:
        there = Path(folder) / name
        saved.save_pretrained(there, is_main_process=is_first)
        state = engine.module_state_dict(**options)
        if is_first:
            file = next(there.glob("*.safetensors"))
            wanted = {key.replace(".default", ""): value for key, value in state.items()}
            stored = load_file(file)
            found.append(
                hf_families.differing(stored, {key: wanted[prefix + key] for key in stored})
                + ([] if stored else ["nothing"])
            )

    with hf_families.stage_3(world()[1]):
        model = hf_families.class_of(FAMILY).from_pretrained(source)
        engine = trained(model)
        compare(engine, model, "model")
        compare(engine, model.model, "part", prefix="model.")
        with pytest.raises(RuntimeError, match="on every rank, with is_main_process="):
            model.save_pretrained(Path(folder) / "alone")  # perhaps on this rank alone
        with zt.full_parameters(model):  # rank 0 alone may save then
            if is_first:
                model.save_pretrained(Path(folder) / "gathered")
        engine.close()
        lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        adapted = peft.get_peft_model(hf_families.class_of(FAMILY).from_pretrained(source), lora)
        engine = trained(adapted)
        compare(engine, adapted, "adapter", exclude_frozen_parameters=True)
        engine.close()
    return found, devices


def test_a_model_saved_by_its_own_method_is_whole(tmp_path: Path) -> None:
    hf_families.save(FAMILY, tmp_path / "source")
    (found, devices), (_, others) = run_ranks(2, saves, str(tmp_path), str(tmp_path / "source"))
    assert found == [[], [], []]
    assert devices == {"cpu"}
    assert others == {"meta"}, "a rank that writes nothing held the weights"
    import transformers

    for name in ("model", "gathered"):
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        _, info = load(tmp_path / name, output_loading_info=True)
        assert not any(info.values()), name

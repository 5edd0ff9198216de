"""`zerotrain checkpoint export` and `zerotrain zero-to-fp32` on checkpoints of several ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import zerotrain.runtime as zt
from tests.support import resident
from tests.support.hf_folders import save, token_ids
from tests.support.ranks import run_ranks
from tests.support.tiers import with_slow_rows
from tests.support.training import whole_parameters, world
from zerotrain.cli.errors import CliError
from zerotrain.cli.main import app
from zerotrain.runtime.weights.checkpoint_export import Request, export_checkpoint

pytestmark = pytest.mark.ranks


def command(*arguments: object) -> str:
    """Return the output of a command that must succeed."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None:
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def checkpoint(base: str, folder: str, stage: int) -> dict[str, np.ndarray[Any, Any]]:
    """Save two checkpoints of a model in training, the second after a step; return its parameters after that
    step.
    """
    rank, world_size = world()
    config = {
        "train_batch_size": world_size,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    model = zt.load_pretrained(base, implementation="zerotrain")
    model.get_parameter("model.norm.weight").requires_grad = False
    engine, *_ = zt.initialize(model=model, config=config)
    engine.save_checkpoint(folder, tag="first")
    ids = token_ids(batch=world_size)[rank : rank + 1]
    engine.backward(engine(ids, labels=ids).loss)
    engine.step()
    engine.save_checkpoint(folder)
    with zt.full_parameters(model):
        found = whole_parameters(model)
    engine.close()
    return found


@pytest.mark.parametrize("stage", with_slow_rows([1, 3], quick=[3]))
def test_both_commands_write_what_was_trained(stage: int, tmp_path: Path) -> None:
    import transformers

    base, checkpoints = tmp_path / "base", tmp_path / "checkpoints"
    original = save("llama tied", base)
    masters = run_ranks(3, checkpoint, str(base), str(checkpoints), stage)[0]
    output = command(
        "checkpoint", "export", checkpoints, tmp_path / "bf16", "--model", base, "--max-shard-size", "30KB"
    )
    assert re.search(r"29 tensors, \d+ bytes in bf16, step 1 of .*step-0000000001", output)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bf16")
    assert loaded.dtype is torch.bfloat16
    for name, value in loaded.named_parameters():
        assert torch.equal(value, torch.from_numpy(masters[name]).bfloat16()), name
    output = command("zero-to-fp32", checkpoints, tmp_path / "fp32.safetensors")
    whole = load_file(tmp_path / "fp32.safetensors")
    assert whole.keys() == {*masters, "lm_head.weight"}
    masters["lm_head.weight"] = masters["model.embed_tokens.weight"]
    assert all(np.array_equal(value.numpy(), masters[name]) for name, value in whole.items())
    command("zero-to-fp32", checkpoints, tmp_path / "first", "--tag", "first", "--exclude-frozen-parameters")
    first = load_file(tmp_path / "first" / "model.safetensors")
    assert whole.keys() - first.keys() == {"model.norm.weight"}
    assert all(torch.equal(first[name], original.state_dict()[name]) for name in first)


def test_what_cannot_be_exported_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="holds no whole checkpoint"):
        command("export", tmp_path, tmp_path / "out")
    (tmp_path / "ds" / "step1").mkdir(parents=True)
    (tmp_path / "ds" / "step1" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    with pytest.raises(CliError, match="run `zerotrain checkpoint import` first"):
        command("zero-to-fp32", tmp_path / "ds", tmp_path / "out")
    with pytest.raises(CliError, match="pickled weights are not written"):
        command("zero-to-fp32", tmp_path, tmp_path / "pytorch_model.bin")
    with pytest.raises(CliError, match="holds no checkpoint 'gone'; it holds: none"):
        command("export", tmp_path, tmp_path / "out", "--tag", "gone")
    with pytest.raises(CliError, match="--dtype must be bf16, fp16 or fp32"):
        command("export", tmp_path, tmp_path / "out", "--dtype", "int8")
    with pytest.raises(CliError, match=r"has no config\.json"):
        command("export", tmp_path, tmp_path / "out", "--model", tmp_path)
    with pytest.raises(CliError, match="must be a size"):
        command("export", tmp_path, tmp_path / "out", "--max-shard-size", "huge")
    assert not (tmp_path / "out").exists()


def checkpoint_of_a_large_model(folder: str) -> None:
    with zt.init_context(seed=0):
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(16)))
    engine, *_ = zt.initialize(model=model, config={"train_batch_size": 2, "zero_optimization": {"stage": 3}})
    engine.save_checkpoint(folder)
    engine.close()


def grown_by_export(folder: str) -> int:
    """Return the growth of resident memory while 67 MB are exported, after a first export."""
    request = Request(
        checkpoint=Path(folder),
        output=Path(folder, "out"),
        dtype=torch.float16,
        max_bytes=1 << 30,
    )
    export_checkpoint(request)
    before = resident.reset_peak()
    export_checkpoint(request)
    return resident.peak_bytes() - before


def test_memory_is_that_of_a_tile(tmp_path: Path) -> None:
    run_ranks(2, checkpoint_of_a_large_model, str(tmp_path))
    grown = run_ranks(1, grown_by_export, str(tmp_path))[0]
    assert grown <= 20 << 20, f"{grown / 1e6:.1f} MB for 67 MB of weights"


def test_a_damaged_checkpoint_leaves_the_output_alone(tmp_path: Path) -> None:
    run_ranks(2, checkpoint_of_a_large_model, str(tmp_path))
    command("export", tmp_path, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    file = next(tmp_path.glob("step-*/rank-00001*"))
    data = bytearray(file.read_bytes())
    data[-4096] ^= 1
    file.write_bytes(data)
    with pytest.raises(CliError, match=r"is damaged: rank-00001.* does not have the digest"):
        command("export", tmp_path, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]

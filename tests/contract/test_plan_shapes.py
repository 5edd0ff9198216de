"""The planner's view of a model equals the model that the trainer builds: units, and what forward keeps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from zerotrain.contract.config import EngineConfig, load, resolve
from zerotrain.contract.memory import small_parameters
from zerotrain.contract.planner import (
    ModelShape,
    ShapeError,
    activations,
    flops_per_token,
    gpt_shape,
    guessed_shape,
    read_shape,
    shape_of_config,
)
from zerotrain.contract.train_spec import GptSpec
from zerotrain.runtime.activation.arena import ActivationArena
from zerotrain.runtime.activation.settings import Settings, _Process
from zerotrain.runtime.models.factory import _next_token_loss
from zerotrain.runtime.models.gpt import Gpt
from zerotrain.runtime.models.huggingface import build_model
from zerotrain.runtime.zero.plan import SmallParameters, plan_layout

pytestmark = pytest.mark.unit


TOKENS = 64
DECODER: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": TOKENS,
    "sliding_window": None,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 512,
    "n_embd": 128,
    "n_head": 4,
    "n_layer": 3,
    "n_positions": TOKENS,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    **{family: {**DECODER, "model_type": family} for family in ("llama", "qwen2", "qwen3", "mistral")},
    "tied": {**DECODER, "model_type": "llama", "tie_word_embeddings": True},
    "all heads": {**DECODER, "model_type": "llama", "num_key_value_heads": 4},
    "biases": {**DECODER, "model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "defaults": {
        key: value
        for key, value in {**DECODER, "model_type": "llama"}.items()
        if key not in ("head_dim", "num_key_value_heads")
    },
    "wide": {**DECODER, "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 1},
    "gpt2": GPT2,
    "gpt2, own head": {**GPT2, "tie_word_embeddings": False, "n_inner": 320},
}
GPT = GptSpec(d_model=128, layers=3, heads=4, context=TOKENS)


def configured(world_size: int = 1, **more: Any) -> EngineConfig:
    return resolve(load({"train_micro_batch_size_per_gpu": 2, **more}), world_size=world_size)


@pytest.mark.parametrize("name", CONFIGS)
def test_units_of_a_folder(name: str) -> None:
    raw = CONFIGS[name]
    with torch.device("meta"):
        model = build_model(raw)
    shape = shape_of_config(raw)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    for world_size, zero in (
        (1, {"stage": 3}),
        (3, {"stage": 2}),
        (2, {"stage": 3}),
        (
            4,
            {"stage": 3, "stage3_param_persistence_threshold": 20_000, "model_persistence_threshold": 50_000},
        ),
        (2, {"stage": 3, "stage3_module_granularity_threshold": 70_000}),
    ):
        config = configured(world_size, zero_optimization=zero)
        largest, budget = small_parameters(config)
        layout = plan_layout(
            model,
            world_size=world_size,
            compute_dtype="bf16",
            min_unit_numel=config.zero.module_granularity_threshold or 1024,
            small=SmallParameters(numel=largest, budget=budget),
        )
        assert [(each.name, each.numel, each.padded_numel, not each.module) for each in layout.units] == [
            (each.name, each.numel, each.padded_numel, each.whole_pass)
            for each in shape.units(config, on_host=False)
        ], zero


def kept_bytes(model: nn.Module, run: Callable[[], torch.Tensor]) -> int:
    """Return the bytes that autograd keeps of a forward pass, without weights, counting each storage once."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    found: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage  # kept alive, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return sum(storage.nbytes() for storage in found.values())


def trained(shape_name: str) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor], ModelShape]:
    torch.manual_seed(0)
    ids = torch.randint(0, 256, (2, TOKENS + 1))
    if shape_name == "gpt":
        return Gpt(GPT), lambda model: model(ids), gpt_shape(GPT, source="")
    raw = CONFIGS[shape_name]
    return build_model(raw), lambda model: _next_token_loss(model, ids), shape_of_config(raw)


AUTOCAST: dict[str, Any] = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("name", ["gpt", "llama", "all heads", "biases", "tied", "qwen3", "gpt2"])
def test_activations_of_a_forward_pass(name: str, dtype: str) -> None:
    """The estimate is exact but for what does not grow with the model: a loss, positions, a norm's fp32
    statistics.
    """
    model, loss, shape = trained(name)
    if dtype == "bf16":
        model = model.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
        counted = kept_bytes(model, lambda: loss(model))
    more = AUTOCAST if dtype == "autocast" else {"bf16": {"enabled": dtype == "bf16"}}
    assert counted == pytest.approx(activations(shape, configured(**more)).least_bytes, rel=0.002)


def test_recomputed_activations() -> None:
    model, loss, shape = trained("llama")
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    counted = kept_bytes(model, lambda: loss(model))
    found = activations(shape, configured(activation_checkpointing={}))
    # The angles are kept as arguments of the recomputation, which autograd does not see.
    angles = 2 * 32 * TOKENS * 4
    assert counted == pytest.approx(found.least_bytes - angles, rel=0.002)
    assert found.block_work_bytes > found.kept_bytes, "a block is whole again in backward"
    moved = activations(shape, configured(activation_checkpointing={"cpu_checkpointing": True}))
    assert moved.host_bytes == 3 * 2 * TOKENS * 128 * 4
    assert found.kept_bytes - moved.kept_bytes == moved.host_bytes


@pytest.mark.parametrize("number", [None, 2, 3])
@pytest.mark.parametrize("in_host", [False, True])
def test_contiguous_checkpoints_take_whole_buffers(
    number: int | None, in_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, loss, shape = trained("llama")
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    places = {"contiguous_memory_optimization": True, "cpu_checkpointing": in_host}
    config = configured(activation_checkpointing={**places, "number_checkpoints": number})
    arena = ActivationArena(number)
    monkeypatch.setattr(_Process, "settings", Settings.of(config.activation_checkpointing, None))
    monkeypatch.setattr(_Process, "arena", arena)
    loss(model).backward()  # type: ignore[no-untyped-call]
    made = sum(count * numel * dtype.itemsize for (numel, dtype, *_), count in arena._num_made.items())
    inputs = 2 * TOKENS * 128 * 4
    assert made == {None: 8, 2: 4, 3: 3}[number] * inputs
    found = activations(shape, config)
    if in_host:
        assert found.host_bytes == made
    else:
        plain = activations(shape, configured(activation_checkpointing={}))
        assert found.kept_bytes - plain.kept_bytes == made - 3 * inputs


def test_weights_that_autocast_copies_for_recomputed_blocks() -> None:
    """The cache holds a copy of every matrix until forward is over; backward makes a block's copies anew."""
    model, loss, shape = trained("llama")
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    copies = Copies({parameter.shape for parameter in model.parameters() if parameter.ndim == 2})
    with copies:
        with torch.autocast("cpu", torch.bfloat16):
            held = loss(model)
            inside = copies.alive_bytes()
        after = copies.alive_bytes()
    assert held.grad_fn is not None
    found = activations(shape, configured(**AUTOCAST, activation_checkpointing={}))
    assert (inside - after, after) == (found.cache_bytes, 2 * 512 * 128)
    assert found.forward_bytes - found.least_bytes >= found.head_work_bytes
    whole = activations(shape, configured(**AUTOCAST))
    assert whole.cache_bytes == 0
    plain = activations(shape, configured(activation_checkpointing={}))
    assert plain.kept_bytes == found.kept_bytes, "the residual stream stays fp32"
    assert plain.cache_bytes == 0


class Copies(TorchDispatchMode):
    """Dispatch mode that tracks the live narrow copies of matrices of these shapes."""

    def __init__(self, shapes: set[torch.Size]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shapes = shapes
        self._made: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and made.shape in self._shapes:
            storage = made.untyped_storage()
            self._made.append((StorageWeakRef(storage), storage.nbytes()))  # type: ignore[no-untyped-call]
        return made

    def alive_bytes(self) -> int:
        gone = [bool(storage.expired()) for storage, _ in self._made]  # type: ignore[no-untyped-call]
        return sum(size for (_, size), is_gone in zip(self._made, gone, strict=True) if not is_gone)


def test_known_models() -> None:
    """Sizes as the models' authors give them."""
    llama3 = {
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
    }
    small = {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32}
    large = {
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    }
    assert shape_of_config({**llama3, **small}).parameters == 8_030_261_248
    assert shape_of_config({**llama3, **large}).parameters == 70_553_706_496
    gpt2 = {"model_type": "gpt2", "vocab_size": 50_257, "n_embd": 768, "n_head": 12, "n_layer": 12}
    assert shape_of_config({**gpt2, "n_positions": 1024}).parameters == 124_439_808


def test_work_of_a_token() -> None:
    """A token takes two operations per weight of a matrix, and causal attention; tables are only looked
    up.
    """
    shape = gpt_shape(GPT, source="")
    looked_up = 256 * 128 + TOKENS * 128
    assert shape.matmul_parameters == shape.parameters - looked_up + 256 * 128
    assert flops_per_token(shape) == 2 * shape.matmul_parameters + 2 * 3 * TOKENS * 128


@pytest.mark.parametrize("parameters", [1, 1_000, 124_439_808, 7_000_000_000, 70_553_706_496, 10**15])
def test_a_guess_has_the_right_size(parameters: int) -> None:
    shape = guessed_shape(parameters)
    assert shape.parameters == parameters
    assert shape.is_guess
    if parameters == 7_000_000_000:
        assert (shape.layers, shape.width) == (33, 4204)


def test_a_context_of_ones_own(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({**DECODER, "model_type": "llama", "max_position_embeddings": 8192})
    )
    assert read_shape(folder).context == 2048
    assert read_shape(folder / "config.json", context=4096).context == 4096
    with pytest.raises(ShapeError, match="context of 9000 exceeds the model's 8192"):
        read_shape(folder, context=9000)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (
            {"model_type": "mamba"},
            "model_type 'mamba' is not one whose sizes are known .*spec.model.parameters",
        ),
        ({"model_type": ["llama"]}, "model_type .* is not one"),
        ({**DECODER, "model_type": "llama", "hidden_size": None}, "hidden_size is missing"),
        ({**DECODER, "model_type": "llama", "hidden_size": "wide"}, "hidden_size must be a whole number"),
        ({**DECODER, "model_type": "llama", "vocab_size": True}, "vocab_size must be a whole number"),
        ({**DECODER, "model_type": "llama", "vocab_size": -5}, "vocab_size must be positive"),
        ({**DECODER, "model_type": "llama", "num_hidden_layers": 0}, "num_hidden_layers must be positive"),
        ({**DECODER, "model_type": "llama", "hidden_size": math.inf}, "hidden_size must be a whole number"),
        ({**DECODER, "model_type": "llama", "head_dim": math.nan}, "head_dim must be a whole number"),
        ({**GPT2, "n_inner": -math.inf}, "n_inner must be a whole number"),
        ({**GPT2, "n_inner": 1.5}, "n_inner must be a whole number"),
        ({**DECODER, "model_type": "llama", "vocab_size": 1e300}, "vocab_size must be positive and below"),
        ({**DECODER, "model_type": "llama", "num_hidden_layers": 10**9}, "num_hidden_layers must be at most"),
        ([], "must hold an object"),
    ],
)
def test_unusable_configurations(raw: Any, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ShapeError, match=words):
        read_shape(tmp_path)


def test_a_number_that_overflows(tmp_path: Path) -> None:
    text = json.dumps({**DECODER, "model_type": "llama"}).replace("352", "1e999")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ShapeError, match="intermediate_size must be a whole number; got inf"):
        read_shape(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\x00"])
def test_files_that_are_no_json(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ShapeError, match=r"is not JSON|is nested more than 64 deep"):
        read_shape(tmp_path)
    with pytest.raises(ShapeError, match="cannot be read"):
        read_shape(tmp_path / "nothing")

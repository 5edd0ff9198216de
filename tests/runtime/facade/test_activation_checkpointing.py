"""Recomputation changes no bit, wherever the inputs of the recomputed parts are kept meanwhile."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

import zerotrain.runtime as zt
from tests.support.free_form import config
from tests.support.ranks import run_ranks
from tests.support.tiers import with_slow_rows
from tests.support.tiny_models import TinyGPT, token_batches
from tests.support.training import world
from zerotrain.contract.train_spec import GptSpec
from zerotrain.runtime.activation import checkpoint as activation_checkpoint
from zerotrain.runtime.activation.arena import ActivationArena
from zerotrain.runtime.activation.kept import Kept, is_dense
from zerotrain.runtime.activation.settings import Settings, adopt, current
from zerotrain.runtime.comm.model_parallel import ModelParallel
from zerotrain.runtime.models.gpt import Gpt

MODES: dict[str, dict[str, Any]] = {
    "in place": {},
    "host": {"cpu_checkpointing": True},
    "contiguous": {"contiguous_memory_optimization": True, "number_checkpoints": 2},
    "both": {"contiguous_memory_optimization": True, "cpu_checkpointing": True},
}


@pytest.fixture(autouse=True)
def fresh_settings() -> Any:
    yield
    adopt(Settings())


class Noisy(TinyGPT):
    """A model with dropout in every block, whose noise recomputation must repeat."""

    def __init__(self) -> None:
        super().__init__(layers=3, tied=True)
        self.recompute = False

    def block(self, block: nn.Module, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(block(hidden), 0.2) * mask

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden, mask = self.embed(tokens), tokens.ne(3).unsqueeze(-1)
        for block in self.blocks:
            if self.recompute:
                hidden = zt.checkpoint_activations(self.block, block, hidden, mask=mask)
            else:
                hidden = self.block(block, hidden, mask)
        logits = self.head(self.norm(hidden)).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def trained(stage: int, block: dict[str, Any] | None, dtype: str) -> dict[str, torch.Tensor]:
    """Return masters after two steps of two micro-batches."""
    extra = {} if block is None else {"activation_checkpointing": block}
    settings = config(stage, gradient_accumulation_steps=2, bf16={"enabled": dtype == "bf16"}, **extra)
    torch.manual_seed(1)
    model = Noisy()
    model.recompute = block is not None
    engine, *_ = zt.initialize(model=model, config=settings)
    torch.manual_seed(world()[0])
    for batch in token_batches(4, size=2, seed=world()[0]):
        engine.backward(engine(*batch))
        engine.step()
    values = {name: zt.get_full_fp32(value) for name, value in model.named_parameters()}
    assert engine.memory.transient_bytes == 0
    engine.close()
    return values


def compare(stages: tuple[int, ...], dtype: str) -> None:
    for stage in stages:
        plain = trained(stage, None, dtype)
        for mode, block in MODES.items():
            if stage < 3 and mode in ("host", "contiguous"):
                continue  # "both" is a mix of them
            for name, value in trained(stage, block, dtype).items():
                assert torch.equal(value, plain[name]), (stage, mode, name)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("stages", "dtype"),
    with_slow_rows([((0, 1, 2, 3), "fp32"), ((3,), "bf16")], quick=[((0, 1, 2, 3), "fp32")]),
)
def test_no_bit_changes_at_any_stage(stages: tuple[int, ...], dtype: str) -> None:
    run_ranks(2, compare, stages, dtype)


def gradients(recompute: bool, width: int = 33) -> list[torch.Tensor]:
    """Return gradients of a part with dropout whose input has its dimensions swapped.

    The inputs are equal on every rank.
    """
    torch.manual_seed(4)
    layer = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.3), nn.Linear(width, width))
    inputs = torch.randn(width, 3, 5).permute(1, 2, 0).requires_grad_()
    hidden = inputs * 2.0
    torch.manual_seed(5)
    for _ in range(2):
        hidden = zt.checkpoint_activations(layer, hidden) if recompute else layer(hidden)
    hidden.square().sum().backward()  # type: ignore[no-untyped-call]
    assert inputs.grad is not None
    return [inputs.grad, *(value.grad for value in layer.parameters() if value.grad is not None)]


class Mpu:
    """A stand-in for `mpu` in which all ranks hold the parts of one replica."""

    def get_model_parallel_group(self) -> Any:
        return dist.group.WORLD

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size()


def partitioned() -> list[int]:
    """Return the elements that this rank kept of an input of 33 * 3 * 5, by way to keep them."""
    plain = gradients(recompute=False)
    sizes = []
    for in_host_memory in (False, True):
        for contiguous in (False, True):
            zt.configure_checkpointing(
                Mpu(),
                partition_activations=True,
                contiguous_checkpointing=contiguous,
                checkpoint_in_cpu=in_host_memory,
            )
            found = gradients(recompute=True)
            assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
            kept = Kept(torch.ones(33, 3, 5), *current())
            sizes.append(kept._slot.tensor.numel())
            assert torch.equal(kept.fetch(), torch.ones(33, 3, 5))
            assert torch.equal(kept.fetch(), torch.ones(33, 3, 5))
    return sizes


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3])
def test_partitioned_inputs_come_back_whole(world_size: int) -> None:
    for sizes in run_ranks(world_size, partitioned):
        assert sizes == [-(-33 * 3 * 5 // world_size)] * 4


@pytest.mark.unit
def test_without_a_group_partitioning_warns_and_keeps_everything() -> None:
    with pytest.warns(UserWarning, match="there is no model-parallel group"):
        zt.configure_checkpointing(partition_activations=True)
    assert not current()[0].moves_inputs
    plain = gradients(recompute=False)
    assert all(torch.equal(a, b) for a, b in zip(gradients(recompute=True), plain, strict=True))
    with pytest.raises(TypeError, match=r"mpu must have a method get_model_parallel_group\(\)"):
        ModelParallel.of(object())


@pytest.mark.unit
def test_every_gpu_of_the_arguments_is_one_whose_random_state_is_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch looks only at positional arguments. The tensors are stand-ins, which need no GPU."""
    seen: list[set[torch.device]] = []

    def record(function: Any, *args: Any, **_: Any) -> None:
        leaves = pytree.tree_leaves(args)
        seen.append({leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_cuda})

    monkeypatch.setattr(activation_checkpoint, "torch_checkpoint", record)
    with FakeTensorMode():
        hidden, mask = torch.empty(2, device="cuda:1"), torch.empty(2, device="cuda:0")
        zt.checkpoint_activations(torch.nn.Identity(), hidden)
        zt.checkpoint_activations(torch.nn.Identity(), hidden=hidden, other={"mask": [mask]})
        zt.checkpoint_activations(torch.nn.Identity(), torch.empty(2))
    assert seen == [{hidden.device}, {hidden.device, mask.device}, set()]


@pytest.mark.unit
def test_the_original_input_is_gone_after_forward() -> None:
    zt.configure_checkpointing(checkpoint_in_cpu=True)
    layer = nn.Linear(64, 64)
    hidden = torch.randn(64, 64, requires_grad=True) * 1.0
    reference = StorageWeakRef(hidden.untyped_storage())  # type: ignore[no-untyped-call]
    kept = StorageWeakRef(hidden.untyped_storage())  # type: ignore[no-untyped-call]
    output = zt.checkpoint_activations(layer, hidden)
    assert not kept.expired()  # type: ignore[no-untyped-call]
    del hidden
    is_gone = reference.expired()  # type: ignore[no-untyped-call]
    assert is_gone, "something still holds the input's memory"
    output.sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.unit
def test_what_needs_no_gradient_is_kept_once_for_all_parts() -> None:
    zt.configure_checkpointing(checkpoint_in_cpu=True)
    layer, angles, seen = nn.Linear(8, 8), torch.randn(4, 8), []

    def part(hidden: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        seen.append(angles)
        out: torch.Tensor = layer(hidden) * angles
        return out

    hidden = torch.randn(4, 8, requires_grad=True) * 1.0
    for _ in range(3):
        hidden = zt.checkpoint_activations(part, hidden, angles=angles)
    hidden.sum().backward()  # type: ignore[no-untyped-call]
    assert len(seen) == 6, "each part runs again in backward"
    assert all(tensor is angles for tensor in seen)


@pytest.mark.unit
def test_slots_lie_side_by_side_and_are_used_again() -> None:
    arena = ActivationArena(3)
    place: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "pinned": False}
    slots = [arena.take(16, **place) for _ in range(3)]
    addresses = [slot.tensor.data_ptr() for slot in slots]
    assert [address - addresses[0] for address in addresses] == [0, 64, 128]
    del slots[1]
    again = arena.take(16, **place)
    assert again.tensor.data_ptr() == addresses[1]
    assert arena.take(16, **place).tensor.data_ptr() not in addresses, "a full buffer gets a second one"
    assert arena.take(9, **place).tensor.numel() == 9


@pytest.mark.unit
@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.ones(2, 3, 4).permute(2, 0, 1), True),
        (torch.ones(1, 3).expand(1, 3), True),
        (torch.ones(4, 4)[:, :2], False),
        (torch.ones(3, 1).expand(3, 4), False),
    ],
)
def test_only_dense_inputs_move(tensor: torch.Tensor, dense: bool) -> None:
    assert is_dense(tensor) is dense
    if dense:
        kept = Kept(tensor, Settings(in_host_memory=True), ActivationArena())
        first, second = kept.fetch(), kept.fetch()
        assert first is tensor
        assert torch.equal(second, tensor)
        assert second.stride() == tensor.stride()


@pytest.mark.unit
def test_autocast_is_as_in_the_first_call() -> None:
    grads = []
    for recompute in (False, True):
        torch.manual_seed(0)
        layer, inputs = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
        zt.configure_checkpointing(checkpoint_in_cpu=True)
        with torch.autocast("cpu", torch.bfloat16):
            output = zt.checkpoint_activations(layer, inputs) if recompute else layer(inputs)
        output.float().square().sum().backward()
        assert layer.weight.grad is not None
        grads.append(layer.weight.grad)
    assert torch.equal(*grads)


@pytest.mark.unit
def test_the_block_of_the_configuration_configures_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    block = {"number_checkpoints": 5, "contiguous_memory_optimization": True, "profile": True}
    model = Gpt(GptSpec(d_model=16, layers=2, heads=2, context=8), checkpoint_activations=True)
    engine, *_ = zt.initialize(model=model, config=config(0, activation_checkpointing=block))
    settings, _ = current()
    assert (settings.contiguous, settings.num_checkpoints, settings.in_host_memory) == (True, 5, False)
    assert zt.checkpointing_is_configured()
    with torch.no_grad():
        engine(torch.ones(1, 5, dtype=torch.int64))
    assert capsys.readouterr().out == "", "without gradients nothing is checkpointed"
    engine.backward(engine(torch.ones(1, 5, dtype=torch.int64)))
    printed = capsys.readouterr().out
    assert printed.count("checkpointed Block: forward") == 2
    assert printed.count("checkpointed Block: recomputation") == 2
    engine.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zt.configure_checkpointing(None, {"train_batch_size": 1, "activation_checkpointing": block})
    assert current()[0].num_checkpoints == 5
    before = current()[1]
    zt.reset_checkpointing()
    assert current()[1] is not before

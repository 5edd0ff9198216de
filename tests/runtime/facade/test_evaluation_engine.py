"""A frozen model gets an engine for evaluation.

It has the same outputs, no memory for training, and checkpoints; training raises with the reason.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zerotrain.runtime as zt
from tests.support.device import worlds
from tests.support.ranks import RankFailed, run_ranks
from tests.support.tiny_models import TinyGPT, token_batches
from tests.support.training import world
from zerotrain.contract.config import ConfigError
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.zero.layout import LayoutError
from zerotrain.runtime.zero.ledger import MemoryKind

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FOR_TRAINING = (
    MemoryKind.PARAMS,
    MemoryKind.GRADS,
    MemoryKind.STATES,
    MemoryKind.HOST_STATES,
    MemoryKind.HOST_GRADS,
    MemoryKind.AUTOGRAD,
    MemoryKind.REDUCE,
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    stage: int
    dtype: str = "fp32"
    params: str = "none"
    """Device to which weights are offloaded."""
    file: str = "policy"
    """"policy" uses the configuration of the model in training; "own" is only for this model."""

    def config(self, spill: str) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage, "stage3_param_persistence_threshold": 40}
        if self.params != "none":
            zero["offload_param"] = {"device": self.params, "nvme_path": spill, "max_in_cpu": 0}
        found: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": self.dtype == "bf16"},
            "fp16": {"enabled": self.dtype == "fp16"},
            "zero_optimization": zero,
        }
        if self.file == "own":
            return found
        zero["offload_optimizer"] = {"device": "cpu"}
        return {
            **found,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "scheduler": {"type": "WarmupLR"},
        }


SETTINGS = (
    *(Setting(stage=stage, dtype=dtype) for stage in (0, 1, 2, 3) for dtype in DTYPES),
    *(Setting(stage=stage, file="own") for stage in (0, 3)),
    *(Setting(stage=3, dtype="bf16", params=params) for params in ("cpu", "nvme")),
)


def frozen(*, seed: int = 7, tied: bool = False) -> TinyGPT:
    torch.manual_seed(seed)
    return TinyGPT(layers=2, tied=tied).requires_grad_(False).eval()


def message_of(call: Any) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def evaluated(setting: Setting, spill: str) -> dict[str, Any]:
    """Return this rank's results of an engine with a frozen model, beside plain torch."""
    rank, _ = world()
    engine, optimizer, _, scheduler = zt.initialize(model=frozen(seed=7 + rank), config=setting.config(spill))
    plain = frozen().to(DTYPES[setting.dtype])
    batches = token_batches(2, size=2, seed=rank)
    with torch.no_grad():
        pairs = [(float(engine(*batch)), float(plain(*batch))) for batch in batches]
    pairs.append((float(engine(*batches[0])), float(plain(*batches[0]))))  # with gradients switched on
    memory, status = engine.memory, engine.memory_status()
    whole = engine.module_state_dict()
    found = {
        "pairs": pairs,
        "given": (optimizer, scheduler, engine.optimizer, engine.lr_scheduler),
        "for training": {str(kind): memory.peak_bytes(kind) for kind in FOR_TRAINING},
        "kept": (
            memory.persistent_bytes + memory.live_bytes(MemoryKind.RING),
            status.planned_persistent_bytes + status.planned_host_bytes,
        ),
        "on disk": (memory.live_bytes(MemoryKind.SPILL), status.planned_disk_bytes),
        "transient": (
            memory.transient_bytes,
            memory.peak_bytes(MemoryKind.GATHERED) <= status.planned_peak_bytes,
        ),
        "whole": all(torch.equal(whole[name], value) for name, value in plain.state_dict().items()),
        "rates": (engine.get_lr(), engine.get_mom()),
        "refusals": [message_of(lambda: engine.backward(torch.zeros(()))), message_of(engine.step)],
    }
    engine.zero_grad()
    engine.train()
    engine.close()
    return found


def evaluate_all(spill: str) -> list[dict[str, Any]]:
    return [evaluated(setting, spill) for setting in SETTINGS]


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "each_transport"), worlds(1, 2), indirect=["each_transport"])
@pytest.mark.usefixtures("each_transport")
def test_it_computes_as_plain_torch_without_memory_for_training(world_size: int, tmp_path: Path) -> None:
    for per_rank in run_ranks(world_size, evaluate_all, str(tmp_path)):
        for setting, found in zip(SETTINGS, per_rank, strict=True):
            what = str(asdict(setting))
            assert all(got == expected for got, expected in found["pairs"]), what
            assert found["given"] == (None, None, None, None), what
            assert not any(found["for training"].values()), (what, found["for training"])
            for name in ("kept", "on disk"):
                counted, planned = found[name]
                assert counted == planned, (what, name)
            assert found["transient"] == (0, True), what
            assert found["whole"], what
            assert found["rates"] == ([], []), what
            for text in found["refusals"]:
                assert "every parameter of the model was frozen" in text, what
                assert "set requires_grad on what should be trained before initialize" in text, what


class Scorer(nn.Module):
    """A module from vectors to scores; a policy's outputs are the inputs of the next model."""

    def __init__(self, seed: int, out: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList([nn.Linear(40, 40), nn.Linear(40, out)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return hidden


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(2, 40, generator=torch.Generator().manual_seed(10 * step + rank))


def objective(policy: Any, reference: Any, reward: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Return a reward with a gradient through the frozen model, and a distance to the frozen reference."""
    answer = policy(hidden)
    with torch.no_grad():
        usual = reference(hidden)
    loss: torch.Tensor = (answer - usual).square().mean() - reward(answer).mean()
    return loss


def three_engines(stage: int) -> list[float]:
    """Return losses of a policy beside a frozen reference and a frozen reward model."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    trained = {**config, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
    policy, *_ = zt.initialize(model=Scorer(1, 40), config=trained)
    reference, *_ = zt.initialize(model=Scorer(1, 40).requires_grad_(False), config=config)
    reward, *given = zt.shard(Scorer(2, 1).requires_grad_(False), config)
    assert given == [None]
    losses = []
    for step in range(4):
        loss = objective(policy, reference, reward, inputs(step, world()[0]))
        policy.backward(loss)
        policy.step()
        losses.append(loss.item())
    assert reference.memory.live_bytes(MemoryKind.GRADS) == 0
    policy.close()
    reference.close()
    return losses


def plain_losses(world_size: int) -> list[list[float]]:
    policy, reference, reward = Scorer(1, 40), Scorer(1, 40), Scorer(2, 1).requires_grad_(False)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
    found = []
    for step in range(4):
        optimizer.zero_grad()
        losses = [objective(policy, reference, reward, inputs(step, rank)) for rank in range(world_size)]
        (sum(losses, torch.zeros(())) / world_size).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found.append([loss.item() for loss in losses])
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_policy_trains_alongside_a_reference_and_a_reward_model(stage: int) -> None:
    expected = plain_losses(2)
    for rank, losses in enumerate(run_ranks(2, three_engines, stage)):
        assert losses == pytest.approx([row[rank] for row in expected], abs=1e-6)


def gradient_of_input(stage: int, dtype: str) -> tuple[list[float], list[float]]:
    engine, *_ = zt.initialize(
        model=Scorer(1, 1).requires_grad_(False), config=Setting(stage=stage, dtype=dtype).config("")
    )
    plain = Scorer(1, 1).requires_grad_(False).to(DTYPES[dtype])
    found = []
    for model in (engine, plain):
        for _ in range(2):  # the second pass must find the same state as the first one
            hidden = inputs(0, world()[0]).to(DTYPES[dtype]).requires_grad_()
            output: Any = model(hidden)
            output.sum().backward()
        assert hidden.grad is not None
        found.append(hidden.grad.float().flatten().tolist())
    assert engine.memory.transient_bytes == 0
    assert not engine.core.has_gradients
    engine.close()
    return found[0], found[1]


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_of_inputs_pass_through(stage: int, dtype: str) -> None:
    for got, expected in run_ranks(2, gradient_of_input, stage, dtype):
        assert got == expected


def losses_of(engine: Engine) -> list[float]:
    engine.eval()
    with torch.no_grad():
        return [float(engine(*batch)) for batch in token_batches(2, size=2)]


def trained_and_saved(folder: str, dtype: str) -> list[float]:
    torch.manual_seed(3)
    engine, *_ = zt.initialize(model=TinyGPT(layers=2), config=Setting(stage=1, dtype=dtype).config(""))
    for batch in token_batches(2, size=2):
        engine.backward(engine(*batch))
        engine.step()
    engine.save_checkpoint(folder)
    found = losses_of(engine)
    engine.close()
    return found


def loaded(folder: str, stage: int, dtype: str, options: dict[str, Any]) -> tuple[list[float], int]:
    engine, *_ = zt.initialize(model=frozen(), config=Setting(stage=stage, dtype=dtype).config(""))
    path, _ = engine.load_checkpoint(folder, **options)
    assert path is not None
    found = losses_of(engine), engine.global_steps
    assert not engine.memory.live_bytes(MemoryKind.STATES)
    engine.save_checkpoint(f"{folder}-again")
    engine.close()
    return found


def loaded_for_training(folder: str) -> None:
    engine, *_ = zt.initialize(model=TinyGPT(layers=2), config=Setting(stage=2).config(""))
    engine.load_checkpoint(folder)


@pytest.mark.ranks
@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16")])
def test_checkpoints_of_a_model_in_training_are_loaded_and_its_own(
    stage: int, dtype: str, tmp_path: Path
) -> None:
    folder = str(tmp_path / "checkpoints")
    expected = run_ranks(2, trained_and_saved, folder, dtype)[0]
    for options, steps in (({"load_module_only": True}, 0), ({}, 2)):
        found = run_ranks(2, loaded, folder, stage, dtype, options)
        assert found == [(expected, steps)] * 2
    # Another number of ranks loads the checkpoint, but no engine that needs moments does.
    assert run_ranks(1, loaded, f"{folder}-again", stage, dtype, {}) == [(expected, 2)]
    with pytest.raises(RankFailed, match=r"was frozen with state.*load_optimizer_states=False"):
        run_ranks(1, loaded_for_training, f"{folder}-again")


def exported(folder: str, stage: int) -> None:
    model = frozen(tied=True).to(torch.bfloat16)
    engine, *_ = zt.initialize(model=model, config=Setting(stage=stage, file="own").config(""))
    engine.save_16bit_model(folder)
    with zt.full_parameters(engine.module):
        assert engine.module.get_parameter("embed.weight").shape == (64, 32)
    engine.close()


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 3])
def test_the_export_has_the_models_own_dtype(stage: int, tmp_path: Path) -> None:
    run_ranks(2, exported, str(tmp_path), stage)
    found, expected = load_file(tmp_path / "model.safetensors"), frozen(tied=True).to(torch.bfloat16)
    assert found
    for name, value in found.items():
        assert torch.equal(value, expected.state_dict()[name]), name


def unfrozen_later(stage: int) -> None:
    engine, *_ = zt.initialize(model=frozen(), config=Setting(stage=stage).config(""))
    engine.module.get_submodule("head").requires_grad_(True)
    with torch.no_grad():
        engine(*token_batches(1, size=2)[0])
    engine(*token_batches(1, size=2)[0])


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 3])
def test_unfreezing_it_later_is_refused(stage: int) -> None:
    with pytest.raises(RankFailed, match=r"'head.weight'\] were unfrozen, but every parameter was frozen"):
        run_ranks(2, unfrozen_later, stage)


def frozen_on_rank_1() -> None:
    zt.initialize(model=frozen().requires_grad_(world()[0] == 0), config=Setting(stage=1).config(""))


@pytest.mark.ranks
def test_ranks_that_disagree_get_a_named_error() -> None:
    with pytest.raises(RankFailed, match=r"every parameter is frozen on ranks \[1\] and not on the others"):
        run_ranks(2, frozen_on_rank_1)


@pytest.mark.unit
def test_what_would_train_nothing_is_refused_and_empty_groups_are_not() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    config = Setting(stage=0).config("")
    with pytest.raises(ConfigError, match="optimizer: must not be passed for a model whose"):
        zt.initialize(model=model, config=config, optimizer=torch.optim.AdamW)
    schedule = torch.optim.lr_scheduler.ConstantLR
    with pytest.raises(ConfigError, match="lr_scheduler: must not be passed"):
        zt.initialize(model=model, config=config, lr_scheduler=schedule)
    trained = filter(lambda parameter: parameter.requires_grad, model.parameters())
    engine, *given = zt.initialize(model=model, config=config, model_parameters=trained)
    assert given[0] is None
    assert engine(torch.ones(1, 2)).shape == (1, 2)
    engine.close()
    with pytest.raises(LayoutError, match="on the meta device"):
        zt.initialize(model=nn.Linear(2, 2, device="meta").requires_grad_(False), config=config)

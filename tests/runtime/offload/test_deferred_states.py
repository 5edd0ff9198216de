"""States of an unnamed optimizer are made at the first backward pass.

Evaluation alone needs none, and training has the bits of a named optimizer with the same values.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import zerotrain.runtime as zt
from tests.support.ranks import RankFailed, run_ranks
from tests.support.tiers import with_slow_rows
from tests.support.tiny_models import TinyGPT, token_batches
from tests.support.training import world
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.offload.deferred import DeferredStates
from zerotrain.runtime.zero.ledger import MemoryKind
from zerotrain.runtime.zero.state import MASTER, whole

pytestmark = pytest.mark.ranks

NAMED = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}}
"""The default optimizer, written out."""
STATE_KINDS = (MemoryKind.STATES, MemoryKind.HOST_STATES)


@dataclass(frozen=True, kw_only=True)
class Setting:
    stage: int
    dtype: str = "fp32"
    states: str = "none"
    params: str = "none"
    remainders: bool | None = None
    just_in_time: bool | None = None
    ratio: float = 1.0
    narrow: bool = False
    """Whether the model is built in the compute precision, so that its weights determine the masters."""

    @property
    def name(self) -> str:
        return "-".join(str(value) for value in asdict(self).values())

    def config(self, spill: str, *, named: bool) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage, "stage3_param_persistence_threshold": 40}
        if self.states != "none":
            zero["offload_optimizer"] = {"device": self.states, "nvme_path": spill, "ratio": self.ratio}
            if self.just_in_time is not None:
                zero["offload_optimizer"]["just_in_time"] = self.just_in_time
        if self.params != "none":
            zero["offload_param"] = {"device": self.params, "nvme_path": spill, "max_in_cpu": 0}
        found: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": self.dtype == "bf16"},
            "fp16": {"enabled": self.dtype == "fp16", "initial_scale_power": 6},
            "zero_optimization": zero,
        }
        if self.remainders is not None:
            found["bf16"]["store_param_remainders"] = self.remainders
        return {**found, "optimizer": NAMED} if named else found

    def model(self) -> TinyGPT:
        torch.manual_seed(5)
        model = TinyGPT(layers=2)
        return model.to({"bf16": torch.bfloat16, "fp16": torch.float16}[self.dtype]) if self.narrow else model

    def make(self, spill: str, *, named: bool = False) -> Engine:
        return zt.initialize(model=self.model(), config=self.config(spill, named=named))[0]


SETTINGS = (
    *(Setting(stage=stage, dtype=dtype) for stage, dtype in product((0, 1, 2, 3), ("fp32", "bf16"))),
    *(Setting(stage=stage, dtype="fp16") for stage in (0, 3)),
    *(Setting(stage=stage, dtype="bf16", narrow=True) for stage in (0, 3)),
    *(
        Setting(stage=stage, dtype="bf16", remainders=True, narrow=narrow)
        for stage in (0, 3)
        for narrow in (False, True)
    ),
    *(
        Setting(stage=stage, dtype=dtype, states=states, narrow=dtype == "bf16" and stage == 3)
        for states, stage, dtype in product(("cpu", "nvme"), (1, 3), ("fp32", "bf16"))
    ),
    Setting(stage=0, states="cpu", ratio=0.5),
    Setting(stage=3, states="nvme", params="nvme", just_in_time=True),
    Setting(stage=3, dtype="bf16", states="cpu", params="cpu", just_in_time=True),
)


def evaluate(engine: Engine) -> list[float]:
    engine.eval()
    with torch.no_grad():
        losses = [float(engine(*batch)) for batch in token_batches(2, size=2, seed=9)]
    engine.train()
    return losses


def train(engine: Engine, steps: int = 3) -> list[float]:
    losses = []
    for batch in token_batches(steps, size=2, seed=world()[0]):
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def digest(values: torch.Tensor) -> str:
    return hashlib.sha256(values.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def digests(engine: Engine) -> dict[str, str]:
    """Return digests of this rank's streams and of the whole weights."""
    streams = engine.checkpoint_state().streams
    found = {f"{unit}/{kind}": digest(whole(stream)) for (unit, kind), stream in streams.items()}
    with zt.full_parameters(engine.module):
        parameters = engine.module.named_parameters()
        return found | {name: digest(value.detach().flatten()) for name, value in parameters}


def states_bytes(engine: Engine) -> int:
    return sum(engine.memory.live_bytes(kind) for kind in STATE_KINDS)


def both_ways(setting: Setting, spill: str) -> dict[str, Any]:
    """Let an engine with a named optimizer and one without evaluate first and then train."""
    found: dict[str, Any] = {}
    for named in (True, False):
        engine = setting.make(spill, named=named)
        first = {"states": states_bytes(engine), "spill": engine.memory.live_bytes(MemoryKind.SPILL)}
        ledger = engine.memory
        losses = evaluate(engine)
        assert states_bytes(engine) == first["states"], "evaluation made some"
        start = digests(engine)
        assert states_bytes(engine) == first["states"], "reading made some"
        losses += train(engine)
        engine.synchronize()
        status = engine.memory_status()
        found[str(named)] = {
            "first": first,
            "losses": losses,
            "start": start,
            "end": digests(engine),
            "kept": {
                str(kind): ledger.live_bytes(kind) for kind in MemoryKind if kind is not MemoryKind.RING
            },
            "planned": (
                ledger.persistent_bytes + ledger.live_bytes(MemoryKind.RING),
                status.planned_persistent_bytes + status.planned_host_bytes,
            ),
            "deferred": [name for name, each in engine.optimizer.states.items() if is_deferred(each)],
        }
        engine.close()
    return found


def is_deferred(states: object) -> bool:
    return isinstance(states, DeferredStates)


def every_setting(spill: str) -> list[dict[str, Any]]:
    return [both_ways(setting, spill) for setting in SETTINGS]


@pytest.mark.parametrize("world_size", with_slow_rows([1, 2], quick=[2]))
def test_evaluation_costs_no_states_and_training_has_the_same_bits(world_size: int, tmp_path: Path) -> None:
    for per_rank in run_ranks(world_size, every_setting, str(tmp_path)):
        for setting, found in zip(SETTINGS, per_rank, strict=True):
            named, default = found["True"], found["False"]
            for what in ("losses", "start", "end", "kept"):
                assert default[what] == named[what], (setting.name, what)
            assert not default["deferred"], setting.name
            first = default["first"]
            assert first["spill"] == named["first"]["spill"], "the disk's room is taken at the start"
            if setting.dtype == "fp32" or setting.narrow:
                assert first["states"] == 0, setting.name
            elif setting.states != "nvme":
                # The digits that rounding removed, and no moments.
                whole_states = named["first"]["states"]
                part = 2 / 10 if setting.remainders or setting.states == "cpu" else 4 / 12
                # Norms are zeros and ones, so rounding removed nothing.
                assert 0 < first["states"] <= whole_states * part, setting.name


def saved_before_training(folder: str, setting: Setting) -> tuple[dict[str, str], dict[str, str], int]:
    """Save an engine that has not trained, load it into one with other weights, and train both."""
    ends = []
    engine = setting.make(f"{folder}/spill")
    engine.save_checkpoint(f"{folder}/checkpoints")
    left = states_bytes(engine)
    train(engine)
    ends.append(digests(engine))
    engine.close()
    torch.manual_seed(6)
    other, *_ = zt.initialize(model=TinyGPT(layers=2), config=setting.config(f"{folder}/spill", named=False))
    other.load_checkpoint(f"{folder}/checkpoints")
    train(other)
    ends.append(digests(other))
    other.close()
    return ends[0], ends[1], left


LOADED = (
    Setting(stage=0),
    Setting(stage=3, dtype="bf16"),
    Setting(stage=1, dtype="bf16", remainders=True),
    Setting(stage=3, states="nvme"),
    Setting(stage=2, dtype="bf16", states="cpu"),
)


@pytest.mark.parametrize("setting", LOADED, ids=lambda setting: setting.name)
def test_a_checkpoint_from_before_the_first_backward_pass(setting: Setting, tmp_path: Path) -> None:
    for straight, resumed, left in run_ranks(2, saved_before_training, str(tmp_path), setting):
        assert straight == resumed
        assert left == 0 or setting.dtype == "bf16", "saving made states"


def resumed_at_once(folder: str, setting: Setting) -> dict[str, Any]:
    """Resume from a checkpoint, as a whole or only its weights, beside a run that named AdamW."""
    first = setting.make(f"{folder}/spill")
    train(first, 2)
    first.save_checkpoint(f"{folder}/checkpoints")
    first.close()
    found: dict[str, Any] = {}
    for named, module_only in product((True, False), (True, False)):
        engine = setting.make(f"{folder}/spill", named=named)
        engine.load_checkpoint(f"{folder}/checkpoints", load_module_only=module_only)
        before = states_bytes(engine)
        losses = [*evaluate(engine), *train(engine)]
        found[f"{named} {module_only}"] = (before, losses, digests(engine))
        engine.close()
    return found


@pytest.mark.parametrize("setting", LOADED, ids=lambda setting: setting.name)
def test_a_load_before_the_first_backward_pass(setting: Setting, tmp_path: Path) -> None:
    for found in run_ranks(2, resumed_at_once, str(tmp_path), setting):
        for module_only in (True, False):
            assert found[f"False {module_only}"][1:] == found[f"True {module_only}"][1:]
        whole_states = found["True True"][0]
        if setting.states != "nvme":  # which counts no memory
            assert found["False True"][0] < found["False False"][0] <= whole_states, "moments were loaded"
        if setting.dtype == "fp32":
            assert found["False True"][0] == 0, "weights alone take no states"
        else:
            assert 0 < found["False True"][0] < whole_states, "digits of masters were loaded, and no moments"


def changed_before_training(setting: Setting) -> dict[str, Any]:
    """Write masters and weights, read and write states, and freeze layers, all before the first backward."""
    found: dict[str, Any] = {}
    for named in (True, False):
        engine = setting.make("", named=named)
        weight = engine.module.get_parameter("blocks.0.up.weight")
        other = engine.module.get_parameter("head.weight")
        generator = torch.Generator().manual_seed(2)
        zt.set_full_fp32(weight, torch.randn(weight.shape, generator=generator))
        with zt.full_parameters(other, write=True), torch.no_grad():
            other.mul_(1.5)
        assert not zt.get_full_optimizer_state(other, "exp_avg").any()
        before = states_bytes(engine)
        zt.set_full_optimizer_state(other, "exp_avg", torch.full(other.shape, 0.25))
        start, stop = zt.local_interval(other)
        is_here = start < stop or setting.stage == 0
        assert (states_bytes(engine) > before) is (is_here and not named)
        read = [zt.get_full_fp32(weight), zt.get_full_optimizer_state(other, "exp_avg")]
        engine.module.get_submodule("blocks.1").requires_grad_(False)
        losses = train(engine, 2)
        engine.module.get_submodule("blocks.1").requires_grad_(True)
        losses += train(engine, 2)
        found[str(named)] = ([digest(each) for each in read], losses, digests(engine))
        engine.close()
    return found


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_is_written_and_frozen_before_counts(stage: int, dtype: str) -> None:
    for found in run_ranks(2, changed_before_training, Setting(stage=stage, dtype=dtype)):
        assert found["False"] == found["True"]


def frozen_before_training(stage: int) -> tuple[int, int]:
    """Return bytes of states after a pass with a frozen part, and after the first backward pass."""
    engine = Setting(stage=stage).make("")
    engine.module.get_submodule("blocks.1").requires_grad_(False)
    loss = engine(*token_batches(1, size=2)[0])
    before = states_bytes(engine)
    engine.backward(loss)
    found = before, states_bytes(engine)
    engine.close()
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_a_change_of_the_layout_makes_none(stage: int) -> None:
    for before, after in run_ranks(2, frozen_before_training, stage):
        assert before == 0
        assert after > 0


def own_loop(stage: int) -> tuple[int, int, list[float]]:
    model, optimizer = zt.shard(Setting(stage=stage).model(), Setting(stage=stage).config("", named=False))
    before = states_bytes(optimizer.engine)
    losses = []
    for batch in token_batches(3, size=2, seed=world()[0]):
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return before, states_bytes(optimizer.engine), losses


def of_an_engine(stage: int) -> list[float]:
    engine = Setting(stage=stage).make("", named=True)
    return train(engine)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_loop_of_ones_own_trains_alike(stage: int) -> None:
    expected = run_ranks(2, of_an_engine, stage)
    for (before, after, losses), named in zip(run_ranks(2, own_loop, stage), expected, strict=True):
        assert before == 0
        assert after > 0
        assert losses == named


def masters_are_there(spill: str) -> list[str]:
    """Return the names of a named optimizer's states, which exist at once, as after a drive is measured."""
    engine = Setting(stage=1, dtype="bf16").make(spill, named=True)
    names = [kind for each in engine.optimizer.states.values() for kind in (*each.kinds, MASTER)]
    assert not any(map(is_deferred, engine.optimizer.states.values()))
    engine.close()
    measured = Setting(stage=1, states="nvme").make(spill)
    assert all(map(is_deferred, measured.optimizer.states.values()))
    assert measured.probe_spill() is not None
    assert not any(map(is_deferred, measured.optimizer.states.values()))
    measured.close()
    return names


def test_named_states_and_measured_drives_are_there_at_the_start(tmp_path: Path) -> None:
    assert run_ranks(1, masters_are_there, str(tmp_path))[0]


def without_capacity(spill: str) -> None:
    config = Setting(stage=1, states="nvme").config(spill, named=False)
    config["zero_optimization"]["spill"] = {"max_bytes": 4096}
    zt.initialize(model=Setting(stage=1).model(), config=config)


def test_initialize_refuses_a_full_disk_for_states_made_later(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="DoesNotFit"):
        run_ranks(1, without_capacity, str(tmp_path))

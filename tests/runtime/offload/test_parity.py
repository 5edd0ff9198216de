"""States on the device, in host memory, in the spill store and in the encrypted spill store have the same
bits.

The comparison is after 50 steps with clipping at each, without and with everything sharded, on 1 and 2 ranks,
for both encodings of the master weights; at the stages between and on 4 ranks after 12 steps.

The reference is the device's tier with the same encoding, which is itself compared with plain torch AdamW.
"""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.device import DEVICE
from tests.support.ranks import run_ranks
from tests.support.tiers import with_slow_rows
from tests.support.training import BF16, world
from zerotrain.contract.memory import memory_inputs
from zerotrain.contract.memory.tiers import disk_bytes, host_bytes
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.offload.fit import unit_sizes
from zerotrain.runtime.zero.ledger import MemoryKind

pytestmark = pytest.mark.ranks


CLIP, STEPS, SHORT_STEPS, WIDTH, ROWS = 0.05, 50, 12, 48, 8

TIERS: dict[str, dict[str, Any]] = {
    "none": {},
    "cpu": {"offload_optimizer": {"device": "cpu"}},
    "nvme": {"offload_optimizer": {"device": "nvme"}, "spill": {"encryption": "None"}},
    "encrypted": {"offload_optimizer": {"device": "nvme"}, "spill": {"encryption": "AEAD"}},
}
HALF = {"offload_optimizer": {"device": "nvme", "ratio": 0.5}}
ADAMW: dict[str, Any] = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training; `tier` is a name."""

    tier: str = "none"
    stage: int = 3
    splits: bool | None = None
    dtype: str = "bf16"
    keeps: str = "bf16"
    """Name in `BF16` of what is kept in bf16."""
    steps: int = STEPS
    optimizer: dict[str, Any] = field(default_factory=lambda: ADAMW, hash=False)

    def config(self, folder: str) -> dict[str, Any]:
        extra = HALF if self.tier == "half" else TIERS[self.tier]
        block = dict(extra.get("offload_optimizer", {}))
        if block.get("device") == "nvme":
            block["nvme_path"] = folder
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": CLIP,
            self.dtype: {"enabled": True, "auto_cast": True} if self.dtype != "bf16" else self._bf16(),
            "zero_optimization": {
                "stage": self.stage,
                "stage3_param_persistence_threshold": 100,
                **extra,
                **({"offload_optimizer": block} if block else {}),
            },
            "optimizer": self.optimizer,
        }

    def _bf16(self) -> dict[str, Any]:
        extra = {} if self.splits is None else {"store_param_remainders": self.splits}
        return {"enabled": True, "auto_cast": True, **extra, **BF16[self.keeps]}


class Stack(nn.Module):
    """Units of several chunks, of one, and of less; the last chunk is shorter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.wide = nn.Linear(WIDTH, 8 * WIDTH)
        self.narrow = nn.Linear(8 * WIDTH, 4, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            rows = rows + torch.tanh(block(rows))
        loss: torch.Tensor = self.narrow(torch.tanh(self.wide(rows))).float().square().mean()
        return loss


def build() -> Stack:
    torch.manual_seed(3)
    return Stack()


def batch(step: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def start(run: Run, folder: str, first: torch.Tensor | None = None) -> Engine:
    """Start an engine; `first` gives initial values."""
    config, model = run.config(folder), build()
    if run.dtype == "fp32":
        config.pop("fp32")
    if first is not None:
        with torch.no_grad():
            model.wide.bias[: first.numel()] = first
    engine, *_ = zt.initialize(model=model, config=config, unit_modules=[nn.Linear])
    return engine


def one_step(engine: Engine, step: int) -> tuple[float, float]:
    rank, ranks = world()
    loss = engine(batch(step).chunk(ranks)[rank])
    engine.backward(loss)
    return loss.item(), engine.step().grad_norm


def digest_of(engine: Engine) -> str:
    """Return a digest of every bit of this rank's masters, states and weights."""
    found = hashlib.sha256()
    for key, stream in sorted(engine.checkpoint_state().streams.items()):
        found.update(repr(key).encode())
        found.update(stream.read(0, stream.numel).float().cpu().numpy().tobytes())
    for name, states in sorted(engine.optimizer.states.items()):
        weights = states.read_weights(0, states.numel).float()
        found.update(name.encode() + weights.cpu().numpy().tobytes())
    return found.hexdigest()


def train(run: Run) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        engine = start(run, folder)
        seen = [one_step(engine, step) for step in range(run.steps)]
        assert all(norm > CLIP for _, norm in seen), f"{run}: clipping was not active in every step"
        found = {"seen": seen, "digest": digest_of(engine), "bytes": bytes_of(engine)}
        engine.close()
        return found


def bytes_of(engine: Engine) -> dict[str, tuple[int, int]]:
    """Bytes by the engine's count and by the formulas, of an engine between steps."""
    engine.optimizer.registry.tiers.open_sweep([])  # what reading the states took is given back
    inputs = memory_inputs(
        engine.config,
        unit_sizes(engine.core.layout),
        on_host=DEVICE == "cpu",
        is_encrypted=engine.config.zero.spill.encryption != "None",
    )
    host, memory = host_bytes(inputs), engine.memory
    return {
        "host": (memory.live_bytes(MemoryKind.HOST_STATES), host.optimizer_bytes),
        "ring": (memory.live_bytes(MemoryKind.RING), host.ring_bytes),
        "tags": (memory.live_bytes(MemoryKind.TAGS), host.tag_bytes),
        "disk": (memory.live_bytes(MemoryKind.SPILL), disk_bytes(inputs)),
    }


def train_all(runs: tuple[Run, ...]) -> list[dict[str, Any]]:
    return [train(run) for run in runs]


def reference_tier(tier: str) -> str:
    """Return the reference of a tier: on a GPU, offloaded states are updated by other kernels."""
    return "cpu" if DEVICE == "cuda" and tier != "none" else "none"


def matrix(ranks: int, stage: int) -> tuple[Run, ...]:
    """Return every tier with both encodings; on 4 ranks the two extremes, and all of them at stage 3."""
    ends = dict.fromkeys(("none", reference_tier("encrypted"), "encrypted"))
    tiers = tuple(TIERS if ranks < 4 or stage == 3 else ends)
    runs = [run_of(ranks, stage, splits, tier) for splits, tier in product((False, True), tiers)]
    return (*runs, run_of(ranks, stage, True, "half")) if ranks == 2 else tuple(runs)


def run_of(ranks: int, stage: int, splits: bool | None, tier: str = "none") -> Run:
    """Long where ranks have nothing or everything to share, unless there are many of them."""
    steps = STEPS if stage in (0, 3) and ranks < 4 else SHORT_STEPS
    return Run(tier=tier, stage=stage, splits=splits, steps=steps)


@cache
def outcomes(ranks: int, stage: int) -> dict[Run, list[dict[str, Any]]]:
    """Return, per run of the matrix, the outcome of every rank."""
    runs = matrix(ranks, stage)
    found = run_ranks(ranks, train_all, runs)
    return {run: [rank[index] for rank in found] for index, run in enumerate(runs)}


WHERE = [(1, 0), (1, 3), *product((2, 4), (0, 1, 2, 3))]  # one rank has nothing to shard


@pytest.mark.parametrize(("ranks", "stage"), with_slow_rows(WHERE, quick=[(2, 3), (1, 0)]))
def test_every_tier_computes_the_same_bits(ranks: int, stage: int) -> None:
    for run, found in outcomes(ranks, stage).items():
        reference = outcomes(ranks, stage)[run_of(ranks, stage, run.splits, reference_tier(run.tier))]
        for rank, (mine, plain) in enumerate(zip(found, reference, strict=True)):
            where = f"{run}, rank {rank} of {ranks}"
            assert mine["seen"] == plain["seen"], where
            assert mine["digest"] == plain["digest"], where


@pytest.mark.parametrize(("ranks", "stage"), WHERE)
def test_bytes_equal_the_formulas(ranks: int, stage: int) -> None:
    for run, found in outcomes(ranks, stage).items():
        for name, (counted, formula) in found[0]["bytes"].items():
            assert counted == formula, f"{run} on {ranks} ranks: {name}"
            assert name != "host" or run.tier != "cpu" or counted > 0
            assert name != "disk" or run.tier not in ("nvme", "encrypted", "half") or counted > 0


OTHERS = (
    {"type": "Adagrad", "params": {"lr": 1e-2}},
    {"type": "Lion", "params": {"lr": 1e-3, "weight_decay": 0.1}},
    {"type": "Muon", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}},
    {"type": "SGD", "params": {"lr": 1e-2}},
    {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    {"type": "Adam", "params": {"lr": 1e-2, "amsgrad": True}},
)
BF16_OTHERS = tuple(each for each in OTHERS if each["type"] != "Muon")
RULES = (
    *(
        Run(tier=tier, optimizer=optimizer, steps=6)
        for optimizer, tier in product(OTHERS, ("none", "cpu", "encrypted"))
    ),
    *(
        Run(tier=tier, dtype=dtype, steps=6)
        for dtype, tier in product(("fp32", "fp16"), ("none", "cpu", "encrypted"))
    ),
    *(
        Run(tier=tier, keeps=keeps, optimizer=optimizer, steps=6)
        for keeps, optimizer, tier in product(
            ("bf16 masters", "bf16 states"), (ADAMW, *BF16_OTHERS), ("none", "cpu", "encrypted")
        )
    ),
    *(Run(keeps="bf16 states", stage=1, tier=tier, steps=6) for tier in ("none", "nvme", "half")),
)


@pytest.mark.slow(cheaper="tests/runtime/offload/test_parity.py::test_every_tier_computes_the_same_bits")
def test_every_rule_and_precision_computes_the_same_bits_on_every_tier() -> None:
    found = run_ranks(2, train_all, RULES)
    for rank in found:
        for index in range(0, len(RULES), 3):
            plain, host, spill_store = rank[index : index + 3]
            if DEVICE == "cuda":
                plain = host
            assert plain["seen"] == host["seen"] == spill_store["seen"], RULES[index]
            assert plain["digest"] == host["digest"] == spill_store["digest"], RULES[index]
        for run, found_of_run in zip(RULES, rank, strict=True):
            for name, (counted, formula) in found_of_run["bytes"].items():
                assert counted == formula, f"{run}: {name}"


def train_next_to_torch() -> tuple[float, float]:
    """Largest differences of losses and of weights to plain torch AdamW, fp32, on one rank."""
    run, model = Run(tier="encrypted", dtype="fp32", stage=0), build().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    with tempfile.TemporaryDirectory() as folder:
        engine = start(run, folder)
        apart = 0.0
        for step in range(STEPS):
            loss = model(batch(step))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            apart = max(apart, abs(loss.item() - one_step(engine, step)[0]))
        with zt.full_parameters(engine.module):
            pairs = zip(engine.module.parameters(), model.parameters(), strict=True)
            weights = max((mine - plain).abs().max().item() for mine, plain in pairs)
        engine.close()
    return apart, weights


def test_a_spilled_step_is_torch_adamw() -> None:
    losses, weights = run_ranks(1, train_next_to_torch)[0]
    assert losses < 2e-5
    assert weights < 2e-4  # steps of 1e-2 each

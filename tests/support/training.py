"""Training runs to compare: the engine on some ranks, and the simplest possible data-parallel AdamW."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import zerotrain.runtime as zt
from tests.support.device import DEVICE
from tests.support.tiny_models import TinyGPT, token_batches

LR, WEIGHT_DECAY, EPS = 3e-3, 0.05, 1e-6
GLOBAL_BATCH = 8

BF16: dict[str, dict[str, bool]] = {
    "bf16": {},
    "bf16 masters": {"bf16_master_weights_and_grads": True},
    "bf16 states": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
}
"""Further keys of the `bf16` block, by what is kept in it."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One combination of everything that must not change the result."""

    stage: int = 0
    accumulation: int = 1
    checkpointing: str | None = None
    tied: bool = False
    clip: float = 0.0
    dtype: str = "fp32"
    """"fp32", or a name in `BF16`."""
    steps: int = 3
    optimizer: str = "AdamW"
    torch_adam: bool = True
    """Whether to use torch's arithmetic, which can be compared with a plain run bit for bit."""
    extra: dict[str, Any] = field(default_factory=dict, hash=False)
    """Further entries of `zero_optimization`."""

    def model(self) -> TinyGPT:
        torch.manual_seed(7)
        return TinyGPT(tied=self.tied, checkpointing=self.checkpointing)

    def config(self, world_size: int) -> dict[str, Any]:
        params = {"lr": LR, "weight_decay": WEIGHT_DECAY, "eps": EPS}
        if self.optimizer == "AdamW":
            params["torch_adam"] = self.torch_adam
        return {
            "train_batch_size": GLOBAL_BATCH,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "bf16": {"enabled": self.dtype in BF16, **BF16.get(self.dtype, {})},
            "zero_optimization": {
                "stage": self.stage,
                "stage3_param_persistence_threshold": 0,
                "stage3_max_reuse_distance": 0,
                **self.extra,
            },
            "optimizer": {"type": self.optimizer, "params": params},
        }


@dataclass
class Outcome:
    """Mean loss over ranks and micro-batches and norm of each step, and every final parameter by name."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, np.ndarray[Any, Any]]
    """Values as fp32 or fp64 arrays, as torch tensors are sent between processes as file descriptors."""


def world() -> tuple[int, int]:
    """Return (rank, world size) of the calling process."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def micro_batches(
    batch: tuple[torch.Tensor, torch.Tensor], *, world_size: int, accumulation: int
) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Divide one global batch into parts, indexed as `[accumulation step][rank]`."""
    tokens, targets = (part.chunk(world_size * accumulation) for part in batch)
    pairs = list(zip(tokens, targets, strict=True))
    return [pairs[index * world_size : (index + 1) * world_size] for index in range(accumulation)]


def train_with_engine(case: Case) -> Outcome:
    """Train on every rank; every rank returns the same outcome."""
    rank, world_size = world()
    model = case.model()
    engine, *_ = zt.initialize(model=model, config=case.config(world_size))
    losses, norms = [], []
    for batch in token_batches(case.steps, size=GLOBAL_BATCH):
        total = 0.0
        for parts in micro_batches(batch, world_size=world_size, accumulation=case.accumulation):
            loss = engine(*parts[rank])
            engine.backward(loss)
            result = engine.step()
            total += loss.item()
        norms.append(result.grad_norm)
        rows = engine.comm.gather_record([total / case.accumulation])
        losses.append(sum(row[0] for row in rows) / world_size)
    with zt.full_parameters(model):
        parameters = whole_parameters(model)
    engine.close()
    return Outcome(losses, norms, parameters)


def train_reference(case: Case, world_size: int) -> Outcome:
    """Train with plain torch in one process: every rank's part in turn, averaged gradients, AdamW."""
    model = case.model().to(DEVICE)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, eps=EPS, foreach=False, fused=False
    )
    losses, norms = [], []
    for batch in token_batches(case.steps, size=GLOBAL_BATCH):
        optimizer.zero_grad()
        total = 0.0
        for parts in micro_batches(batch, world_size=world_size, accumulation=case.accumulation):
            for part in parts:
                loss = model(*part)
                (loss / case.accumulation / world_size).backward()
                total += loss.item()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), case.clip or float("inf"))))
        optimizer.step()
        losses.append(total / case.accumulation / world_size)
    return Outcome(losses, norms, whole_parameters(model))


def whole_parameters(model: nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    """Return copies of the parameters by name."""
    return {name: value.detach().clone().float().cpu().numpy() for name, value in model.named_parameters()}


def largest_difference(left: Outcome, right: Outcome) -> float:
    """Return the largest difference over all parameters; inf if the names differ."""
    if left.parameters.keys() != right.parameters.keys():
        return float("inf")
    pairs = [(value, right.parameters[name]) for name, value in left.parameters.items()]
    return max(float(np.abs(a.astype(np.float64) - b).max(initial=0.0)) for a, b in pairs)

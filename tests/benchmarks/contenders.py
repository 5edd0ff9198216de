"""The engines that the benchmarks compare, each as `build(options) -> Contender`, on one model and batch.

The rank processes of `rank.py` import this module. DeepSpeed's ranks run with the interpreter of their own
environment, so every engine is imported only where it is built.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from tests.support.device import DEVICE, gpu_environment

LR = 1e-4
BETAS = (0.9, 0.999)
LIMIT = "limit"
ACTIVATIONS = "activations"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The model and the batch; the defaults are GPT-2 small."""

    layers: int = 12
    d_model: int = 768
    heads: int = 12
    context: int = 128
    vocabulary: int = 50257
    micro: int = 1


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One engine in training."""

    step: Callable[[torch.Tensor], float]
    """Function that does one optimizer step on token ids `[micro, context + 1]` and returns the loss."""
    facts: Callable[[], Mapping[str, float]] = dict
    """Function that returns the bytes that the engine itself counts, after some steps."""
    settle: Callable[[], None] = lambda: None
    """Function that waits for the background work of a step."""


def make_model(sizes: Sizes) -> nn.Module:
    from zerotrain.contract.train_spec import GptSpec
    from zerotrain.runtime.models.gpt import Gpt

    torch.manual_seed(0)
    spec = GptSpec(d_model=sizes.d_model, layers=sizes.layers, heads=sizes.heads, context=sizes.context)
    return Gpt(spec, vocabulary=sizes.vocabulary).to(DEVICE)


def limit(sizes: Sizes) -> Contender:
    """Build forward and backward in bf16 alone: no communication, no optimizer."""
    model = make_model(sizes).bfloat16()

    def step(batch: torch.Tensor) -> float:
        loss = model(batch)
        loss.backward()
        model.zero_grad(set_to_none=True)
        return float(loss)

    return Contender(step=step)


def activations(sizes: Sizes) -> Contender:
    """Build the limit with gradients that stay.

    Its peak above weights and gradients is the other memory of a step. It is not timed.
    """
    model = make_model(sizes).bfloat16()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # touched, so that it is resident

    def step(batch: torch.Tensor) -> float:
        loss = model(batch)
        loss.backward()
        model.zero_grad(set_to_none=False)
        return float(loss)

    num_bytes = 2 * sum(parameter.nbytes for parameter in model.parameters())
    return Contender(step=step, facts=lambda: {"resident_bytes": num_bytes})


def ddp_autocast(sizes: Sizes) -> Contender:
    """Build DDP with the usual mixed precision: fp32 weights and gradients, bf16 by autocast."""
    return _ddp(make_model(sizes), autocast=True)


def ddp_bf16(sizes: Sizes) -> Contender:
    """Build DDP with bf16 weights and states and no fp32 master: less work and less precise than ZeRO."""
    return _ddp(make_model(sizes).bfloat16(), autocast=False)


def _ddp(model: nn.Module, *, autocast: bool) -> Contender:
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = _adamw(wrapped)

    def step(batch: torch.Tensor) -> float:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            loss = wrapped(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss)

    return Contender(step=step)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0, fused=True)


def fsdp2(sizes: Sizes) -> Contender:
    """Build FSDP2: a shard per block, bf16 compute, fp32 masters, gradients reduced in bf16 like ours."""
    return _fsdp2(sizes)


def fsdp2_offloaded(sizes: Sizes) -> Contender:
    """Build FSDP2 with weights, gradients and states in page-locked host memory, where they are updated."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    return _fsdp2(sizes, offload_policy=CPUOffloadPolicy())


def _fsdp2(sizes: Sizes, **more: Any) -> Contender:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = make_model(sizes)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in next(module for module in model.children() if isinstance(module, nn.ModuleList)):
        fully_shard(block, mp_policy=policy, **more)
    fully_shard(model, mp_policy=policy, **more)
    optimizer = _adamw(model)

    def step(batch: torch.Tensor) -> float:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss)

    return Contender(step=step)


def config_of(stage: int, sizes: Sizes) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": sizes.micro,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": list(BETAS), "weight_decay": 0.0}},
    }


def deepspeed(stage: int) -> Callable[[Sizes], Contender]:
    """Return a builder of DeepSpeed on its CPU accelerator, with fp32 masters and its defaults."""

    def build(sizes: Sizes) -> Contender:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed as ds  # type: ignore[import-not-found, unused-ignore]

        ds.init_distributed(dist_backend="gloo")
        engine = ds.initialize(model=make_model(sizes), config=config_of(stage, sizes))[0]
        return Contender(step=engine_step(engine))

    return build


def zerotrain(stage: int) -> Callable[[Sizes], Contender]:
    """Return a builder of this engine."""

    def build(sizes: Sizes) -> Contender:
        import zerotrain.runtime as zt

        engine = zt.initialize(model=make_model(sizes), config=config_of(stage, sizes))[0]
        return Contender(step=engine_step(engine), facts=lambda: engine_facts(engine))

    return build


def engine_step(
    engine: Any, loss_of: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Callable[[torch.Tensor], float]:
    """Return a step of an engine; `loss_of` computes the loss of a batch if the model does not return it."""

    def step(batch: torch.Tensor) -> float:
        loss = engine(batch) if loss_of is None else loss_of(batch)
        engine.backward(loss)
        engine.step()
        return float(loss)

    return step


def engine_facts(engine: Any) -> Mapping[str, float]:
    """Return the engine's own counts, and the byte formulas for its configuration."""
    from zerotrain.contract.memory import gpu_persistent, gpu_transient, memory_inputs
    from zerotrain.runtime.offload.fit import unit_sizes

    units = unit_sizes(engine.core.layout)
    inputs = memory_inputs(engine.config, units, shares_memory=engine.comm.shares_memory)
    sent = cast("Mapping[str, int]", engine.comm.bytes_sent)
    return {
        "formula_bytes": gpu_persistent(inputs).total_bytes + gpu_transient(inputs).peak_bytes,
        "ledger_bytes": engine.memory.peak_bytes(),
        "sent_bytes": sum(sent.values()),
    }


NUM_SMALL = 1000
"""Number of parameters of 16 elements each, so that only calls cost time."""


class SmallParameters(nn.Module):
    """A chain of 1,000 products with 4 x 4 matrices; `model(ids)` is a loss that ignores the ids."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.chain = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(NUM_SMALL)))
        for layer in self.chain:
            nn.init.orthogonal_(cast("nn.Linear", layer).weight)

    def forward(self, _ids: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.chain(torch.ones(1, 4)).square().mean()
        return output


def small_ddp(_sizes: Sizes) -> Contender:
    """Build DDP with clipping by torch and fused AdamW in fp32."""
    wrapped = nn.parallel.DistributedDataParallel(SmallParameters(), gradient_as_bucket_view=True)
    optimizer = _adamw(wrapped)

    def step(batch: torch.Tensor) -> float:
        loss = wrapped(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss)

    return Contender(step=step)


def small_limit(_sizes: Sizes) -> Contender:
    """Build forward and backward alone."""
    model = SmallParameters()

    def step(batch: torch.Tensor) -> float:
        loss = model(batch)
        loss.backward()
        model.zero_grad(set_to_none=True)
        return float(loss)

    return Contender(step=step)


def small_zerotrain(stage: int) -> Callable[[Sizes], Contender]:
    """Return a builder of this engine on the small parameters, in fp32 with clipping."""

    def build(sizes: Sizes) -> Contender:
        import zerotrain.runtime as zt

        config = config_of(stage, sizes) | {"bf16": {"enabled": False}, "gradient_clipping": 1.0}
        engine = zt.initialize(model=SmallParameters(), config=config)[0]
        return Contender(step=engine_step(engine))

    return build


CONTENDERS: Mapping[str, Callable[[Sizes], Contender]] = {
    LIMIT: limit,
    ACTIVATIONS: activations,
    "ddp-autocast": ddp_autocast,
    "ddp-bf16": ddp_bf16,
    "fsdp2": fsdp2,
    "fsdp2-offloaded": fsdp2_offloaded,
    **{f"deepspeed-{stage}": deepspeed(stage) for stage in (1, 2, 3)},
    **{f"zerotrain-{stage}": zerotrain(stage) for stage in (0, 1, 2, 3)},
    "small-limit": small_limit,
    "small-ddp": small_ddp,
    **{f"small-zerotrain-{stage}": small_zerotrain(stage) for stage in (0, 1, 2, 3)},
}


def join(rank: int, world_size: int, store: str) -> None:
    """Create the process group of one contender's ranks. On a GPU they share it."""
    on_gpu = DEVICE == "cuda"
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    if on_gpu:
        os.environ.update(gpu_environment(rank))
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
    )

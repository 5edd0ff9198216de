"""One rank of engines with weights on the device, in host memory or in the spill file; run by `run_ranks`."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import zerotrain.runtime as zt
from tests.support.tiny_models import TinyGPT, token_batches
from tests.support.training import GLOBAL_BATCH, Case, micro_batches, world
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.offload.params import OffloadedParams
from zerotrain.runtime.zero.layout import UnitLayout
from zerotrain.runtime.zero.state import whole


@dataclass(frozen=True, kw_only=True)
class Where:
    """The location of weights and states, and the encoding of the states."""

    params: str = "none"
    """"none", "cpu", "nvme"; "host" is "cpu" as beside an accelerator, so the weights are copied for use."""
    states: str = "none"
    remainders: bool = False
    just_in_time: bool | None = None
    max_in_cpu: int = 0
    extra: tuple[tuple[str, Any], ...] = ()
    """Further entries of `zero_optimization`."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Exact results of one run on one rank."""

    losses: list[float]
    norms: list[float]
    states: dict[str, str]
    """Digests of this rank's streams, and of the whole weights, by name."""


def config_of(case: Case, where: Where, spill: str) -> dict[str, Any]:
    """Return the case's configuration with this rank's share offloaded."""
    config = case.config(world()[1])
    zero = config["zero_optimization"]
    zero.update(where.extra)
    if where.params != "none":
        device = "nvme" if where.params == "nvme" else "cpu"
        zero["offload_param"] = {"device": device, "nvme_path": spill, "max_in_cpu": where.max_in_cpu}
    if where.states != "none":
        zero["offload_optimizer"] = {"device": where.states, "nvme_path": spill}
        if where.just_in_time is not None:
            zero["offload_optimizer"]["just_in_time"] = where.just_in_time
    if case.dtype == "bf16":
        config["bf16"] |= {"store_param_remainders": where.remainders, "auto_cast": True}
    return config


def make(case: Case, where: Where, spill: str, *, frozen: bool = False) -> Engine:
    """Return an engine. With `frozen`, the first block and the matrices of the second one are frozen."""
    model = case.model()
    if frozen:
        freeze(model)
    on_an_accelerator = {"is_resident": _nothing_is, "may_spill": True}
    with ExitStack() as stack:
        for name, value in on_an_accelerator.items() if where.params == "host" else ():
            stack.enter_context(patch.object(OffloadedParams, name, value))
        engine, *_ = zt.initialize(model=model, config=config_of(case, where, spill))
    kept = [unit.keeps_shard for unit in engine.core.units if unit.placement.params_sharded]
    assert where.params in ("none", "cpu") or not all(kept)
    return engine


def _nothing_is(_tier: OffloadedParams, _layout: UnitLayout) -> bool:
    return False


def freeze(model: TinyGPT) -> None:
    model.blocks[0].requires_grad_(False)
    for parameter in model.blocks[1].parameters():
        parameter.requires_grad_(parameter.ndim < 2)


def train(engine: Engine, case: Case, steps: int, *, first: int = 0) -> tuple[list[float], list[float]]:
    """Train; return the losses of this rank's micro-batches, and the norms."""
    rank, ranks = world()
    losses, norms = [], []
    for batch in token_batches(first + steps, size=GLOBAL_BATCH)[first:]:
        for parts in micro_batches(batch, world_size=ranks, accumulation=case.accumulation):
            loss = engine(*parts[rank])
            engine.backward(loss)
            result = engine.step()
            losses.append(loss.item())
        norms.append(result.grad_norm)
    return losses, norms


def digests(engine: Engine) -> dict[str, str]:
    """Return digests of this rank's streams and of the whole weights used in forward."""
    streams = engine.checkpoint_state().streams
    found = {f"{unit}/{kind}": _digest(whole(stream)) for (unit, kind), stream in streams.items()}
    with zt.full_parameters(engine.module):
        for name, value in engine.module.named_parameters():
            found[name] = _digest(value.detach().flatten())
    return found


def _digest(values: torch.Tensor) -> str:
    return hashlib.sha256(values.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()


def run(case: Case, where: Where, spill: str, frozen: bool = False) -> Trained:
    """Train with evaluation in between, as scripts do."""
    engine = make(case, where, spill, frozen=frozen)
    half = case.steps // 2
    losses, norms = train(engine, case, half)
    with torch.no_grad():
        tokens, targets = token_batches(1, size=GLOBAL_BATCH, seed=5)[0]
        losses.append(engine.eval()(tokens[:2], targets[:2]).item())
        engine.train()
    more = train(engine, case, case.steps - half, first=half)
    found = digests(engine)
    engine.close()
    return Trained(losses=losses + more[0], norms=norms + more[1], states=found)


def run_all(jobs: list[tuple[Case, Where, bool]], spill: str) -> list[Trained]:
    """Train several runs one after the other."""
    return [run(case, where, spill, frozen) for case, where, frozen in jobs]


def access_outside_training(case: Case, where: Where, folder: str) -> dict[str, Any]:
    """Read and write weights in every way besides training; return the results."""
    root = Path(folder)
    engine = make(case, where, folder, frozen=True)
    model: Any = engine.module
    seen: dict[str, Any] = {}
    train(engine, case, 1)
    with zt.full_parameters(model, write=True), torch.no_grad():
        model.embed.weight.mul_(1.5)
        model.blocks[0].up.bias.add_(0.25)
    seen["written"] = digests(engine)
    for parameter in (model.blocks[2].down.weight, model.blocks[0].qkv.weight):
        value = zt.get_full_fp32(parameter)
        zt.set_full_fp32(parameter, value * 0.75)
        seen[f"fp32 {tuple(value.shape)}"] = _digest(zt.get_full_fp32(parameter).flatten())
    seen["losses"] = train(engine, case, 1, first=1)
    model.blocks[0].requires_grad_(True)
    model.embed.requires_grad_(False)
    seen["relaid"] = train(engine, case, 2, first=2)
    engine.save_checkpoint(root / "saved", "x")
    seen["saved"] = digests(engine)
    train(engine, case, 1, first=4)
    engine.load_checkpoint(root / "saved", "x")
    assert digests(engine) == seen["saved"]
    seen["resumed"] = train(engine, case, 1, first=4)
    exported = engine.save_16bit_model(root / "exported")
    assert exported
    seen["files"] = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted((root / "exported").glob("*.safetensors"))
    }
    seen["end"] = digests(engine)
    engine.close()
    return seen


def access_outside_training_everywhere(case: Case, places: list[Where], folder: str) -> list[dict[str, Any]]:
    """Call `access_outside_training` for each place, in a folder of its own."""
    found = []
    for index, where in enumerate(places):
        own = Path(folder) / str(index)
        own.mkdir(exist_ok=True)
        found.append(access_outside_training(case, where, str(own)))
    return found

"""One GPU as rank 0 of 8 or 64: the step, memory, kernels and host waits of engines at their real sharding.

    python3 -m tests.gpu.fake_world WORLD CONTENDER...

Contenders are `fsdp2` and `zerotrain-STAGE`, with `+qwz`, `+qgz` and `+hpz` for the parts of ZeRO++, `+free`
to free every unit after its forward, as FSDP2 does, where the default keeps up to 1e9 elements, `+fp8`,
`+muon`, `+split` for masters in halves (`bf16.store_param_remainders`), and `+compile`, for a process of its
own: once anything is compiled, other engines' steps wait for their gathers.
torch's fake process group moves nothing, so losses have no meaning, and what is left is what an engine itself
costs. Its gathers copy the own part once per rank, for all engines alike. All contenders are in one process
and step in turn; every ratio is within a turn. Without a GPU the same code runs on small sizes. Prints one
line of JSON per contender.
"""

from __future__ import annotations

import cProfile
import gc
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.gpu.peak import at_peak
from tests.gpu.waits import host_waits

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
LAYERS, WIDTH, CONTEXT, VOCABULARY, MICRO = (16, 2048, 1024, 50257, 4) if ON_GPU else (2, 128, 16, 256, 2)
ROUNDS = 7 if ON_GPU else 2
MIB = 1 << 20
GAPS_SHOWN = 12
PLUS: dict[str, dict[str, dict[str, Any]]] = {
    "qwz": {"zero_optimization": {"zero_quantized_weights": True}},
    "qgz": {"zero_optimization": {"zero_quantized_gradients": True}},
    "hpz": {"zero_optimization": {"zero_hpz_partition_size": 8}},
    "free": {"zero_optimization": {"stage3_max_reuse_distance": 0}},
    "fp8": {"fp8": {"enabled": True}},
    "muon": {"optimizer": {"type": "Muon"}},
    "split": {"bf16": {"store_param_remainders": True}},
    "compile": {"compile": {"enabled": True, "backend": "inductor" if ON_GPU else "aot_eager"}},
}
"""Changes of each addition to the blocks of the configuration."""
DRIVER_WAITS = ("Synchronize", "cudaMalloc", "cudaFree", "cudaHostAlloc")
"""Parts of the names of calls of CUDA that wait for the device, or may."""


@dataclass(kw_only=True)
class Contender:
    """One engine in training, and what was measured of it."""

    name: str
    step: Callable[[], None]
    own_bytes: int = 0
    """Bytes of the allocator that it keeps between steps."""
    step_ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


def main() -> None:
    world_size = int(sys.argv[1])
    join(world_size)
    contenders = [build(name) for name in sys.argv[2:]]
    for _ in range(ROUNDS):
        for contender in contenders:
            time_step(contender)
    for contender in contenders:
        look_inside(contender)
        print(json.dumps(summary(contender, contenders[0], world_size)), flush=True)


def join(world_size: int) -> None:
    """Be rank 0 of a world whose other ranks do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE="8")
    # No rank can be missing here, and ranks that do not exist share no memory.
    os.environ.update(ZEROTRAIN_WATCHDOG_SECONDS="0", ZEROTRAIN_TRANSPORT="gloo")
    store: Any = FakeStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=world_size)


def build(name: str) -> Contender:
    """Build a contender and run three steps of it."""
    before = allocated()
    model = make_model()
    batch = torch.randint(0, 256, (MICRO, CONTEXT + 1), device=DEVICE)
    step = fsdp2(model, batch) if name == "fsdp2" else zerotrain(name, model, batch)
    del model
    for _ in range(3):
        step()
    wait()
    gc.collect()
    return Contender(name=name, step=step, own_bytes=allocated() - before)


def make_model() -> nn.Module:
    from zerotrain.contract.train_spec import GptSpec
    from zerotrain.runtime.models.gpt import Gpt

    torch.manual_seed(0)
    spec = GptSpec(d_model=WIDTH, layers=LAYERS, heads=WIDTH // 64, context=CONTEXT)
    with DEVICE:
        return Gpt(spec, vocabulary=VOCABULARY)


def fsdp2(model: nn.Module, batch: torch.Tensor) -> Callable[[], None]:
    """Return a step of FSDP2: a shard per block, bf16 compute and reduction, fp32 masters, clipping."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in next(module for module in model.children() if isinstance(module, nn.ModuleList)):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        model(batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def zerotrain(name: str, model: nn.Module, batch: torch.Tensor) -> Callable[[], None]:
    """Return a step of this engine, with clipping."""
    import zerotrain.runtime as zt

    stage, *plus = name.removeprefix("zerotrain-").split("+")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": int(stage)},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
    }
    for key in plus:
        for block, changes in PLUS[key].items():
            config[block] = config.get(block, {}) | changes
    engine = zt.initialize(model=model, config=config)[0]

    def step() -> None:
        engine.backward(engine(batch))
        engine.step()

    return step


def time_step(contender: Contender) -> None:
    """Time one step: until the host returns, and until the device is done."""
    wait()
    began = perf_counter()
    contender.step()
    contender.host_ms.append(1e3 * (perf_counter() - began))
    wait()
    contender.step_ms.append(1e3 * (perf_counter() - began))


def look_inside(contender: Contender) -> None:
    """Measure the peak of one step, the kernels of another, and the host's waits of a third."""
    if not ON_GPU:
        return
    others = allocated() - contender.own_bytes
    torch.cuda.reset_peak_memory_stats()
    contender.step()
    wait()
    facts = contender.facts
    facts["peak_MiB"] = (torch.cuda.max_memory_allocated() - others) // MIB
    facts["own_MiB"] = contender.own_bytes // MIB
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        contender.step()
        wait()
    kernels = [event for event in profile.events() if event.device_type.name == "CUDA"]
    facts["kernels"] = len(kernels)
    facts["busy_ms"] = round(sum(event.device_time for event in kernels) / 1e3, 2)
    facts["idle"] = gaps_between(kernels)
    calls = profile.key_averages()
    facts["launches"] = sum(call.count for call in calls if call.key.startswith("cudaLaunch"))
    waits = host_waits(contender.step)
    facts["host_waits"] = waits.real.total()
    facts["syncs"] = {**waits.real, **{f"{place}, passed": n for place, n in waits.passed.items()}}
    # With those of the measurement itself: one for the device, and what the profiler adds.
    facts["driver_waits"] = [
        f"{call.count} {call.key}, {call.cpu_time_total / 1e3:.2f} ms"
        for call in calls
        if any(name in call.key for name in DRIVER_WAITS)
    ]
    facts["host"] = host_time(contender.step)
    facts["at_peak"] = at_peak(contender.step)


def gaps_between(kernels: list[Any]) -> list[str]:
    """Return the longest times of a step in which the device runs nothing, and what runs after and before."""
    spans = sorted((event.time_range.start, event.time_range.end, event.name) for event in kernels)
    found, (_, busy_until, last) = [], spans[0]
    for start, stop, name in spans[1:]:
        if start > busy_until:
            found.append((start - busy_until, f"after {last[:40]}, before {name[:40]}"))
        if stop > busy_until:
            busy_until, last = stop, name
    total = sum(span for span, _ in found)
    longest = sorted(found, reverse=True)[:GAPS_SHOWN]
    return [f"{total / 1e3:.1f} ms in all", *(f"{span / 1e3:.2f} ms {where}" for span, where in longest)]


def host_time(step: Callable[[], None]) -> list[str]:
    """Return the functions in which the host spends most of a step, without those that they call."""
    profile = cProfile.Profile()
    profile.runcall(step)
    wait()
    rows = sorted(profile.getstats(), key=lambda row: -row.inlinetime)[:GAPS_SHOWN]
    return [f"{1e3 * row.inlinetime:.2f} ms in {row.callcount} calls of {name_of(row.code)}" for row in rows]


def name_of(code: Any) -> str:
    """Return a function's name with its file and line; built-in ones have a name alone."""
    if isinstance(code, str):
        return code
    return f"{code.co_filename.split('/')[-1]}:{code.co_firstlineno} {code.co_name}"


def summary(contender: Contender, first: Contender, world_size: int) -> dict[str, Any]:
    """Return the figures of a contender; `of_first` is the median of its step's ratios to the first's."""
    ratios = [mine / other for mine, other in zip(contender.step_ms, first.step_ms, strict=True)]
    return {
        "contender": contender.name,
        "world": world_size,
        "device": torch.cuda.get_device_name() if ON_GPU else "cpu",
        "step_ms": round(statistics.median(contender.step_ms), 1),
        "host_ms": round(statistics.median(contender.host_ms), 1),
        "of_first": round(statistics.median(ratios), 3),
        "spread": [round(min(ratios), 3), round(max(ratios), 3)],
        **contender.facts,
    }


def allocated() -> int:
    return torch.cuda.memory_allocated() if ON_GPU else 0


def wait() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()

"""AdamW on CPU memory: one pass beside torch's fused kernel and DeepSpeedCPUAdam, each with its cast passes.

    python -m tests.benchmarks.bench_cpu_adam --help

All contenders take turns in one process, with their own arrays and the same number of threads. The roof is
the time that the machine needs to read and write the same arrays with hardly any arithmetic, in the fastest
of several ways. Our arrays and the roof's are where the engine keeps them: states in the host tier's mappings
(huge pages), gradient and weight in mappings of their own. The others' are where torch puts them, as in their
engines. Avoid sizes that are powers of two: streams at distances of a power of two conflict in the memory.
Ratios are taken per round. Each contender does what its engine does on every step:

    zerotrain K=12   bf16 gradient, scale and clip -> fp32 master and moments -> bf16 weight
    zerotrain K'=10  the same with the master as bf16 weight and int16 remainder
    torch            gradient scaled into fp32, fused AdamW, master cast to bf16
    DeepSpeed        fp32 gradient unscaled in place, DeepSpeedCPUAdam, master cast to bf16
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks import deepspeed_env
from zerotrain.runtime import _native
from zerotrain.runtime.offload.pages import HostPages
from zerotrain.runtime.zero.buffer import flat_copy

HYPER: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
SCALE = 0.37
BUILD = Path(__file__).resolve().parents[2] / "build"
Step = Callable[[], None]


@dataclass(kw_only=True)
class Contender:
    """One implementation; a call of `step` does one optimizer step over all elements."""

    name: str
    step: Step
    group: str
    seconds: list[float] = field(default_factory=list)


def states(numel: int) -> list[torch.Tensor]:
    """Return master and moments with values as during training."""
    generator = torch.Generator().manual_seed(1)
    block = torch.randn(1 << 20, generator=generator) * 0.02
    repeats = -(-numel // block.numel())
    return [
        block.repeat(repeats)[:numel].contiguous(),
        (block * 1e-2).repeat(repeats)[:numel].contiguous(),
        (block * block).repeat(repeats)[:numel].contiguous(),
    ]


def in_host_tier(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in memory like that of offloaded states."""
    return HostPages(tensor.nbytes, pinned=False).data.view(tensor.dtype).copy_(tensor)


def in_mapping(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in memory like that of the engine's gradients and weights."""
    return flat_copy(tensor, tensor.dtype)


def ours(numel: int, grad: torch.Tensor, *, encoding: str, threads: int) -> Step:
    master, first, second = states(numel)
    weight: torch.Tensor | None = None
    if encoding == "remainder":
        whole = master.view(torch.int32)
        weight = ((whole + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
        master = (whole & 0xFFFF).to(torch.int16)
    elif encoding == "bf16":
        weight = torch.zeros(numel, dtype=torch.bfloat16)
    weight = None if weight is None else in_mapping(weight)
    grad = in_mapping(grad)
    master, first, second = in_host_tier(master), in_host_tier(first), in_host_tier(second)
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        segment = _native.Segment(0, numel, step=count, **HYPER)
        task = _native.UpdateTask("adamw", [segment], grad, weight, grad_scale=SCALE)
        _native.update_(task, master, [first, second], threads=threads)

    return step


def by_torch(numel: int, grad: torch.Tensor, *, casts: bool) -> Step:
    parameter = torch.nn.Parameter(states(numel)[0])
    parameter.grad = torch.empty(numel)
    weight = torch.empty(numel, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(
        [parameter],
        lr=HYPER["lr"],
        betas=(HYPER["beta1"], HYPER["beta2"]),
        eps=HYPER["eps"],
        weight_decay=HYPER["weight_decay"],
        fused=True,
    )

    def step() -> None:
        with torch.no_grad():
            if not casts:
                parameter.grad = grad
                optimizer.step()
                return
            assert parameter.grad is not None
            torch.mul(grad, SCALE, out=parameter.grad)
            optimizer.step()
            weight.copy_(parameter)

    return step


def by_deepspeed(numel: int, grad: torch.Tensor, *, casts: bool) -> Step:
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found, unused-ignore]

    parameter = torch.nn.Parameter(states(numel)[0])
    parameter.grad = grad.float() if casts else grad
    weight = torch.empty(numel, dtype=torch.bfloat16)
    optimizer = DeepSpeedCPUAdam(
        [parameter],
        lr=HYPER["lr"],
        betas=(HYPER["beta1"], HYPER["beta2"]),
        eps=HYPER["eps"],
        weight_decay=HYPER["weight_decay"],
    )

    def step() -> None:
        with torch.no_grad():
            if casts:
                assert parameter.grad is not None
                parameter.grad.mul_(0.999999)  # unscale and clip; near 1, as the same gradient is used again
            optimizer.step()
            if casts:
                weight.copy_(parameter)

    return step


class Roof:
    """Memory traffic: reads `read`, reads and writes every one of `both`, and writes `written`."""

    def __init__(self, library: ctypes.CDLL, numel: int, threads: int) -> None:
        self._call, self._numel, self._threads = library.memory_roof, numel, threads

    def ways(
        self, both: Sequence[torch.Tensor], read: torch.Tensor, written: torch.Tensor | None
    ) -> list[tuple[str, Step]]:
        """Return every way to pass over the same arrays; the fastest is the roof."""
        pointers = (ctypes.c_void_p * len(both))(*(one.data_ptr() for one in both))
        widths = (ctypes.c_size_t * len(both))(*(one.element_size() for one in both))
        place, width = (0, 0) if written is None else (written.data_ptr(), written.element_size())

        def way(past_caches: bool, block: int) -> Step:
            def step() -> None:
                self._call(
                    pointers,
                    widths,
                    ctypes.c_size_t(len(both)),
                    ctypes.c_void_p(read.data_ptr()),
                    ctypes.c_size_t(read.element_size()),
                    ctypes.c_void_p(place),
                    ctypes.c_size_t(width),
                    ctypes.c_bool(past_caches),
                    ctypes.c_size_t(self._numel),
                    ctypes.c_size_t(self._threads),
                    ctypes.c_size_t(block),
                )

            return step

        stores = (False, True) if written is not None else (False,)
        return [(f"{int(s)}/{block}", way(s, block)) for s in stores for block in (0, 16384)]


def roof_library() -> ctypes.CDLL:
    """Compile memory_roof.cpp for this machine and load it."""
    source = Path(__file__).with_name("memory_roof.cpp")
    target = BUILD / "memory_roof.so"
    BUILD.mkdir(exist_ok=True)
    flags = ["-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread", "-w"]
    subprocess.run(["g++", *flags, str(source), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


def use_deepspeed(python: Path | None) -> None:
    """Make DeepSpeed of its own environment importable here, after this environment's packages."""
    found = python or deepspeed_env.find_or_make()
    home = str(found.parent.parent)
    sys.path.append(sysconfig.get_path("purelib", vars={"base": home, "platbase": home}, scheme="venv"))
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(BUILD / "deepspeed-extensions"))
    os.environ["PATH"] = f"{found.parent}{os.pathsep}{os.environ['PATH']}"


def contenders(options: argparse.Namespace, roof: Roof) -> list[Contender]:
    numel, threads = options.numel, options.threads
    half = (torch.randn(1 << 20) * 1e-2).bfloat16().repeat(numel >> 20)
    whole = half.float()
    masters = [in_host_tier(each) for each in states(numel)]
    weight = in_mapping(torch.zeros(numel, dtype=torch.bfloat16))
    low = in_host_tier(torch.zeros(numel, dtype=torch.int16))
    read_half, read_whole = in_mapping(half), in_mapping(whole)
    found = [
        Contender(name="zerotrain", group="K=12", step=ours(numel, half, encoding="bf16", threads=threads)),
        Contender(
            name="zerotrain", group="K'=10", step=ours(numel, half, encoding="remainder", threads=threads)
        ),
        Contender(name="torch", group="K=12", step=by_torch(numel, half, casts=True)),
        Contender(name="zerotrain", group="fp32", step=ours(numel, whole, encoding="fp32", threads=threads)),
        Contender(name="torch", group="fp32", step=by_torch(numel, whole, casts=False)),
    ]
    for group, both, read, written in (
        ("K=12", masters, read_half, weight),
        ("K'=10", [weight, low, *masters[1:]], read_half, None),
        ("fp32", masters, read_whole, None),
    ):
        found += [
            Contender(name=f"roof {name}", group=group, step=step)
            for name, step in roof.ways(both, read, written)
        ]
    if not options.without_deepspeed:
        use_deepspeed(options.deepspeed_python)
        for group, grad in (("K=12", half), ("fp32", whole)):
            casts = group != "fp32"
            found.append(
                Contender(name="DeepSpeed", group=group, step=by_deepspeed(numel, grad, casts=casts))
            )
    return found


def measure(found: Sequence[Contender], rounds: int) -> None:
    """Time the contenders in turn; each round begins with another one."""
    for one in found:
        for _ in range(2):
            one.step()
    for number in range(rounds):
        shift = number % len(found)
        for one in [*found[shift:], *found[:shift]]:
            start = time.perf_counter()
            one.step()
            one.seconds.append(time.perf_counter() - start)


def per_round(mine: Sequence[float], other: Sequence[float]) -> str:
    ratios = [a / b for a, b in zip(mine, other, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:5.2f} ({low:.2f}-{high:.2f})"


def report(found: Sequence[Contender], numel: int) -> None:
    bytes_moved = {"K=12": 28, "K'=10": 26, "fp32": 28}
    peers = {"K=12": "K=12", "K'=10": "K=12", "fp32": "fp32"}  # the counterpart that another contender runs
    print(f"{'':6} {'':10} {'ms':>7} {'GB/s':>6}  roof/it (middle half)  it/zerotrain (middle half)")
    for group, moved in bytes_moved.items():
        ways = [one for one in found if one.group == group and one.name.startswith("roof")]
        roof = min(ways, key=lambda one: statistics.median(one.seconds))
        mine = next(one for one in found if one.group == group and one.name == "zerotrain")
        others = [one for one in found if one.group == peers[group] and one.name in ("torch", "DeepSpeed")]
        for one in (roof, mine, *others):
            middle = statistics.median(one.seconds)
            rate = f"{numel * moved / middle / 1e9:6.1f}" if one in (roof, mine) else " " * 6
            print(
                f"{group:6} {one.name.split()[0]:10} {middle * 1e3:7.1f} {rate}"
                f"  {per_round(roof.seconds, one.seconds):21}  {per_round(one.seconds, mine.seconds)}"
            )
    print("targets: roof/zerotrain >= 0.95; DeepSpeed/zerotrain >= 1.6 (K=12, K'=10); nothing for fp32")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numel", type=int, default=33 << 20, help="elements, a multiple of 2**20")
    parser.add_argument("--rounds", type=int, default=21, help="default %(default)s")
    parser.add_argument("--threads", type=int, default=_native.num_threads(), help="default: all usable")
    parser.add_argument("--deepspeed-python", type=Path, help="interpreter of an environment that has it")
    parser.add_argument("--without-deepspeed", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    try:
        found = contenders(options, Roof(roof_library(), options.numel, options.threads))
    except deepspeed_env.DeepSpeedMissing as error:
        print(error, file=sys.stderr)
        return 1
    measure(found, options.rounds)
    print(
        f"AdamW over {options.numel >> 20} Mi elements, {options.threads} threads, {_native.isas()[0]}, "
        f"torch {torch.__version__}, medians of {options.rounds} rounds"
    )
    report(found, options.numel)
    return 0


if __name__ == "__main__":
    sys.exit(main())

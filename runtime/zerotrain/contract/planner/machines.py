"""Properties of accelerators: the vendors' peak figures, and the fractions of them that jobs reach.

The planner calls it. A given or measured figure can replace each of them; a plan prints those it used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

MIB = 1 << 20
GB = 10**9

COMPUTE_PART = 0.4
"""Fraction of the peak that dense transformers reach: a guess, and the first figure to replace."""
BANDWIDTH_PART = 0.8
"""Fraction of a bandwidth's peak."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """One device, by its vendor's data sheet."""

    name: str
    memory_mib: int
    """Total memory, as the driver reports it."""
    tflops: float
    """Dense bf16 (fp16 if the device has no bf16)."""
    fp32_tflops: float | None
    """Speed in fp32 without TF32, as the engine multiplies; None = not known."""
    memory_gbps: float
    host_gbps: float
    """PCIe bandwidth, one direction."""
    peer_gbps: float
    """Bandwidth to the other devices of the worker, one direction."""
    labels: tuple[str, ...] = ()
    """Values of the node label nvidia.com/gpu.product."""

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib * MIB


FP32_TFLOPS: Mapping[str, float] = {
    "T4": 8.1,
    "V100-16GB": 15.7,
    "V100-32GB": 15.7,
    "RTX3090": 35.6,
    "RTX4090": 82.6,
    "A10": 31.2,
    "L4": 30.3,
    "L40S": 91.6,
    "A100-40GB": 19.5,
    "A100-80GB": 19.5,
    "A100-PCIe-40GB": 19.5,
    "A100-PCIe-80GB": 19.5,
    "H100-80GB": 67,
    "H200-141GB": 67,
}
"""TFLOP/s in fp32 without TF32 by the name of a device, from the data sheets of `ACCELERATORS`; for other
devices none is certain."""


def _device(
    name: str, memory_mib: int, rates: tuple[float, float, float, float], *labels: str
) -> Accelerator:
    tflops, memory, host, peer = rates
    return Accelerator(
        name=name,
        memory_mib=memory_mib,
        tflops=tflops,
        fp32_tflops=FP32_TFLOPS.get(name),
        memory_gbps=memory,
        host_gbps=host,
        peer_gbps=peer,
        labels=labels,
    )


# NVIDIA's data sheets: "Tesla T4", "Tesla V100", "A10", "L4", "L40S", "A100 Tensor Core GPU", "H100
# Tensor Core GPU" (SXM), "H200 Tensor Core GPU", "DGX B200"; the whitepapers "GA102" (RTX 3090) and "Ada"
# (RTX 4090), both with fp32 accumulation. All figures are dense: since the A100 the sheets print those of
# sparse matrices, too, which are twice as large.
ACCELERATORS: tuple[Accelerator, ...] = (
    _device("T4", 15_360, (65, 320, 16, 16), "Tesla-T4"),
    _device("V100-16GB", 16_384, (125, 900, 16, 150), "Tesla-V100-SXM2-16GB"),
    _device("V100-32GB", 32_768, (125, 900, 16, 150), "Tesla-V100-SXM2-32GB", "Tesla-V100-SXM3-32GB"),
    _device("RTX3090", 24_576, (71, 936, 32, 32), "NVIDIA-GeForce-RTX-3090"),
    _device("RTX4090", 24_564, (165, 1008, 32, 32), "NVIDIA-GeForce-RTX-4090"),
    _device("A10", 23_028, (125, 600, 32, 32), "NVIDIA-A10", "NVIDIA-A10G"),
    _device("L4", 23_034, (121, 300, 32, 32), "NVIDIA-L4"),
    _device("L40S", 46_068, (362, 864, 32, 32), "NVIDIA-L40S"),
    _device("A100-40GB", 40_960, (312, 1555, 32, 300), "NVIDIA-A100-SXM4-40GB"),
    _device("A100-80GB", 81_920, (312, 2039, 32, 300), "NVIDIA-A100-SXM4-80GB"),
    # Cards in slots reach each other over PCIe, except for pairs with a bridge.
    _device("A100-PCIe-40GB", 40_960, (312, 1555, 32, 32), "NVIDIA-A100-PCIE-40GB"),
    _device("A100-PCIe-80GB", 81_920, (312, 1935, 32, 32), "NVIDIA-A100-80GB-PCIe"),
    _device("H100-80GB", 81_559, (989, 3350, 64, 450), "NVIDIA-H100-80GB-HBM3"),
    _device("H200-141GB", 143_771, (989, 4800, 64, 450), "NVIDIA-H200"),
    _device("B200-180GB", 183_359, (2250, 8000, 64, 900), "NVIDIA-B200"),
)


def accelerator(name: str) -> Accelerator | None:
    """Find a device by name (`H100-80GB`, `h100`) or its nodes' label; None if unknown or ambiguous."""
    wanted = _plain(name)
    exact = [item for item in ACCELERATORS if wanted in {_plain(item.name), *map(_plain, item.labels)}]
    begun = [item for item in ACCELERATORS if _plain(item.name).startswith(wanted)]
    found = exact or begun
    return found[0] if len(found) == 1 else None


def peak_tflops(name: str, dtype: str) -> float | None:
    """Return the data sheet's TFLOP/s in the dtype of matrix products, by the name that the driver or a label
    gives; None if either is unknown."""
    device = accelerator(name)
    if device is None:
        return None
    return device.fp32_tflops if dtype == "fp32" else device.tflops


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Speeds that are reached; None = unknown. Bandwidths are in GB/s (10**9 bytes), one direction."""

    tflops: float | None = None
    """TFLOP/s of one rank, in the dtype of the job's matrix products."""
    device: float | None = None
    """Memory bandwidth of one accelerator."""
    host: float | None = None
    """Host memory bandwidth of one worker, all its ranks together."""
    pcie: float | None = None
    """Bandwidth between host and one accelerator."""
    peer: float | None = None
    """Bandwidth between the ranks of a worker, per rank."""
    network: float | None = None
    """Bandwidth between workers, per worker."""
    nvme: float | None = None
    """Bandwidth of the spill's drives of one worker, read and write together."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Source of each rate."""

    def given(self, values: Mapping[str, float], source: str) -> Rates:
        """Return these rates with `values` replaced.

        Raises ValueError for an unknown name or a value that is not positive.
        """
        known = RATE_NAMES
        for name, value in values.items():
            if name not in known:
                raise ValueError(f"{name!r} is no rate; known are {', '.join(known)}")
            if not 0 < value < 1e12:
                raise ValueError(f"{name} must be positive; got {value:g}")
        sources = {**self.sources, **dict.fromkeys(values, source)}
        return replace(self, **dict(values), sources=sources)


RATE_NAMES = tuple(item.name for item in fields(Rates) if item.name != "sources")


def rates_of(device: Accelerator | None, dtype: str = "bf16") -> Rates:
    """Return the data sheet's rates, reduced to what is usually reached; no rates without a device.

    `dtype` is that of the job's matrix products, as in a configuration. `tflops` is missing if the sheet has
    none.
    """
    if device is None:
        return Rates()
    peak = device.fp32_tflops if dtype == "fp32" else device.tflops
    computing = {} if peak is None else {"tflops": COMPUTE_PART * peak}
    sheet = f"the {device.name}'s data sheet"
    return (
        Rates()
        .given(computing, f"{COMPUTE_PART:.0%} of {sheet}" + (", fp32" if dtype == "fp32" else ""))
        .given(
            {
                "device": BANDWIDTH_PART * device.memory_gbps,
                "pcie": BANDWIDTH_PART * device.host_gbps,
                "peer": BANDWIDTH_PART * device.peer_gbps,
            },
            f"{BANDWIDTH_PART:.0%} of {sheet}",
        )
    )

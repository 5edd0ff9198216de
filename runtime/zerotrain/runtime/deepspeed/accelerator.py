"""`deepspeed.accelerator`: the device of this rank, queried through torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zerotrain.runtime.deepspeed.absent import DOCUMENT, attributes_of

__all__ = ["get_accelerator"]

__getattr__ = attributes_of(__name__)


@dataclass(frozen=True, slots=True)
class Accelerator:
    """CUDA where it is available, else the CPU."""

    kind: str

    def device_name(self, index: int | None = None) -> str:
        """Return the device's name for torch.device."""
        return self.kind if index is None or self.kind == "cpu" else f"{self.kind}:{index}"

    def current_device_name(self) -> str:
        """Return the current device's name for torch.device."""
        return self.device_name(self.current_device())

    def current_device(self) -> int:
        """Return the number of this rank's device."""
        return torch.cuda.current_device() if self.kind == "cuda" else 0

    def device_count(self) -> int:
        """Return the number of devices of this host; a CPU counts as one."""
        return torch.cuda.device_count() if self.kind == "cuda" else 1

    def set_device(self, index: int) -> None:
        """Make a device current."""
        if self.kind == "cuda":
            torch.cuda.set_device(index)

    def is_available(self) -> bool:
        """Return True."""
        return True

    def communication_backend_name(self) -> str:
        """Return the backend of torch.distributed for the device."""
        return "nccl" if self.kind == "cuda" else "gloo"

    def is_bf16_supported(self) -> bool:
        """Return whether bf16 can be computed; the CPU emulates it at worst."""
        return torch.cuda.is_bf16_supported() if self.kind == "cuda" else True

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for the device."""
        if self.kind == "cuda":
            torch.cuda.synchronize(device_index)

    def is_synchronized_device(self) -> bool:
        """Return whether operations are over when their calls return."""
        return self.kind == "cpu"

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the device."""
        return tensor.device.type == self.kind

    def pin_memory(self, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Return the tensor in page-locked memory; the tensor itself on the CPU."""
        return tensor.pin_memory() if self.kind == "cuda" else tensor

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return torch's function of that name for the device."""
        if name not in _ON_CPU:
            raise AttributeError(
                f"zerotrain's accelerator has no {name!r}; torch.cuda and torch have such functions. "
                f"{DOCUMENT} lists all names"
            )
        if self.kind == "cpu":
            return _ON_CPU[name]
        return _ON_CUDA.get(name) or getattr(torch.cuda, name)


def _zero(device_index: int | None = None) -> int:
    return 0


def _nothing(*_: Any, **__: Any) -> None:
    pass


_ON_CPU: Mapping[str, Callable[..., Any]] = {
    "empty_cache": _nothing,
    "get_rng_state": lambda device_index=None: torch.get_rng_state(),
    "initial_seed": torch.initial_seed,
    "is_fp16_supported": lambda: True,
    "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed,
    "max_memory_allocated": _zero,
    "max_memory_reserved": _zero,
    "memory_allocated": _zero,
    "memory_reserved": _zero,
    "random": lambda: torch.random,
    "range_pop": _nothing,
    "range_push": _nothing,
    "reset_peak_memory_stats": _nothing,
    "set_rng_state": lambda state, device_index=None: torch.set_rng_state(state),
    "supported_dtypes": lambda: [torch.float32, torch.float16, torch.bfloat16],
    "total_memory": lambda device_index=None: os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
}
"""Functions of the accelerator by name. A CPU has no device memory, and reads 0."""

_ON_CUDA: Mapping[str, Callable[..., Any]] = {
    "is_fp16_supported": lambda: True,
    "random": lambda: torch.random,
    "range_pop": lambda domain=None: torch.cuda.nvtx.range_pop(),  # type: ignore[no-untyped-call]
    "range_push": lambda msg, domain=None, category=None: torch.cuda.nvtx.range_push(msg),  # type: ignore[no-untyped-call]
    "set_rng_state": lambda state, device_index=None: torch.cuda.set_rng_state(
        state, "cuda" if device_index is None else device_index
    ),
    "get_rng_state": lambda device_index=None: torch.cuda.get_rng_state(
        "cuda" if device_index is None else device_index
    ),
    "supported_dtypes": lambda: [torch.float32, torch.float16, torch.bfloat16],
    "total_memory": lambda device_index=None: (
        torch.cuda.get_device_properties(
            torch.cuda.current_device() if device_index is None else device_index
        ).total_memory
    ),
}
"""Functions that torch.cuda does not have under this name."""


def get_accelerator() -> Accelerator:
    """Return the accelerator of this process."""
    return Accelerator("cuda" if torch.cuda.is_available() else "cpu")

"""`deepspeed.accelerator`: the device of this rank, queried through torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zerotrain.runtime.deepspeed.absent import attributes_of

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

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.kind == "cuda":
            torch.cuda.synchronize()

    def empty_cache(self) -> None:
        """Free cached device memory."""
        if self.kind == "cuda":
            torch.cuda.empty_cache()

    def memory_allocated(self) -> int:
        """Return the bytes of device memory in tensors; 0 on the CPU."""
        return torch.cuda.memory_allocated() if self.kind == "cuda" else 0

    def max_memory_allocated(self) -> int:
        """Return the peak of `memory_allocated`."""
        return torch.cuda.max_memory_allocated() if self.kind == "cuda" else 0


def get_accelerator() -> Accelerator:
    """Return the accelerator of this process."""
    return Accelerator("cuda" if torch.cuda.is_available() else "cpu")

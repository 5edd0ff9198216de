"""`deepspeed.accelerator`: the device under this rank, asked through torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zerotrain.runtime.deepspeed.absent import attributes_of

__all__ = ["get_accelerator"]

__getattr__ = attributes_of(__name__)


@dataclass(frozen=True, slots=True)
class Accelerator:
    """CUDA where there is CUDA, else the CPU."""

    kind: str

    def device_name(self, index: int | None = None) -> str:
        """As torch.device takes it."""
        return self.kind if index is None or self.kind == "cpu" else f"{self.kind}:{index}"

    def current_device_name(self) -> str:
        """As torch.device takes it."""
        return self.device_name(self.current_device())

    def current_device(self) -> int:
        """The number of this rank's device."""
        return torch.cuda.current_device() if self.kind == "cuda" else 0

    def device_count(self) -> int:
        """Devices of this host; a CPU counts as one."""
        return torch.cuda.device_count() if self.kind == "cuda" else 1

    def set_device(self, index: int) -> None:
        """Make a device current."""
        if self.kind == "cuda":
            torch.cuda.set_device(index)

    def is_available(self) -> bool:
        """Always."""
        return True

    def communication_backend_name(self) -> str:
        """torch.distributed's backend for it."""
        return "nccl" if self.kind == "cuda" else "gloo"

    def is_bf16_supported(self) -> bool:
        """Whether bf16 computes; the CPU emulates it at worst."""
        return torch.cuda.is_bf16_supported() if self.kind == "cuda" else True

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.kind == "cuda":
            torch.cuda.synchronize()

    def empty_cache(self) -> None:
        """Give cached device memory back."""
        if self.kind == "cuda":
            torch.cuda.empty_cache()

    def memory_allocated(self) -> int:
        """Bytes of device memory in tensors; 0 on the CPU."""
        return torch.cuda.memory_allocated() if self.kind == "cuda" else 0

    def max_memory_allocated(self) -> int:
        """Its peak."""
        return torch.cuda.max_memory_allocated() if self.kind == "cuda" else 0


def get_accelerator() -> Accelerator:
    """The accelerator of this process."""
    return Accelerator("cuda" if torch.cuda.is_available() else "cpu")

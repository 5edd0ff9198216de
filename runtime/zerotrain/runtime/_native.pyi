"""Typed view of the native module built from csrc/; see csrc/cpu/bindings.cpp."""

from collections.abc import Sequence

import torch

def isas() -> list[str]: ...
def adamw_(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    decoupled: bool = True,
    clear_grad: bool = False,
    threads: int = 1,
    isa: str = "",
) -> None: ...
def accumulate_(
    into: torch.Tensor,
    parts: Sequence[torch.Tensor],
    scale: float,
    *,
    overwrite: bool = False,
    threads: int = 1,
    isa: str = "",
) -> None: ...
def sum_squares(values: torch.Tensor, *, threads: int = 1, isa: str = "") -> float: ...

def aligned_buffer(num_bytes: int) -> torch.Tensor: ...

class SpillFile:
    """A scratch file without a name over one or more folders. Offsets, sizes and addresses: multiples of 4096."""

    def __init__(
        self,
        folders: Sequence[str],
        num_bytes: int,
        *,
        engine: str = "auto",
        queue_depth: int = 32,
        request_bytes: int = 1 << 20,
        stripe_bytes: int = 4 << 20,
    ) -> None: ...
    def read(self, offset: int, buffer: torch.Tensor) -> int: ...
    def write(self, offset: int, buffer: torch.Tensor) -> int: ...
    def wait(self, ticket: int) -> None: ...
    def resize(self, num_bytes: int) -> None: ...
    def close(self) -> None: ...
    def fileno(self, index: int = 0) -> int: ...
    def is_direct(self, index: int = 0) -> bool: ...
    def direct_reason(self, index: int = 0) -> str: ...
    def unlinked_by(self, index: int = 0) -> str: ...
    def allocation_reason(self, index: int = 0) -> str: ...
    @property
    def num_folders(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def engine(self) -> str: ...
    @property
    def engine_reason(self) -> str: ...
    @property
    def bytes_read(self) -> int: ...
    @property
    def bytes_written(self) -> int: ...

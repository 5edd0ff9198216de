"""Typed view of the native module built from csrc/; see csrc/cpu/bindings.cpp."""

from collections.abc import Sequence

import torch

def isas() -> list[str]: ...
def num_threads() -> int: ...
def num_usable_threads(root: str = "") -> int: ...

class Segment:
    """Hyperparameters of elements [start, stop) of an update; `step` counts from 1."""

    start: int
    stop: int
    def __init__(
        self,
        start: int,
        stop: int,
        *,
        lr: float,
        beta1: float = 0.0,
        beta2: float = 0.0,
        eps: float = 0.0,
        weight_decay: float = 0.0,
        step: int,
        bias_correction: bool = True,
        lr_decay: float = 0.0,
        initial_sum: float = 0.0,
    ) -> None: ...

class UpdateTask:
    """One optimizer step ("adam", "adamw", "adagrad" or "lion") over the elements of `grad`, independent of
    the place of its states."""

    def __init__(
        self,
        rule: str,
        segments: Sequence[Segment],
        grad: torch.Tensor,
        weight: torch.Tensor | None = None,
        *,
        grad_scale: float = 1.0,
        weight_is_master: bool = False,
        bf16_states: bool = False,
    ) -> None: ...
    @property
    def rule(self) -> str: ...
    @property
    def numel(self) -> int: ...
    @property
    def num_states(self) -> int: ...

def update_(
    task: UpdateTask,
    master: torch.Tensor | None,
    states: Sequence[torch.Tensor],
    *,
    start: int = 0,
    threads: int = 0,
    isa: str = "",
) -> None: ...
def accumulate_(
    into: torch.Tensor,
    parts: Sequence[torch.Tensor],
    scale: float,
    *,
    overwrite: bool = False,
    threads: int = 0,
    isa: str = "",
) -> None: ...
def sum_squares(values: torch.Tensor, *, threads: int = 0, isa: str = "") -> float: ...

class AdamUnit:
    """Elements [start, stop) of a unit that `Kernels.update` updates, by addresses of element `start`."""

    first: int
    def __init__(
        self,
        rule: str,
        segments: Sequence[Segment],
        *,
        grad_scale: float = 1.0,
        start: int,
        stop: int,
        first: int,
        second: int,
        grad: int,
        master: int = 0,
        remainder: int = 0,
        weight: int = 0,
    ) -> None: ...

class Kernels:
    """The kernels of csrc/cuda, on addresses; dtypes are "f32", "bf16", "f16" and "none"."""

    def sum_parts(
        self,
        into: int,
        parts: Sequence[int],
        *,
        dtype: str,
        numel: int,
        scale: float = 1.0,
        overwrite: bool = False,
        squares: int = 0,
        workspace: int = 0,
        stream: int = 0,
    ) -> None: ...
    def quantize(
        self,
        values: int,
        *,
        dtype: str,
        packed: int,
        bits: int,
        rows: int,
        row_stride: int,
        pieces: int,
        piece_stride: int,
        piece_numel: int,
        stream: int = 0,
    ) -> None: ...
    def dequantize(
        self, packed: int, into: int, *, dtype: str, bits: int, rows: int, numel: int, stream: int = 0
    ) -> None: ...
    def dequantize_sum(
        self, packed: int, into: int, *, bits: int, rows: int, numel: int, stream: int = 0
    ) -> None: ...
    def update(
        self,
        rule: str,
        units: Sequence[AdamUnit],
        *,
        grad: str,
        weight: str,
        factor: int = 0,
        found_inf: int = 0,
        stream: int = 0,
    ) -> None: ...
    @property
    def launches(self) -> int: ...

def host_kernels() -> Kernels: ...
def device_kernels(image: bytes, device: int) -> Kernels: ...
def driver_version() -> int: ...
def sum_workspace(numel: int) -> int: ...
def aligned_buffer(num_bytes: int) -> torch.Tensor: ...

class SpillFile:
    """Scratch file without a name, over one or more folders. Offsets and sizes are multiples of 4096."""

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

class SpillKey:
    def __init__(self, given: bytes | None = None) -> None: ...
    def view(self) -> memoryview: ...
    def wipe(self) -> None: ...

class Chunks:
    def __init__(
        self,
        data: torch.Tensor,
        table: bytearray,
        *,
        context: bytes,
        record: int,
        first: int,
        chunk_bytes: int,
    ) -> None: ...

class Sealer:
    """Encrypts and decrypts chunks; defined only where `openssl_version()` is not empty."""

    def __init__(self, key: SpillKey, *, first_counter: int = 0) -> None: ...
    def seal(self, chunks: Chunks) -> None: ...
    def open(self, chunks: Chunks) -> list[int]: ...
    def update(
        self, chunks: Chunks, task: UpdateTask, *, start: int, has_remainder: bool, element_bytes: int
    ) -> list[int]: ...
    def close(self) -> None: ...

def update_chunks(
    chunks: Chunks, task: UpdateTask, *, start: int, has_remainder: bool, element_bytes: int
) -> None: ...
def check_update(
    chunks: Chunks, task: UpdateTask, *, start: int, has_remainder: bool, element_bytes: int
) -> None: ...
def clear_vector_registers() -> None: ...
def openssl_version() -> str: ...
def key_memory() -> str: ...
def cipher_contexts_are_guarded() -> bool: ...
def aes_gcm_encrypt(key: SpillKey, nonce: bytes, associated: bytes, data: bytearray) -> bytes: ...
def aes_gcm_decrypt(key: SpillKey, nonce: bytes, associated: bytes, data: bytearray, tag: bytes) -> bool: ...

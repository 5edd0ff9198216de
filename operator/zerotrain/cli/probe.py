"""Measurement of this machine's speed for `zerotrain plan --probe`.

It copies, writes and multiplies for a few seconds. One process measures. Its result is a lower bound of what
several ranks reach together, and an upper bound of what is left for them beside other work. The network
between workers cannot be measured from one of them.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from zerotrain.contract.planner.machines import GB

COPY_BYTES = 256 << 20
FILE_BYTES = 512 << 20
BLOCK_BYTES = 1 << 20
QUEUE = 16
"""Number of requests in flight, and of threads."""
SECONDS = 0.6
MATMUL_SIZE = 1024
TORCH_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Names of torch's types, not the types: torch is imported late, and only if it is installed."""
MATMUL_PART = 0.7
"""Fraction of a bare matrix product's speed that training reaches."""


class ProbeError(Exception):
    """The folder is not writable."""


def measure(folder: Path, *, ranks: int, dtype: str) -> dict[str, float]:
    """Return the measured rates by their names in a plan. Raises ProbeError.

    `ranks` is the number of ranks that share the processor. `dtype` is the type of their matrix products, as
    named in a configuration.
    """
    found = {"host": host_gbps(), "nvme": disk_gbps(folder)}
    tflops = matmul_tflops(dtype)
    if tflops is not None:
        found["tflops"] = MATMUL_PART * tflops / ranks
    return found


def host_gbps() -> float:
    """Return the GB/s that one copying thread reads and writes together."""
    source, target = memoryview(bytearray(COPY_BYTES)), memoryview(bytearray(COPY_BYTES))
    target[:] = source
    rounds, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < SECONDS:
        target[:] = source
        rounds += 1
    return 2 * rounds * COPY_BYTES / elapsed / GB


def disk_gbps(folder: Path) -> float:
    """Return the GB/s of writing a file and reading it again.

    It bypasses the page cache where the file system allows it. The file has no name and is gone afterwards.
    """
    try:
        with scratch_file(folder) as handle:
            began = time.perf_counter()
            moved = _sweep(handle, writes=True) + _sweep(handle, writes=False)
            return moved / (time.perf_counter() - began) / GB
    except OSError as error:
        raise ProbeError(f"--probe {folder}: {error.strerror}") from error


@contextmanager
def scratch_file(folder: Path) -> Iterator[int]:
    """Yield the descriptor of a file without a name, past the page cache where the file system allows it."""
    flags = os.O_RDWR | os.O_TMPFILE
    try:
        handle = os.open(folder, flags | os.O_DIRECT, 0o600)
    except OSError:
        handle = os.open(folder, flags, 0o600)
    try:
        yield handle
    finally:
        os.close(handle)


def _sweep(handle: int, *, writes: bool) -> int:
    """Return the bytes moved until the time is up. The file is written or read at most once."""
    until = time.perf_counter() + SECONDS

    def transfer(first: int) -> int:
        block = mmap.mmap(-1, BLOCK_BYTES)  # page-aligned, as direct I/O requires
        moved = 0
        for offset in range(first * BLOCK_BYTES, FILE_BYTES, QUEUE * BLOCK_BYTES):
            if moved and time.perf_counter() > until:
                break
            moved += os.pwrite(handle, block, offset) if writes else os.preadv(handle, [block], offset)
        return moved

    with ThreadPoolExecutor(QUEUE) as pool:
        return sum(pool.map(transfer, range(QUEUE)))


def matmul_tflops(dtype: str) -> float | None:
    """Return a matrix product's TFLOP/s on the GPU if there is one, else on all cores; None without torch."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    on_cuda = torch.cuda.is_available()
    size, device = (8 * MATMUL_SIZE, "cuda") if on_cuda else (MATMUL_SIZE, "cpu")
    left = torch.ones(size, size, dtype=getattr(torch, TORCH_DTYPES[dtype]), device=device)
    rounds, began = -1, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < SECONDS:
        (left @ left).sum().item()  # waits for the device
        rounds += 1
        if rounds == 0:
            began = time.perf_counter()  # the first round is a warm-up
    return 2 * size**3 * max(1, rounds) / elapsed / 1e12

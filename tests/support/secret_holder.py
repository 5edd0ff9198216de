"""A process that holds spill store keys, for tests that inspect its memory: one sealer per backend, all used.

It prints one line of JSON when it is ready, with a sample per sealer by which the key can be recognised. It
ends when its standard input does.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import resource
import sys
from pathlib import Path

import torch

from tests.support.chunks import BACKENDS, CHUNK, IDENTITY, batch_of, sizes
from zerotrain.runtime.spill import secrecy
from zerotrain.runtime.spill.seal import Sealer

_PR_SET_DUMPABLE, _PR_SET_PTRACER, _ANY = 4, 0x59616D61, 2**64 - 1


def marker_of(pid: int) -> bytes:
    """Return 32 bytes that the process with this pid keeps in ordinary memory."""
    return hashlib.sha256(f"plain bytes of process {pid}".encode()).digest()


def _sample(sealer: Sealer, name: str) -> dict[str, str]:
    """Seal one chunk of zeros and return everything that is needed to open it except the key."""
    chunks = batch_of(sealer.add(name, sizes()))
    chunks.data.zero_()
    sealer.seal(chunks)
    record = chunks.record
    counter = bytes(record.table[16 * record.num_chunks :][:8])
    place = b"".join(field.to_bytes(4, "little") for field in (record.id, 0, 0, CHUNK, 1))
    return {
        "backend": name,
        "nonce": (record.id.to_bytes(4, "little") + counter).hex(),
        "associated": (record.context + place).hex(),
        "sealed": (bytes(chunks.data[:CHUNK].tolist()) + bytes(record.table[:16])).hex(),
    }


def _allow_cores() -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(_ANY), 0, 0, 0)
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    # A process inherits this, too, from one that had a spill store; here it is the system's default, private
    # and shared memory.
    Path("/proc/self/coredump_filter").write_text("0x33")


def main() -> None:
    """Hold the keys; arguments say how cores are treated.

    "allow" permits cores, "refuse" refuses them as engines do at their start, and "empty" only removes their
    contents.
    """
    if "allow" in sys.argv:
        _allow_cores()
    if "refuse" in sys.argv:
        secrecy.refuse_cores()
    if "empty" in sys.argv:
        secrecy._no_core_contents()
    marker = torch.frombuffer(bytearray(marker_of(os.getpid())), dtype=torch.uint8).clone()
    sealers = [make(IDENTITY) for make in BACKENDS.values()]
    print(
        json.dumps([_sample(sealer, name) for sealer, name in zip(sealers, BACKENDS, strict=True)]),
        flush=True,
    )
    sys.stdin.read()
    del marker


if __name__ == "__main__":
    main()

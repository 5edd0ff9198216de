"""Training of one parameter with known states on nvme, and a search for these states in the spill file.

It prints one line of JSON per configuration: which known patterns the bytes hold, and whether they compress.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections.abc import Mapping

import torch

import zerotrain.runtime as zt

NUMEL = 40_000
BLOCK = 4096


class Product(torch.nn.Module):
    """A module whose loss is the product of the weights and constants, so the constants are the gradient."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.weight = torch.nn.Parameter(torch.randn(NUMEL, generator=generator))
        self.register_buffer("constants", torch.randn(NUMEL, generator=generator).bfloat16())

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        """Return the loss, a scalar."""
        return (self.weight * self.get_buffer("constants")).sum() * scale


def patterns() -> Mapping[str, bytes]:
    """Return what is in memory after one step with a learning rate of zero, by name."""
    model = Product()
    master = model.weight.detach()
    grad = model.get_buffer("constants").float()
    bits = master.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    known = {
        "master": master,
        "remainder": (bits - (upper << 16)).short(),
        "weight": upper.short(),
        "gradient": grad,
        "gradient in bf16": grad.bfloat16(),
        "first moment": grad * torch.tensor(1 - 0.9),
        "second moment": grad * grad * torch.tensor(1 - 0.999),
    }
    return {name: bytes(values.view(torch.uint8).tolist()) for name, values in known.items()}


def spill_bytes(folder: str) -> bytes:
    """Return all bytes of the open, unlinked files in `folder`."""
    found = b""
    for descriptor in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{descriptor}"
        try:
            target = os.readlink(path)
        except OSError:
            continue
        if target.startswith(folder) and target.endswith("(deleted)"):
            with open(path, "rb") as file:
                found += file.read()
    return found


def held(file: bytes, known: Mapping[str, bytes]) -> list[str]:
    """Return the names of the patterns of which at least one of many 16-byte pieces is in the file."""
    return [
        name
        for name, values in known.items()
        if any(values[start : start + 16] in file for start in range(0, len(values) - 16, len(values) // 50))
    ]


def compressible_blocks(file: bytes) -> int:
    """Return the number of blocks that are neither untouched (zeros) nor like noise."""
    blocks = (file[start : start + BLOCK] for start in range(0, len(file), BLOCK))
    return sum(any(block) and len(zlib.compress(block)) < 0.99 * len(block) for block in blocks)


def main() -> None:
    """Train with each configuration; arguments are the folder, then configurations like "AEAD-master"."""
    folder, known = sys.argv[1], patterns()
    for case in sys.argv[2:]:
        encryption, encoding = case.split("-")
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "betas": [0.9, 0.999], "weight_decay": 0.0}},
            "bf16": {"enabled": True, "auto_cast": True, "store_param_remainders": encoding == "remainder"},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": folder},
                "spill": {"encryption": encryption},
            },
        }
        engine, *_ = zt.initialize(model=Product(), config=config)
        engine.backward(engine(torch.ones(())))
        engine.step()
        engine.synchronize()
        file = spill_bytes(folder)
        report = {"bytes": len(file), "held": held(file, known), "compressible": compressible_blocks(file)}
        print(json.dumps(report), flush=True)
        engine.close()


if __name__ == "__main__":
    main()

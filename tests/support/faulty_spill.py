"""A model that damages its own rank's spill file in the middle of a training; named by `model.factory`.

The rank itself does the damage, as no other process may open the files of a process that keeps secrets.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from tests.support.factory_models import TinyModel

VARIABLE = "TEST_SPILL_FAULT"
"""Name of the variable `<what>:<rank>:<forward call>`; no damage is done while it is unset."""

FOLDER_VARIABLE = "TEST_SPILL_FOLDER"

LIMIT_BYTES = 256 << 10


class FaultyModel(TinyModel):
    """A model that does damage at the end of a forward pass, when the file has no transfer in flight."""

    def __init__(self) -> None:
        super().__init__(width=96, dropout=0.1, step_seconds=0.0, poison=False)
        self._seen = b""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss = super().forward(ids)
        what, _, place = os.environ.get(VARIABLE, "").partition(":")
        if what and place.startswith(f"{os.environ['RANK']}:"):
            call = int(place.rpartition(":")[2])
            if int(self.calls) == call - 2:
                self._seen = Path(f"/proc/self/fd/{spill_descriptor()}").read_bytes()
            elif int(self.calls) == call:
                FAULTS[what](spill_descriptor(), self._seen)
        return loss


def spill_descriptor() -> int:
    """Return the descriptor of this process's only file in the spill folder."""
    folder = os.environ[FOLDER_VARIABLE]
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith(folder):
                found.append(int(name))
        except OSError:
            continue  # the descriptor of the listing itself
    (descriptor,) = found
    return descriptor


def _flip(descriptor: int, _before: bytes) -> None:
    with open(f"/proc/self/fd/{descriptor}", "r+b", buffering=0) as file:
        file.seek(5000)
        (byte,) = file.read(1)
        file.seek(5000)
        file.write(bytes([byte ^ 4]))


def _replay(descriptor: int, before: bytes) -> None:
    """Write back the file's content of one step ago, which was properly sealed then."""
    with open(f"/proc/self/fd/{descriptor}", "r+b", buffering=0) as file:
        assert file.write(before) == len(before)


def _truncate(descriptor: int, _before: bytes) -> None:
    os.ftruncate(descriptor, 4096 + 100)


def _become(path: str) -> Callable[[int, bytes], None]:
    def exchange(descriptor: int, _before: bytes) -> None:
        spare = os.open(path, os.O_RDWR)
        os.dup2(spare, descriptor)
        os.close(spare)

    return exchange


def _limit(_descriptor: int, _before: bytes) -> None:
    """Limit the size of every file to `LIMIT_BYTES`; logs are shorter."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, LIMIT_BYTES))


FAULTS: dict[str, Callable[[int, bytes], None]] = {
    "flip": _flip,
    "replay": _replay,
    "truncate": _truncate,
    "unreadable": _become("/proc/self/mem"),  # EIO at address 0
    "unwritable": _limit,
}


def build() -> nn.Module:
    """Build the model; the factory of the tests."""
    return FaultyModel()

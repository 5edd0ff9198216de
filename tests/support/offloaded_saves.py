"""Saves, loads and exports of one engine with offloaded states; run by `run_ranks`.

The tests check their memory, and their results while updates run in the background.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.support.background_saves import Gate, seeded
from tests.support.offloaded_engines import Place, digests, make, small_windows, spill_descriptors, train
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.zero.ledger import MemoryKind

M_MMAP_THRESHOLD = -3
STATE_BYTES = 12 * 8192 * 1024


class Large(nn.Module):
    """One embedding whose states take `STATE_BYTES`, with almost no activations."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8192, 1024)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embed(ids)
        return functional.softplus(hidden.float()).mean()


def growths(folder: str, place: Place, asynchronous: bool) -> dict[str, int]:
    """Return the bytes by which a save, an export and a load raise the process's peak, by action."""
    # Otherwise the allocator keeps freed memory, and growth depends on earlier allocations.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
    root = Path(folder)
    engine = make(place, root / "spill", model=Large())
    ids = torch.arange(8).view(4, 2)

    def step() -> dict[str, str]:
        engine.backward(engine(ids))
        engine.step()
        return digests(engine)  # the update is over

    step()
    saved = step()
    found = {
        "save": _growth(lambda: engine.save_checkpoint(root / "c", asynchronous=asynchronous)),
        "export": _growth(lambda: engine.save_16bit_model(root / "w", dtype="fp32")),
    }
    assert step() != saved
    found["load"] = _growth(lambda: engine.load_checkpoint(root / "c"))
    assert digests(engine) == saved
    engine.close()
    return found


def _growth(action: Callable[[], object]) -> int:
    """Return the peak of the resident memory during the action, above the memory that was resident before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    action()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split(f"{name}:")[1].split()[0])


def saved_while_training(root: str, place: Place) -> dict[str, Any]:
    """Save asynchronously, with updates in the background before and after the save."""
    folder = Path(root) / "asynchronous"
    engine = make(place, Path(root) / "spill")
    gate = Gate()
    seeded()
    train(engine, 3)
    promised = engine.save_checkpoint(folder, "x", asynchronous=True)
    snapshot = engine.memory.live_bytes(MemoryKind.SNAPSHOT)
    if not promised.durable:
        train(engine, 3)
        assert engine.last_save is None
    gate.open()
    engine.wait_for_checkpoint()
    engine.load_checkpoint(folder, "x")
    losses = train(engine, 4)
    after = digests(engine)
    engine.close()
    return {"durable": promised.durable, "snapshot": snapshot, "losses": losses, "after": after}


def saved_at_once(root: str, place: Place) -> dict[str, Any]:
    """Train the same with synchronous saves only and without a load."""
    engine = make(place, Path(root) / "spill")
    seeded()
    train(engine, 3)
    engine.save_checkpoint(Path(root) / "synchronous", "x", asynchronous=False)
    losses = train(engine, 4)
    after = digests(engine)
    engine.close()
    return {"losses": losses, "after": after}


def flip_a_bit(folder: Path) -> None:
    """Flip a bit in the middle of the largest spill file."""
    descriptor = max(spill_descriptors(folder), key=lambda number: os.fstat(number).st_size)
    with open(f"/proc/self/fd/{descriptor}", "r+b", buffering=0) as file:
        file.seek(os.fstat(descriptor).st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def saves_after_damage(root: str, place: Place) -> dict[str, Any]:
    """Save a whole checkpoint, damage the spill, and collect the errors of all ways to store the state."""
    folder, spill = Path(root) / "c", Path(root) / "spill"
    engine: Engine = make(place, spill)
    train(engine, 2)
    engine.save_checkpoint(folder)
    train(engine, 1)
    engine.checkpoint_state()
    flip_a_bit(spill)
    actions: list[Callable[[], object]] = [
        lambda: engine.save_checkpoint(folder),
        lambda: engine.save_checkpoint(folder, asynchronous=True),
        lambda: engine.save_16bit_model(Path(root) / "w", dtype="fp32"),
    ]
    return {"errors": [_error_of(action) for action in actions], "left": _names(folder)}


def saves_after_a_failed_update(root: str, place: Place) -> dict[str, Any]:
    """Damage the spill before an update in the background; collect the errors of all later actions."""
    folder, spill = Path(root) / "c", Path(root) / "spill"
    engine: Engine = make(place, spill)
    train(engine, 2)
    engine.save_checkpoint(folder)
    flip_a_bit(spill)
    actions: list[Callable[[], object]] = [
        lambda: train(engine, 3),
        lambda: engine.save_checkpoint(folder),
        lambda: engine.save_checkpoint(folder, asynchronous=True),
        lambda: engine.save_16bit_model(Path(root) / "w"),
        lambda: engine.load_checkpoint(folder),
    ]
    return {"errors": [_error_of(action) for action in actions], "left": _names(folder)}


def _error_of(action: Callable[[], object]) -> tuple[str, int | None]:
    try:
        action()
    except Exception as error:
        return type(error).__name__, getattr(error, "exit_code", None)
    return "none", None


def _names(folder: Path) -> list[str]:
    """Return the names of committed checkpoints."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")


def exported(root: str, places: list[Place]) -> list[dict[str, str]]:
    """Return SHA-256 of the exported weights of each place: as used in forward, and the masters."""
    small_windows()
    found = []
    for place in places:
        engine = make(place, Path(root) / "spill")
        train(engine, 3)
        digest = {}
        for dtype in ("bf16", "fp32"):
            folder = engine.save_16bit_model(Path(root) / f"{place.name}-{dtype}", dtype=dtype)
            engine.comm.gather_record([0.0])
            data = (folder / "model.safetensors").read_bytes()
            digest[dtype] = hashlib.sha256(data).hexdigest()
        engine.save_checkpoint(Path(root) / f"{place.name}-c", "x")
        engine.close()
        found.append(digest)
    return found

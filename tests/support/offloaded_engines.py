"""One rank of engines with states in memory or spilled, and their checkpoints; run by `run_ranks`."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.training import world
from tests.support.uneven_model import UnevenModel
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.zero import state as streams
from zerotrain.runtime.zero.state import MASTER, whole

TIERS = ("none", "cpu", "nvme")
VOCABULARY, WIDTH = 1031, 47
"""Sizes with several chunks of 16,384 elements per rank, and parameters across chunk boundaries."""

BEFORE, AFTER = 3, 10
"""Steps before the save and after it."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The location and the encoding of an engine's states."""

    tier: str = "none"
    remainders: bool = False
    stage: int = 3
    just_in_time: bool | None = None
    param_tier: str = "none"

    @property
    def name(self) -> str:
        return "-".join(str(value) for value in asdict(self).values())

    def config(self, spill: Path) -> dict[str, Any]:
        device: dict[str, Any] = {"device": self.tier, "nvme_path": str(spill)}
        if self.just_in_time is not None:
            device["just_in_time"] = self.just_in_time
        zero: dict[str, Any] = {"stage": self.stage, "stage3_param_persistence_threshold": 60}
        if self.tier != "none":
            zero["offload_optimizer"] = device
        if self.param_tier != "none":
            zero["offload_param"] = {
                "device": self.param_tier,
                "nvme_path": str(spill),
                "max_in_cpu": 0,
            }
        return {
            "train_batch_size": 4,
            "gradient_clipping": 0.05,
            "bf16": {"enabled": True, "store_param_remainders": self.remainders},
            "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8}},
        }


def make(place: Place, spill: Path, *, seed: int = 1, model: nn.Module | None = None) -> Engine:
    """Return an engine on the ranks of the default group."""
    spill.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    return zt.initialize(
        model=UnevenModel(VOCABULARY, WIDTH) if model is None else model, config=place.config(spill)
    )[0]


def spill_descriptors(folder: Path) -> list[int]:
    """Return open files of this process that had their name in the folder."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue  # the descriptor that lists the folder
        if target.startswith(f"{folder}/"):
            found.append(int(entry))
    return found


def train(engine: Engine, steps: int) -> list[float]:
    """Train on the same global batches at every number of ranks; return this rank's losses."""
    rank, ranks = world()
    losses = []
    for _ in range(steps):
        generator = torch.Generator().manual_seed(engine.global_steps)
        ids = torch.randint(VOCABULARY, (4, 9), generator=generator).chunk(ranks)[rank]
        loss = engine(ids)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def digests(engine: Engine, kind: str | None = None) -> dict[str, str]:
    """Return SHA-256 of this rank's streams of one kind, or of all and of the weights used in forward."""
    found = {
        f"{unit}/{name}": _sha256(whole(stream))
        for (unit, name), stream in engine.checkpoint_state().streams.items()
        if kind in (None, name)
    }
    if kind is None:
        with zt.full_parameters(engine.module):
            for name, value in engine.module.named_parameters():
                found[name] = _sha256(value.detach().flatten())
    return found


def _sha256(flat: torch.Tensor) -> str:
    return hashlib.sha256(flat.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()


def file_digests(folder: Path) -> list[str]:
    """Return SHA-256 of every rank's file of a checkpoint, as the manifest states them."""
    return [entry["sha256"] for entry in json.loads((folder / "manifest.json").read_text())["files"]]


def small_windows() -> None:
    """Set windows whose boundaries lie inside chunks, tiles and parameters."""
    streams.WINDOW_NUMEL = 5000


def save_all(root: str, places: list[Place]) -> dict[str, dict[str, Any]]:
    """Train, save to `<root>/<place>/x`, train on; return the state at the end, by place."""
    small_windows()
    return {place.name: _save(Path(root), place) for place in places}


def _save(root: Path, place: Place) -> dict[str, Any]:
    engine = make(place, root / "spill")
    train(engine, BEFORE)
    assert bool(spill_descriptors(root / "spill")) is ("nvme" in (place.tier, place.param_tier))
    masters = digests(engine, MASTER)
    engine.save_checkpoint(root / place.name, "x")
    losses = train(engine, AFTER)
    after = digests(engine)
    engine.close()
    return {"masters": masters, "losses": losses, "after": after}


def load_all(root: str, loads: list[tuple[str, Place, bool]]) -> list[dict[str, Any]]:
    """Load each (saved folder, place, whether to train on) into an engine with other weights."""
    small_windows()
    return [_load(Path(root), Path(source), place, goes_on) for source, place, goes_on in loads]


def _load(root: Path, source: Path, place: Place, goes_on: bool) -> dict[str, Any]:
    engine = make(place, root / "spill", seed=2)
    train(engine, 1)  # moments and generations of this engine, to be overwritten
    path, _ = engine.load_checkpoint(source, "x")
    assert path is not None
    assert engine.global_steps == BEFORE
    masters = digests(engine, MASTER)
    losses = train(engine, AFTER) if goes_on else []
    after = digests(engine)
    engine.close()
    return {"masters": masters, "losses": losses, "after": after}


def load_and_save_all(root: str, loads: list[tuple[str, Place, str]]) -> list[dict[str, str]]:
    """Load each (saved folder, place, target) and save it at once.

    Returns what this rank holds of the state that must be the same on all ranks.
    """
    small_windows()
    found = []
    for source, place, target in loads:
        engine = make(place, Path(root) / "spill", seed=2)
        engine.load_checkpoint(source, "x")
        engine.save_checkpoint(target, "x")
        held = {name: digest for name, digest in digests(engine).items() if "/" not in name}
        for unit, states in engine.optimizer.states.items() if place.stage == 0 else ():
            held |= {f"{unit}/{kind}": _sha256(states.read(kind)) for kind in (MASTER, *states.kinds)}
        found.append(held)
        engine.close()
    return found

"""One rank of engines that save and load parts, as DeepSpeed's arguments allow; run by `run_ranks`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import zerotrain.runtime as zt
from tests.support.resized_engines import make, train
from zerotrain.runtime.checkpoint import CheckpointError
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.zero.state import whole


def weights(engine: Engine) -> dict[str, torch.Tensor]:
    """Return whole weights by name, frozen ones included."""
    with zt.full_parameters(engine.module):
        return {name: value.detach().clone() for name, value in engine.module.named_parameters()}


def moments(engine: Engine) -> float:
    """Return the sum of the moments' absolute values, exactly 0.0 for a fresh optimizer."""
    return sum(
        float(whole(stream).abs().sum())
        for (_, kind), stream in engine.checkpoint_state().streams.items()
        if kind.startswith("exp_avg")
    )


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], prefix: str = "") -> bool:
    return all(torch.equal(value, right[name]) for name, value in left.items() if name.startswith(prefix))


def load_parts(folder: str) -> dict[str, Any]:
    """Load one checkpoint of step 3 in each way into a fresh engine; return what the engine then has."""
    engine = make("AdamW", 3)
    train(engine, 3)
    engine.save_checkpoint(folder, tag="all", client_state={"epoch": 1})
    saved = weights(engine)
    found: dict[str, Any] = {}
    ways: dict[str, dict[str, Any]] = {
        "everything": {},
        "module": {"load_module_only": True},
        "no optimizer": {"load_optimizer_states": False},
        "no schedule": {"load_lr_scheduler_states": False},
    }
    for name, options in ways.items():
        fresh = make("AdamW", 3, seed=9)
        random_before = torch.get_rng_state()
        path, client = fresh.load_checkpoint(folder, "all", **options)
        assert path is not None
        found[name] = {
            "same weights": same(weights(fresh), saved),
            "has moments": moments(fresh) > 0,
            "steps": fresh.global_steps,
            "updates": fresh.optimizer.num_updates,
            "schedule": fresh.schedule.state_dict()["num_updates"],
            "client": client,
            "own generators": torch.equal(random_before, torch.get_rng_state()),
        }
        train(fresh, 1)  # no load leaves a half-loaded state
    return found


def without_frozen(folder: str) -> dict[str, Any]:
    """Save without frozen parameters. They are not in the file and keep the values of the loading model."""
    engine = make("AdamW", 2)
    train(engine, 2)
    engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    fresh = make("AdamW", 2, seed=9)
    before = weights(fresh)
    refused = ""
    try:
        fresh.load_checkpoint(folder)
    except ValueError as error:
        refused = str(error)
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    path, _ = fresh.load_checkpoint(folder, load_module_strict=False)
    assert path is not None
    after, saved = weights(fresh), weights(engine)
    return {
        "refused": refused,
        "frozen kept": same(before, after, "base.") and not same(saved, after, "base."),
        "trained loaded": all(same(saved, after, prefix) for prefix in ("embed.", "blocks.", "scale")),
    }


def saves_between_steps(folder: str) -> dict[str, Any]:
    """Save before the first step, right after a load, between backward and step, and without `latest`."""
    engine = make("AdamW", 1)
    initial = weights(engine)
    engine.save_checkpoint(Path(folder) / "a")
    again = make("AdamW", 1, seed=9)
    again.load_checkpoint(Path(folder) / "a")
    found: dict[str, Any] = {"initial": same(initial, weights(again)), "step": again.global_steps}
    again.save_checkpoint(Path(folder) / "b")
    third = make("AdamW", 1, seed=10)
    third.load_checkpoint(Path(folder) / "b")
    found["again"] = same(initial, weights(third))
    train(third, 1)
    third.save_checkpoint(Path(folder) / "b", "hidden", save_latest=False)
    fourth = make("AdamW", 1)
    path, _ = fourth.load_checkpoint(Path(folder) / "b")
    found["latest"] = path.name if path else None
    fourth.load_checkpoint(Path(folder) / "b", "hidden")
    found["hidden"] = fourth.global_steps
    try:
        fourth.save_checkpoint(Path(folder) / "c", f"of-rank-{fourth.rank}")
    except CheckpointError as error:
        found["tags"] = str(error)
    found["left"] = [path.name for path in (Path(folder) / "c").glob("*of-rank*")]
    fourth.backward(fourth(torch.zeros(3, 9, dtype=torch.int64)))
    try:
        fourth.save_checkpoint(Path(folder) / "b")
    except RuntimeError as error:
        found["between"] = str(error)
    found["none"] = fourth.step() and make("AdamW", 1).load_checkpoint(Path(folder) / "empty")
    return found

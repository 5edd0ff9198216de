"""Writer of checkpoints in the format of DeepSpeed 0.19, made with plain torch and stand-in classes.

The layout is computed naively, by padding and chunking whole tensors. It is the reference for the importer's
interval arithmetic.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoint_states import full_value

GROUPS: tuple[tuple[tuple[str, tuple[int, ...]], ...], ...] = (
    (("embed.weight", (13, 5)), ("blocks.0.w", (7, 9))),
    (("blocks.0.b", (7,)), ("blocks.0.scale", ())),
)
FROZEN = (("lora.base", (11, 3)),)
KINDS = ("exp_avg", "exp_avg_sq")
STEP = 6


@contextlib.contextmanager
def made_up_classes() -> Iterator[types.SimpleNamespace]:
    """Provide classes under DeepSpeed's names that only the pickler needs to import."""
    before = set(sys.modules)
    found = types.SimpleNamespace()
    for module, name, base in (
        ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler", object),
        ("deepspeed.runtime.zero.config", "ZeroStageEnum", int),
        ("deepspeed.utils.tensor_fragment", "fragment_address", object),
    ):
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        made = type(name, (base,), {"__module__": module})
        setattr(sys.modules[module], name, made)
        setattr(found, name, made)
    try:
        yield found
    finally:
        for name in set(sys.modules) - before:
            if name.startswith("deepspeed"):
                del sys.modules[name]


def write(
    folder: Path,
    *,
    stage: int,
    world_size: int,
    extra: dict[str, Any] | None = None,
    named: Callable[[str], str] = str,
) -> Path:
    """Write a whole checkpoint below `folder`; return the folder of the tag.

    `extra` is client state. `named` maps the name of a parameter or buffer to the name that the run used.
    """
    path = folder / f"global_step{STEP}"
    path.mkdir(parents=True)
    (folder / "latest").write_text(path.name)
    with made_up_classes() as classes:
        for rank in range(world_size):
            state = _sharded(rank, world_size) if stage == 3 else _flat(rank, world_size)
            state |= {
                "zero_stage": classes.ZeroStageEnum(stage),
                "loss_scaler": _with(
                    classes.DynamicLossScaler(),
                    cur_scale=1024.0,
                    cur_iter=9,
                    last_overflow_iter=3,
                    cur_hysteresis=2,
                    dtype=torch.float16,
                ),
                "partition_count": [world_size] * len(GROUPS) if stage < 3 else world_size,
                "param_slice_mappings": [OrderedDict(a=_with(classes.fragment_address(), numel=3, start=0))],
                "ds_version": "0.19.8",
            }
            optimizer = {"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.19.8"}
            torch.save(optimizer, path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
            if stage == 3:
                name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
                torch.save(_named(_model(stage, rank, world_size), named) | (extra or {}), path / name)
        if stage < 3:
            model = _named(_model(stage, 0, world_size), named)
            torch.save(model | (extra or {}), path / "mp_rank_00_model_states.pt")
    return path


def _named(model: dict[str, Any], named: Callable[[str], str]) -> dict[str, Any]:
    def renamed(values: Any) -> Any:
        return None if values is None else type(values)((named(key), value) for key, value in values.items())

    return model | {
        "module": renamed(model["module"]),
        "buffer_names": [named(name) for name in model["buffer_names"]],
        "param_shapes": [renamed(group) for group in model["param_shapes"]],
        "frozen_param_shapes": renamed(model["frozen_param_shapes"]),
        "frozen_param_fragments": renamed(model["frozen_param_fragments"]),
        "shared_params": {named(alias): named(owner) for alias, owner in model["shared_params"].items()},
    }


def whole(fqn: str, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a 1-D tensor with the same numbers as in `checkpoint_states.make_state`."""
    return full_value(fqn, kind, torch.Size(shape).numel())


def _with(instance: Any, **values: Any) -> Any:
    instance.__dict__.update(values)
    return instance


def _flat(rank: int, world_size: int) -> dict[str, Any]:
    """Return a rank's state of stages 1 and 2.

    Each group is flattened, padded to a multiple of 2 * ranks and divided; the padding of the masters is cut
    off again.
    """
    masters, states = [], {}
    for index, group in enumerate(GROUPS):
        parts: dict[str, torch.Tensor] = {}
        for kind in ("master", *KINDS):
            flat = torch.cat([whole(fqn, kind, shape) for fqn, shape in group])
            padding = -flat.numel() % (2 * world_size)
            part = torch.cat([flat, torch.zeros(padding)]).chunk(world_size)[rank]
            held = max(0, min(part.numel(), flat.numel() - rank * part.numel()))
            parts[kind] = part[:held].clone() if kind == "master" else part.clone()
        masters.append(parts.pop("master"))
        states[index] = {"step": torch.tensor(float(STEP - 1)), **parts}
    return {
        "single_partition_of_fp32_groups": masters,
        "base_optimizer_state": {"state": states, "param_groups": _param_groups()},
        "param_alignment_paddings": [[0] * len(group) for group in GROUPS],
    }


def _sharded(rank: int, world_size: int) -> dict[str, Any]:
    """Return a rank's state of stage 3: every parameter is padded and divided by itself."""
    masters, states = [], {}
    for index, group in enumerate(GROUPS):
        parts = {
            kind: torch.cat([_cut(whole(fqn, kind, shape), rank, world_size) for fqn, shape in group])
            for kind in ("master", *KINDS)
        }
        masters.append(torch.nn.Parameter(parts.pop("master")))
        states[index] = {"step": torch.tensor(float(STEP - 1)), **parts}
    return {
        "fp32_flat_groups": masters,
        "optimizer_state_dict": {"state": states, "param_groups": _param_groups()},
    }


def _cut(flat: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    return torch.cat([flat, torch.zeros(-flat.numel() % world_size)]).chunk(world_size)[rank].clone()


def _param_groups() -> list[dict[str, Any]]:
    return [
        {"lr": 1e-3 * (i + 1), "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1 * i, "params": [i]}
        for i in range(len(GROUPS))
    ]


def _model(stage: int, rank: int, world_size: int) -> dict[str, Any]:
    frozen = {fqn: whole(fqn, "param", shape).bfloat16() for fqn, shape in FROZEN}
    module: dict[str, Any] = {"norm.mean": torch.arange(4.0)}
    fragments = None
    if stage == 3:
        fragments = {fqn: _cut(value, rank, world_size).bfloat16() for fqn, value in frozen.items()}
    else:
        module |= {
            fqn: value.view(shape) for (fqn, shape), value in zip(FROZEN, frozen.values(), strict=True)
        }
        module |= {fqn: whole(fqn, "x", shape).view(shape) for group in GROUPS for fqn, shape in group}
        module["head.weight"] = module["embed.weight"]
        if stage == 2:
            fragments = {fqn: module[fqn] for fqn, _ in FROZEN}
    return {
        "module": module,
        "buffer_names": ["norm.mean"],
        "param_shapes": [OrderedDict((fqn, torch.Size(shape)) for fqn, shape in group) for group in GROUPS],
        "frozen_param_shapes": {fqn: torch.Size(shape) for fqn, shape in FROZEN} if fragments else None,
        "frozen_param_fragments": fragments,
        "shared_params": {"head.weight": "embed.weight"},
        "lr_scheduler": {"last_batch_iteration": STEP - 2},
        "skipped_steps": 1,
        "global_steps": STEP,
        "global_samples": 8 * STEP,
        "dp_world_size": world_size,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": stage}},
        "ds_version": "0.19.8",
        "args": argparse.Namespace(lr=0.1, name="x"),
        "epoch": 2,
    }

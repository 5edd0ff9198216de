"""Conversion of a DeepSpeed checkpoint to one of ours: same rank files, manifest, atomic commit."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zerotrain.runtime.checkpoint.errors import CheckpointError
from zerotrain.runtime.checkpoint.fence import Owner, read_fence
from zerotrain.runtime.checkpoint.from_deepspeed.content import Contents, contents_of
from zerotrain.runtime.checkpoint.from_deepspeed.pickles import Inert, load_file, plain
from zerotrain.runtime.checkpoint.from_deepspeed.recognise import files_of
from zerotrain.runtime.checkpoint.from_deepspeed.renaming import with_plain_names
from zerotrain.runtime.checkpoint.manifest import FileEntry, Manifest
from zerotrain.runtime.checkpoint.names import BUFFER_PREFIX, check_tag, step_folder
from zerotrain.runtime.checkpoint.stepfolder import StepFolder

_OWN_KEYS = frozenset(
    {
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
        *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps"),
        *("global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version"),
        *("checkpoint_parallel_dimensions", "universal_checkpoint_info", "autoep_layers", "ds_autoep_layers"),
    }
)
"""Keys that DeepSpeed puts into the model file; everything else is the caller's client state."""


def convert(path: Path, destination: Path, *, tag: str | None) -> tuple[Path, list[str]]:
    """Import the checkpoint in `path` into the folder `destination`; return `(its path, notices)`.

    `tag` None = the usual name of the step. Raises CheckpointError and its subclasses, OSError.
    """
    files = files_of(path)
    models = [with_plain_names(load_file(file)) for file in files.model_files]
    optimizers = [load_file(file) for file in files.optimizer_files]
    contents = contents_of(models, optimizers)
    client_state, notices = _client_state(models[0])
    step = int(models[0].get("global_steps", 0))
    destination.mkdir(parents=True, exist_ok=True)
    owner = read_fence(destination) or Owner(attempt=1)
    folder = StepFolder(
        directory=destination,
        name=check_tag(tag) if tag is not None else step_folder(step, owner.attempt),
        step=step,
        owner=owner,
        world_size=len(optimizers),
    )
    if folder.final.exists():
        raise CheckpointError(f"{folder.final} exists; give another destination or a tag of its own")
    folder.discard()  # left by an import that was killed

    def manifest(entries: tuple[FileEntry, ...]) -> Manifest:
        return _manifest(folder, entries, contents, models[0], optimizers[0], client_state)

    try:
        for rank, tensors in enumerate(contents.files):
            folder.write_file(rank, tensors, {})
        folder.commit(manifest)
    except BaseException:
        folder.discard()
        raise
    return folder.final, notices


def _manifest(
    folder: StepFolder,
    entries: tuple[FileEntry, ...],
    contents: Contents,
    model: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    client_state: Mapping[str, Any],
) -> Manifest:
    shared = model.get("shared_params") or {}
    buffers = (key for key in contents.files[0] if key.startswith(BUFFER_PREFIX))
    return Manifest(
        step=folder.step,
        attempt=folder.owner.attempt,
        job_uid=folder.owner.job_uid,
        created_at=time.time(),
        world_size=folder.world_size,
        align=1,
        files=entries,
        units=contents.units,
        tensors=contents.tensors,
        aliases={str(alias): owner for alias, owner in shared.items() if owner in contents.tensors},
        buffers=tuple(sorted(key.removeprefix(BUFFER_PREFIX) for key in buffers)),
        scalars=_scalars(model, optimizer["optimizer_state_dict"]),
        client_state=client_state,
    )


def _scalars(model: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's scalars (see `Checkpoints.checkpoint_state`) from DeepSpeed's."""
    base = state.get("optimizer_state_dict") or state.get("base_optimizer_state") or {}
    steps, skipped = int(model.get("global_steps", 0)), int(model.get("skipped_steps", 0))
    schedule = model.get("lr_scheduler") or {}
    groups: Sequence[Mapping[str, Any]] = []
    states: Sequence[Mapping[str, Any]] = []
    if isinstance(base, list):
        states = base
    else:
        groups, states = base.get("param_groups", []), list(base.get("state", {}).values())
    updates = state.get("base_optimizer_state_step") or _updates(groups, states)
    return {
        "global_steps": steps,
        "skipped_steps": skipped,
        **({"global_samples": int(model["global_samples"])} if "global_samples" in model else {}),
        "optimizer": {
            "num_updates": int(updates if updates is not None else steps - skipped),
            "groups": [_group(group) for group in groups],
        },
        "scheduler": {"num_updates": int(schedule.get("last_batch_iteration", steps - skipped - 1)) + 1},
        "loss_scale": _loss_scale(state.get("loss_scaler")),
    }


def _updates(groups: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the optimizer steps made: torch counts per parameter, others per group; None = no count."""
    counts = [float(entry["step"]) for entry in (*groups, *states) if "step" in entry]
    return max(counts, default=None)


def _group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain values of a parameter group; texts and switches come from the configuration."""
    kept = {}
    for key, value in group.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = float(value)
        if key in ("betas", "name", "lr", "weight_decay", "eps", "momentum"):
            kept[key] = plain(value)
    return kept


def _loss_scale(scaler: object) -> dict[str, Any]:
    """Return the state of a dynamic scaler; empty for a fixed scale, which comes from the configuration."""
    values = scaler.__dict__.get("state") if isinstance(scaler, Inert) else None
    if not isinstance(values, Mapping) or "last_overflow_iter" not in values:
        return {}
    return {
        "scale": float(values["cur_scale"]),
        "iteration": int(values["cur_iter"]),
        "last_overflow": int(values["last_overflow_iter"]),
        "hysteresis": int(values.get("cur_hysteresis", 1)),
    }


def _client_state(model: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    kept: dict[str, Any] = {}
    notices = []
    for key, value in model.items():
        if key in _OWN_KEYS:
            continue
        try:
            kept[str(key)] = plain(value)
        except TypeError as error:
            notices.append(f"client state {key!r} was left out: {error}")
    return kept, notices

"""Recognition of the files of a DeepSpeed checkpoint by their names; nothing is opened but `latest`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from zerotrain.contract.regular_file import read_regular
from zerotrain.runtime.checkpoint.errors import CheckpointDamaged, CheckpointMismatch
from zerotrain.runtime.checkpoint.names import LATEST, MAX_RECORD_BYTES

_MODEL_SUFFIX = "_model_states.pt"
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_SHARDED_MODEL = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_PARALLEL = re.compile(r"(layer_\d|expert_|.*_expert_\d+_).*\.pt")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSpeedFolder:
    """The files of one checkpoint, in rank order."""

    path: Path
    model_files: tuple[Path, ...]
    """Model files: one per rank at stage 3, otherwise a single one."""
    optimizer_files: tuple[Path, ...]

    @property
    def world_size(self) -> int:
        return len(self.optimizer_files)


def deepspeed_path(directory: Path, tag: str | None = None) -> Path | None:
    """Return the folder of the checkpoint `tag` (None = the one that `latest` names, or `directory` itself)
    if DeepSpeed wrote it; None for a tag that is not a folder's name."""
    if tag is None:
        tag = _latest(directory) or "."
    elif tag in ("", ".", "..") or "/" in tag:
        return None
    path = directory / tag
    try:
        return path if any(path.glob(f"*{_MODEL_SUFFIX}")) else None
    except (OSError, ValueError):  # a name that is too long, or has a null byte
        return None


def files_of(path: Path) -> DeepSpeedFolder:
    """Return the files of a checkpoint. Raises CheckpointMismatch for tensor, pipeline or expert parallelism,
    CheckpointDamaged for missing files."""
    optimizer: dict[int, Path] = {}
    sharded: dict[int, Path] = {}
    single: list[Path] = []
    for file in sorted(path.iterdir()):
        if _PARALLEL.fullmatch(file.name):
            raise CheckpointMismatch(
                f"{file} belongs to pipeline or expert parallelism; only data-parallel checkpoints (ZeRO "
                "stages 1 to 3) can be imported"
            )
        for pattern, found in ((_OPTIMIZER, optimizer), (_SHARDED_MODEL, sharded)):
            if match := pattern.fullmatch(file.name):
                _check_model_parallel(file, match[2])
                found[int(match[1])] = file
        if match := _MODEL.fullmatch(file.name):
            _check_model_parallel(file, match[1])
            single.append(file)
    if not optimizer:
        raise CheckpointMismatch(
            f"{path} holds no *_optim_states.pt: it was written at ZeRO stage 0 or without an optimizer; "
            "load its module weights into the model with torch, then save a checkpoint"
        )
    folder = DeepSpeedFolder(
        path=path,
        model_files=tuple(single) or _in_order(sharded, path, "model"),
        optimizer_files=_in_order(optimizer, path, "optim"),
    )
    if len(folder.model_files) not in (1, folder.world_size):
        raise CheckpointDamaged(
            f"{path} has {len(folder.model_files)} model files for {folder.world_size} ranks; some are "
            "missing"
        )
    return folder


def _latest(directory: Path) -> str | None:
    try:
        text = read_regular(directory / LATEST, MAX_RECORD_BYTES).decode().strip()
    except (OSError, ValueError):
        return None
    # Our own `latest` is JSON; a name with a separator could lead out of the folder.
    return text if text and "{" not in text and "/" not in text and text != ".." else None


def _check_model_parallel(file: Path, rank: str) -> None:
    if int(rank):
        raise CheckpointMismatch(
            f"{file} is of model-parallel rank {int(rank)}; checkpoints of tensor parallelism cannot be "
            "imported"
        )


def _in_order(files: dict[int, Path], path: Path, what: str) -> tuple[Path, ...]:
    # Only the first gap is named: the numbers come from file names and may be absurd.
    missing = next((rank for rank in range(len(files) + 1) if rank not in files), 0)
    if missing < len(files) or not files:
        raise CheckpointDamaged(f"{path} lacks the *_{what}_states.pt file of rank {missing}")
    return tuple(files[rank] for rank in sorted(files))

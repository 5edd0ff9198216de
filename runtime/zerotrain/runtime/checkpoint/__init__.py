"""Durable checkpoints: JSON manifest, safetensors files, atomic commit, any number of ranks. No pickle.

The engine's `save_checkpoint` and `load_checkpoint` call `save` (or `begin`, which writes in the background)
and `load`. Its `claim_checkpoints` calls `open_attempt` once per folder: before the first save, in the
trainer at the start. `names` describes the folder, `stepfolder` the order of events. Names load on first use
(PEP 562): what the command line needs (manifests, names, digests) comes without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerotrain.runtime.checkpoint.background import BackgroundSave, SaveStage
    from zerotrain.runtime.checkpoint.errors import (
        CheckpointDamaged,
        CheckpointError,
        CheckpointFenced,
        CheckpointMismatch,
        CheckpointNoSpace,
        CheckpointNotWritable,
        CheckpointUnreadable,
    )
    from zerotrain.runtime.checkpoint.fence import Owner
    from zerotrain.runtime.checkpoint.group import ProcessGroupRanks, RankGroup, SingleRank
    from zerotrain.runtime.checkpoint.outcome import SaveResult
    from zerotrain.runtime.checkpoint.reader import LoadResult, load
    from zerotrain.runtime.checkpoint.staging import Staging
    from zerotrain.runtime.checkpoint.writer import (
        SaveOptions,
        begin,
        check_storable,
        claim_job,
        job_folder,
        open_attempt,
        owner_from_environment,
        save,
    )

_HOME = {
    "background": ("BackgroundSave", "SaveStage"),
    "errors": (
        "CheckpointDamaged",
        "CheckpointError",
        "CheckpointFenced",
        "CheckpointMismatch",
        "CheckpointNoSpace",
        "CheckpointNotWritable",
        "CheckpointUnreadable",
    ),
    "fence": ("Owner",),
    "group": ("ProcessGroupRanks", "RankGroup", "SingleRank"),
    "outcome": ("SaveResult",),
    "reader": ("LoadResult", "load"),
    "staging": ("Staging",),
    "writer": (
        "SaveOptions",
        "begin",
        "check_storable",
        "claim_job",
        "job_folder",
        "open_attempt",
        "owner_from_environment",
        "save",
    ),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "BackgroundSave",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointFenced",
    "CheckpointMismatch",
    "CheckpointNoSpace",
    "CheckpointNotWritable",
    "CheckpointUnreadable",
    "LoadResult",
    "Owner",
    "ProcessGroupRanks",
    "RankGroup",
    "SaveOptions",
    "SaveResult",
    "SaveStage",
    "SingleRank",
    "Staging",
    "begin",
    "check_storable",
    "claim_job",
    "job_folder",
    "load",
    "open_attempt",
    "owner_from_environment",
    "save",
]


def __getattr__(name: str) -> Any:
    try:
        module = _MODULE_OF[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

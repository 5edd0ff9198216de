"""Durable checkpoints: JSON manifest, safetensors files, atomic commit, any number of ranks. No pickle.

The engine's `save_checkpoint` and `load_checkpoint` call `save` and `load`, its `claim_checkpoints` calls
`open_attempt` once per folder: before the first save, in the trainer at the start.
See `names` for the folder, `writer` for the order of events.
"""

from zerotrain.runtime.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointFenced,
    CheckpointMismatch,
    CheckpointNoSpace,
    CheckpointNotWritable,
)
from zerotrain.runtime.checkpoint.fence import Owner
from zerotrain.runtime.checkpoint.group import ProcessGroupRanks, RankGroup, SingleRank
from zerotrain.runtime.checkpoint.reader import LoadResult, load
from zerotrain.runtime.checkpoint.writer import SaveResult, open_attempt, owner_from_environment, save

__all__ = [
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointFenced",
    "CheckpointMismatch",
    "CheckpointNoSpace",
    "CheckpointNotWritable",
    "LoadResult",
    "Owner",
    "ProcessGroupRanks",
    "RankGroup",
    "SaveResult",
    "SingleRank",
    "load",
    "open_attempt",
    "owner_from_environment",
    "save",
]

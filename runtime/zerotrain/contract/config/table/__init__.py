"""All rows of the table in the order of the documentation, with the headings that group them."""

from __future__ import annotations

from zerotrain.contract.config.keys import Key

from .batch import ACTIVATIONS, BATCH, LOGGING
from .offload import AIO, OFFLOAD
from .optimizer import OPTIMIZER
from .other import BLOCKS, CHECKPOINT, COMPILE, ELASTICITY, PROFILERS
from .parallel import PARALLEL
from .precision import PRECISION
from .scheduler import SCHEDULER
from .trackers import MONITORS
from .zero import REST, STAGE, STAGE3

SECTIONS: tuple[tuple[str, tuple[Key, ...]], ...] = (
    ("Batch and gradient", BATCH),
    ("ZeRO: all stages", STAGE),
    ("ZeRO: stage 3", STAGE3),
    ("ZeRO: offload", OFFLOAD),
    ("ZeRO: ZeRO++ and the rest", REST),
    ("Precision and communication", PRECISION),
    ("Optimizer", OPTIMIZER),
    ("Scheduler", SCHEDULER),
    ("Activation checkpointing", ACTIVATIONS),
    ("Logging", LOGGING),
    ("File I/O of the NVMe tier", AIO),
    ("Parallelism beyond data", PARALLEL),
    ("Checkpoint", CHECKPOINT),
    ("Elasticity", ELASTICITY),
    ("Trackers", MONITORS),
    ("Profilers and tuning", PROFILERS),
    ("Compiler", COMPILE),
    ("Other blocks of DeepSpeed", BLOCKS),
)

__all__ = ["KEYS", "SECTIONS"]

KEYS: tuple[Key, ...] = tuple(key for _, rows in SECTIONS for key in rows)

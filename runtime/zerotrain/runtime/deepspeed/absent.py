"""Errors for names of DeepSpeed that this package does not have: each gives the reason, the nearest
alternative, and the document to read."""

from __future__ import annotations

import difflib
import importlib.abc
import importlib.machinery
import opcode
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

PACKAGE = __name__.rpartition(".")[0]
DOCUMENT = "docs/deepspeed.md"

_PIPELINE = "pipeline parallelism is not part of zerotrain; ZeRO stage 3 shards the model instead"
_EXPERTS = (
    "expert parallelism is not part of zerotrain; a block with experts is sharded as one unit "
    "(zero_optimization.leaf_module, utils.set_z3_leaf_modules)"
)
_INFERENCE = (
    "inference kernels and servers are not part of zerotrain; engine.generate works, and save_16bit_model "
    "writes a folder for an inference server"
)
_TENSOR_PARALLEL = (
    "zerotrain divides no model by tensor parallelism; ZeRO stage 3 shards it instead, or pass "
    "initialize(mpu=...)"
)
_PROFILING = (
    "zerotrain has no FLOP counter; torch.utils.flop_counter.FlopCounterMode counts, and "
    "engine.last_step.seconds and engine.memory_status() tell times and memory"
)
_ATTENTION = "zerotrain has no kernels for attention; torch's run as the model calls them"
_CONFIG = "engine.config is the resolved configuration; zerotrain config show prints that of a file"
_LAUNCH = "zerotrain launch script.py starts the ranks, or torchrun"
ABSENT: Mapping[str, str] = {
    "DeepSpeedConfig": _CONFIG,
    "DeepSpeedTransformerConfig": _ATTENTION,
    "DeepSpeedTransformerLayer": _ATTENTION,
    "InferenceEngine": _INFERENCE,
    "PipelineEngine": _PIPELINE,
    "PipelineModule": _PIPELINE,
    "autotuning": "autotuning is not part of zerotrain; zerotrain plan computes what fits",
    "compression": "compression is not part of zerotrain",
    "elasticity": "the batch of a step is fixed, and any number of ranks loads a checkpoint",
    "env_report": "zerotrain doctor checks an installation, python -m torch.utils.collect_env a machine",
    "inference": _INFERENCE,
    "init_inference": _INFERENCE,
    "launcher": _LAUNCH,
    "linear": "OptimizedLinear is not part of zerotrain; PEFT's adapters train at every stage",
    "module_inject": _INFERENCE,
    "moe": _EXPERTS,
    "nebula": "checkpoints are written by engine.save_checkpoint alone",
    "ops.op_builder": "zerotrain's kernels are compiled when it is installed; nothing is built later",
    "ops.sparse_attention": _ATTENTION,
    "ops.transformer": _ATTENTION,
    "pipe": _PIPELINE,
    "profiling": _PROFILING,
    "runtime.config": _CONFIG,
    "sequence": "sequence parallelism is not part of zerotrain; all ranks are data-parallel",
    "tp_model_init": _TENSOR_PARALLEL,
}
"""Names below `deepspeed` that are absent, with the reason and the alternative. docs/deepspeed.md has the
same table."""


def text_for(module: str, name: str) -> str:
    """Return the message for a name that a module of this package does not have."""
    below = module.removeprefix(PACKAGE).lstrip(".")
    full = ".".join(filter(None, [below, name]))
    reason = next((ABSENT[part] for part in _outer(full) if part in ABSENT), None)
    if reason is not None:
        return f"deepspeed.{full} is not here: {reason}. See {DOCUMENT}"
    return f"zerotrain's deepspeed.{full} does not exist{_nearest(module, name)}. {DOCUMENT} lists all names"


def _outer(name: str) -> list[str]:
    """Return the dotted name and every name that contains it, innermost first."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _nearest(module: str, name: str) -> str:
    """Return a hint at the same name in another module, else at the most similar one in this module."""
    for other, found in list(sys.modules.items()):
        if other.startswith(PACKAGE) and name in getattr(found, "__all__", ()):
            return f"; it is in {'.'.join(['deepspeed', *other.split('.')[3:]])}"
    near = difflib.get_close_matches(name, getattr(sys.modules.get(module), "__all__", ()), n=1)
    return f"; the nearest is {near[0]!r}" if near else ""


def attributes_of(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module of this package.

    `from module import name` drops the text of an AttributeError, so that form raises an ImportError. The
    module also gets a path: Python itself refuses modules below one without, and gives no reason.
    """
    vars(sys.modules[module]).setdefault("__path__", [])

    def missing(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        text = text_for(module, name)
        if _is_import(sys._getframe(1)):
            raise ImportError(text, name=module)
        raise AttributeError(text)

    return missing


def _is_import(frame: types.FrameType) -> bool:
    code = frame.f_code.co_code
    return 0 <= frame.f_lasti < len(code) and opcode.opname[code[frame.f_lasti]] == "IMPORT_FROM"


class AbsentModules(importlib.abc.MetaPathFinder):
    """Last finder: for names below this package that no other finder knows."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Raise ModuleNotFoundError for a module of this package: at this point it does not exist."""
        if fullname.startswith(f"{PACKAGE}."):
            module, _, name = fullname.rpartition(".")
            raise ModuleNotFoundError(text_for(module, name), name=fullname)
        return None


def install() -> None:
    """Append the finder to the others, once."""
    if not any(isinstance(finder, AbsentModules) for finder in sys.meta_path):
        sys.meta_path.append(AbsentModules())

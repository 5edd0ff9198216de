"""The error for names that neither an engine nor its model has: the reason for some of DeepSpeed's, the
nearest name for others."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from zerotrain.runtime.facade.arguments import DOCUMENT

_TIERS = (
    "weights and states stay on the tier that zero_optimization.offload_param and offload_optimizer name, "
    "from initialize to close(), which frees them"
)
_CURRICULUM = "curricula and data efficiency are not part of zerotrain; the script's own loader decides"
ABSENT: Mapping[str, str] = {
    "load_module_state_dict": (
        "load_checkpoint reads checkpoints, zerotrain.runtime.load_weights files before initialize; "
        "engine.module.load_state_dict works within full_parameters(engine.module, modifier_rank=0)"
    ),
    "offload_states": _TIERS,
    "reload_states": _TIERS,
    "set_custom_curriculum_learning_schedule": _CURRICULUM,
    "set_data_post_process_func": _CURRICULUM,
}
"""DeepSpeed's names of an engine that are absent, with the reason and the alternative. docs/deepspeed.md has
the same table."""


def unknown_attribute(engine: object, name: str) -> AttributeError:
    """Return the error for a name that neither the engine nor its model has."""
    if (reason := ABSENT.get(name)) is not None:
        return AttributeError(f"the engine has no {name}: {reason}. See {DOCUMENT}")
    text = f"neither the engine nor its model has an attribute {name!r}"
    if name.startswith("_"):
        return AttributeError(text)
    near = difflib.get_close_matches(name, [each for each in dir(engine) if each[0] != "_"], n=1)
    nearest = f"; the nearest of the engine's is {near[0]!r}" if near else ""
    return AttributeError(f"{text}{nearest}. {DOCUMENT} lists the engine's names")

"""Models that a job may name instead of giving sizes, and the "auto" values that follow from a job's model.

The trainer builds the models, and the operator rejects unknown names before it creates pods.
"""

from __future__ import annotations

from collections.abc import Mapping

from zerotrain.contract.config import AutoValues
from zerotrain.contract.train_spec import GptSpec

PRESETS: Mapping[str, GptSpec] = {
    "gpt-1m": GptSpec(d_model=128, layers=5, heads=4, context=128),
    "gpt-5m": GptSpec(d_model=256, layers=7, heads=8, context=128),
    "gpt-25m": GptSpec(d_model=512, layers=8, heads=8, context=256),
    "gpt-125m": GptSpec(d_model=896, layers=13, heads=14, context=512),
    "gpt-350m": GptSpec(d_model=1024, layers=28, heads=16, context=1024),
    "gpt-1b": GptSpec(d_model=1792, layers=26, heads=28, context=1024),
}
"""Models by the name in a job's `model.preset`, which gives the parameters (vocabulary of 256 bytes)."""


def auto_values(*, d_model: int | None, preset: str | None, steps: int | None) -> AutoValues:
    """Return the values for "auto" and for absent step counts, used wherever a job's config is resolved."""
    if d_model is None and preset is not None and preset in PRESETS:
        d_model = PRESETS[preset].d_model
    return AutoValues(hidden_size=d_model, total_steps=steps)

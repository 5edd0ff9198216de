"""The memory planner: whether a job fits, what it needs of every tier, what would fit, how fast it can be.

It consists of pure functions over the engine's own byte formulas (`contract.memory`) and a model's sizes,
without torch. `zerotrain plan` calls it and, before any pod exists, the operator; the engine checks itself
against the same formulas when it starts.
"""

from .activations import ASSUMPTIONS, Activations, activations
from .demand import (
    ESTIMATES,
    Demand,
    Fit,
    Limit,
    Phase,
    Tier,
    TierDemand,
    Workload,
    demand,
)
from .flops import ModelFlops
from .machines import ACCELERATORS, RATE_NAMES, Accelerator, Rates, accelerator, peak_tflops, rates_of
from .model_config import read_shape, shape_of_config
from .pace import Pace, Part, flops_of, flops_per_token, pace
from .proposals import Proposal, nearest
from .published import CONVENTIONS, Convention, model_state_bytes
from .shape import Adapters, ModelShape, ShapeError, count_text, gpt_shape, guessed_shape
from .terms import Edits, Reader, Terms
from .text import bytes_text, decisive, summary, way_out

__all__ = [
    "ACCELERATORS",
    "ASSUMPTIONS",
    "CONVENTIONS",
    "ESTIMATES",
    "RATE_NAMES",
    "Accelerator",
    "Activations",
    "Adapters",
    "Convention",
    "Demand",
    "Edits",
    "Fit",
    "Limit",
    "ModelFlops",
    "ModelShape",
    "Pace",
    "Part",
    "Phase",
    "Proposal",
    "Rates",
    "Reader",
    "ShapeError",
    "Terms",
    "Tier",
    "TierDemand",
    "Workload",
    "accelerator",
    "activations",
    "bytes_text",
    "count_text",
    "decisive",
    "demand",
    "flops_of",
    "flops_per_token",
    "gpt_shape",
    "guessed_shape",
    "model_state_bytes",
    "nearest",
    "pace",
    "peak_tflops",
    "rates_of",
    "read_shape",
    "shape_of_config",
    "summary",
    "way_out",
]

"""The memory tables of papers and tutorials, as one formula with named conventions, and this engine's.

`zerotrain explain memory` prints them; docs/planner.md lists where published tables disagree with the
formula.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerotrain.contract.memory import ADAM_STATE_BYTES, MemoryInputs, gpu_persistent

STAGES = (0, 1, 2, 3)
WEIGHT_BYTES = 2
PUBLISHED_GRAD_BYTES = 2
ENGINE_GRAD_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Convention:
    """Bytes per parameter that a table counts. Activations, buffers and padding are in none of them."""

    name: str
    grad_bytes: int = PUBLISHED_GRAD_BYTES
    state_bytes: int = ADAM_STATE_BYTES
    """Bytes of [K]: fp32 master, first and second moment are 12; without the master 8; with remainders 10;
    two moments in bf16 alone 4."""

    @property
    def formula(self) -> str:
        return f"weights {WEIGHT_BYTES} + gradients {self.grad_bytes} + states {self.state_bytes}"


PAPER = Convention(name="ZeRO paper")
ENGINE = Convention(name="this engine", grad_bytes=ENGINE_GRAD_BYTES)
REMAINDERS = Convention(name="with remainders", grad_bytes=ENGINE_GRAD_BYTES, state_bytes=10)
WITHOUT_MASTERS = Convention(name="without masters", state_bytes=8)
BF16_STATES = Convention(name="with bf16 states", state_bytes=4)
CONVENTIONS = (PAPER, ENGINE, REMAINDERS, WITHOUT_MASTERS, BF16_STATES)


def model_state_bytes(parameters: int, *, ranks: int, stage: int, convention: Convention = PAPER) -> int:
    """Return the bytes of weights, gradients and optimizer states on one rank at a stage from 0 to 3."""
    if parameters < 1 or ranks < 1 or stage not in STAGES:
        raise ValueError(
            f"parameters and ranks must be at least 1 and stage one of {STAGES}; "
            f"got {parameters}, {ranks}, {stage}"
        )
    inputs = MemoryInputs(
        stage=stage,  # type: ignore[arg-type]  # checked above
        world_size=ranks,
        trainable_numel=parameters,
        compute_bytes=WEIGHT_BYTES,
        grad_bytes=convention.grad_bytes,
        optimizer_bytes=convention.state_bytes,
    )
    return gpu_persistent(inputs).total_bytes

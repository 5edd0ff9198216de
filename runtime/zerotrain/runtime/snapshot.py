"""Mapping between the engine's states, on any memory tier, and the streams of a `CheckpointState`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from zerotrain.runtime.optim.onebit import OneBitAdamRule
from zerotrain.runtime.optim.optimizer import ZeroOptimizer
from zerotrain.runtime.zero.sharded_model import ShardedModel
from zerotrain.runtime.zero.state import (
    MASTER,
    PARAM,
    StateStream,
    StreamKey,
    TensorStream,
    is_optional,
    whole,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadChoice:
    """Parts of a checkpoint that are loaded."""

    module_only: bool = False
    """Load weights and buffers only; steps and random generators stay."""
    optimizer_states: bool = True
    """Load moments, rates, update count and loss scale."""
    scheduler_states: bool = True

    def streams(self, streams: Mapping[StreamKey, StateStream]) -> dict[StreamKey, StateStream]:
        """Return the streams to read."""
        return {
            key: value for key, value in streams.items() if self.optimizer_states or key[1] in (MASTER, PARAM)
        }


def streams_of(core: ShardedModel, optimizer: ZeroOptimizer) -> dict[StreamKey, StateStream]:
    """Return this rank's interval of every master, moment and frozen weight: the engine's own state, not a
    copy.

    Collective under 1-bit Adam, whose errors are copies.
    """
    core.writes.take_over()
    streams: dict[StreamKey, StateStream] = {}
    for unit in core.units:
        if not unit.layout.trainable:
            streams[unit.name, PARAM] = unit.weight_stream
            continue
        states = optimizer.states[unit.name]
        for kind in (MASTER, *states.kinds):
            streams[unit.name, kind] = states.stream(kind)
    if isinstance(optimizer.rule, OneBitAdamRule):
        errors = optimizer.rule.error_streams(optimizer.states)
        streams.update((key, TensorStream(error)) for key, error in errors.items())
    return streams


@torch.no_grad()
def reload_weights(
    core: ShardedModel, optimizer: ZeroOptimizer, streams: Mapping[StreamKey, StateStream] | None = None
) -> None:
    """Rebuild everything that is derived from the streams: replicated states, compute weights, replicas.
    Collective. `streams`: those that `streams_of` made, where they were overwritten."""
    if isinstance(optimizer.rule, OneBitAdamRule):
        errors = {key: whole(stream) for key, stream in (streams or {}).items() if is_optional(key[1])}
        optimizer.rule.take_errors(optimizer.states, errors)
    for unit in core.units:
        unit.invalidate()
        states = optimizer.states.get(unit.name)
        if states is not None:
            states.replicate()
        if not unit.placement.params_sharded:
            core.comm.all_gather(unit.full.tensor, unit.shard, label=unit.name).wait()
    core.writes.forget(core.units)

"""The decision whether an engine's steps return before their updates are done; made with the engine."""

from __future__ import annotations

import os
from dataclasses import dataclass

from zerotrain.contract.config import ConfigError, EngineConfig
from zerotrain.contract.launch import CommEnv
from zerotrain.contract.memory.moved import updates_just_in_time
from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.comm.work import Delays
from zerotrain.runtime.offload.updater import Updater

KEY = "zero_optimization.offload_optimizer.just_in_time"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFacts:
    """Facts on which the decision rests; the same on every rank."""

    tier: str
    """Tier of the states: none, cpu or nvme."""
    stage: int
    world_size: int
    on_cuda: bool
    is_elementwise: bool
    """Whether the rule updates unit by unit, without collectives."""


def runs_just_in_time(requested: bool | None, facts: StepFacts) -> bool:
    """Return whether steps update just in time, by `updates_just_in_time`. Raises ConfigError when the user
    asks for it with an optimizer that works on all units together."""
    if facts.tier != "none" and not facts.is_elementwise:
        if requested:
            raise ConfigError(
                KEY,
                "needs an optimizer that updates each weight by itself",
                True,
                'Remove the key, or take "AdamW".',
            )
        return False
    return updates_just_in_time(
        requested, tier=facts.tier, stage=facts.stage, world_size=facts.world_size, on_cuda=facts.on_cuda
    )


def make_updater(config: EngineConfig, comm: Comm, *, is_elementwise: bool) -> Updater | None:
    """Return the thread that updates in the background, as configured; None = steps are synchronous.

    Raises ConfigError as `runs_just_in_time`.
    """
    offload = config.zero.offload_optimizer
    facts = StepFacts(
        tier="none" if offload is None else offload.device,
        stage=config.zero.stage,
        world_size=comm.world_size,
        on_cuda=comm.device.type == "cuda",
        is_elementwise=is_elementwise,
    )
    if not runs_just_in_time(None if offload is None else offload.just_in_time, facts):
        return None
    delays = Delays(CommEnv.from_env(os.environ).delay_seconds, seed=comm.world_size + comm.rank)
    return Updater(device=comm.device, pause=delays.pause)

"""Whether an engine's steps return before their updates are done; called by the engine when it is built."""

from __future__ import annotations

import os
from dataclasses import dataclass

from zerotrain.contract.config import ConfigError, EngineConfig
from zerotrain.contract.launch import CommEnv
from zerotrain.runtime.comm.delays import Delays
from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.offload.updater import Updater

KEY = "zero_optimization.offload_optimizer.just_in_time"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFacts:
    """What the decision rests on; the same on every rank."""

    tier: str
    """Where the states are: none, cpu or nvme."""
    stage: int
    world_size: int
    on_cuda: bool
    is_elementwise: bool
    """The rule updates unit by unit, without collectives."""


def runs_just_in_time(asked: bool | None, facts: StepFacts) -> bool:
    """The setting where it is given; else on where updates use what a forward pass leaves idle.

    That is a processor beside a GPU, or a disk. Stages 1 and 2 on several ranks stay synchronous unless
    asked: scripts read weights on one rank after a step, which then takes all ranks. Raises ConfigError when
    it is asked for with an optimizer that works on all units together.
    """
    if facts.tier == "none":
        return False
    if not facts.is_elementwise:
        if asked:
            raise ConfigError(
                KEY,
                "needs an optimizer that updates each weight by itself",
                True,
                'Remove the key, or take "AdamW".',
            )
        return False
    if asked is not None:
        return asked
    needs_all_ranks = facts.stage in (1, 2) and facts.world_size > 1
    return not needs_all_ranks and (facts.on_cuda or facts.tier == "nvme")


def make_updater(config: EngineConfig, comm: Comm, *, is_elementwise: bool) -> Updater | None:
    """The thread that updates in the background, as configured; None = steps are synchronous.

    Raises ConfigError, see `runs_just_in_time`.
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

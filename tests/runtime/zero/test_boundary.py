"""The step boundary: exact clipping, skipped steps, agreement to stop, ranks that diverged."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.ranks import RankFailed, run_ranks
from tests.support.tiny_models import token_batches
from tests.support.training import (
    GLOBAL_BATCH,
    Case,
    Outcome,
    largest_difference,
    micro_batches,
    train_reference,
    train_with_engine,
    world,
)
from zerotrain.runtime.comm.group import CommError
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.zero.state import whole

pytestmark = pytest.mark.ranks


CLIPPED = tuple(
    Case(stage=stage, clip=clip, accumulation=accumulation)
    for stage, clip, accumulation in ((0, 0.5, 1), (1, 0.5, 2), (2, 0.5, 1), (3, 0.5, 2), (3, 1e9, 1))
)


def train_all(cases: tuple[Case, ...]) -> list[Outcome]:
    return [train_with_engine(case) for case in cases]


@pytest.mark.parametrize("world_size", [1, 2])
def test_clipping_uses_the_global_norm(world_size: int) -> None:
    for outcomes in run_ranks(world_size, train_all, CLIPPED):
        for case, outcome in zip(CLIPPED, outcomes, strict=True):
            reference = train_reference(case, world_size)
            assert max(reference.norms) > 0.5, "the case does not clip"
            assert outcome.norms == pytest.approx(reference.norms, rel=1e-5)
            assert largest_difference(outcome, reference) < 1e-5, case


def engine_of(case: Case) -> tuple[nn.Module, Engine]:
    model = case.model()
    engine, *_ = zt.initialize(model=model, config=case.config(world()[1]))
    return model, engine


def state_bytes(engine: Engine) -> dict[str, bytes]:
    state = engine.checkpoint_state()
    streams = {
        f"{unit}/{kind}": whole(stream).cpu().numpy().tobytes()
        for (unit, kind), stream in state.streams.items()
    }
    counts = {"global_steps", "skipped_steps", "global_samples"}
    scalars = {key: value for key, value in state.scalars.items() if key not in counts}
    return {**streams, "scalars": repr(scalars).encode()}


def poisoned(stage: int, poison: float, where: str) -> dict[str, Any]:
    """Do two good steps, one whose gradient is poisoned on one rank alone, and one more good one.

    A poisoned loss reaches every element; a poisoned bias at the end of a unit only those of rank 1.
    """
    case = Case(stage=stage)
    model, engine = engine_of(case)
    rank, world_size = world()
    seen: dict[str, Any] = {"skipped": []}
    for step, batch in enumerate(token_batches(4, size=GLOBAL_BATCH)):
        before = state_bytes(engine)
        loss = engine(*micro_batches(batch, world_size=world_size, accumulation=1)[0][rank])
        if step == 2 and rank == 1 and where == "loss":
            loss = loss * poison
        handle = model.get_parameter("blocks.0.down.bias").register_hook(  # type: ignore[no-untyped-call]
            lambda grad, factor=poison if step == 2 and rank == 0 and where == "bias" else 1.0: grad * factor
        )
        engine.backward(loss)
        handle.remove()
        result = engine.step()
        seen["skipped"].append(result.skipped)
        if step == 2:
            seen["unchanged"] = state_bytes(engine) == before
            seen["lr_steps"] = engine.schedule.num_updates
    seen["steps"] = (engine.global_steps, engine.skipped_steps)
    with zt.full_parameters(model):
        seen["finite"] = all(bool(torch.isfinite(p).all()) for p in model.parameters())
    return seen


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("poison", "where"), [(float("nan"), "loss"), (float("inf"), "bias")])
def test_a_step_that_is_not_finite_changes_nothing(stage: int, poison: float, where: str) -> None:
    for seen in run_ranks(2, poisoned, stage, poison, where):
        assert seen["skipped"] == [False, False, True, False]
        assert seen["unchanged"]
        assert seen["finite"]
        assert seen["steps"] == (4, 1)
        assert seen["lr_steps"] == 2


def ask_to_stop(stage: int) -> list[bool]:
    _, engine = engine_of(Case(stage=stage, accumulation=2))
    rank, world_size = world()
    agreed = []
    for step, batch in enumerate(token_batches(3, size=GLOBAL_BATCH)):
        for parts in micro_batches(batch, world_size=world_size, accumulation=2):
            engine.backward(engine(*parts[rank]))
            if step == 1 and rank == 1:
                engine.request_stop()
            engine.step()
        agreed.append(engine.stop_agreed)
    return agreed


def test_all_ranks_agree_to_stop_at_the_same_step() -> None:
    assert run_ranks(2, ask_to_stop, 2) == [[False, True, True]] * 2


def diverge(stage: int) -> None:
    _, engine = engine_of(Case(stage=stage))
    rank, world_size = world()
    batch = token_batches(1, size=GLOBAL_BATCH)[0]
    engine.backward(engine(*micro_batches(batch, world_size=world_size, accumulation=1)[0][rank]))
    # The same operation of the same size for another reason: results would be wrong without a hang.
    engine.comm.all_gather(torch.zeros(2), torch.zeros(1), label=f"made by rank {rank}").wait()
    engine.step()


def test_ranks_that_diverged_get_a_named_error() -> None:
    with pytest.raises(RankFailed, match=r"ranks \[1\] issued other collectives than rank 0"):
        run_ranks(2, diverge, 1)


def lose_a_rank(stage: int) -> str:
    """Let rank 1 leave after its forward pass; return rank 0's error."""
    _, engine = engine_of(Case(stage=stage))
    rank, world_size = world()
    batch = token_batches(1, size=GLOBAL_BATCH)[0]
    loss = engine(*micro_batches(batch, world_size=world_size, accumulation=1)[0][rank])
    if rank == 1:
        return "left"
    try:
        engine.backward(loss)
        engine.step()
    except CommError as error:
        return str(error)
    return "nothing raised"


@pytest.mark.parametrize("stage", [1, 3])
def test_losing_a_rank_names_the_collective(stage: int) -> None:
    message, _ = run_ranks(2, lose_a_rank, stage)
    assert re.match(r"(all_gather|reduce_scatter) for '.+' on rank 0 failed, .* another rank ended", message)


def test_results_name_phases_and_ranks() -> None:
    for result in run_ranks(2, one_result):
        assert {"forward", "backward", "reduce", "optimizer", "gather", "wait"} <= result["seconds"].keys()
        assert len(result["rank_seconds"]) == 2
        assert result["ops"] == {"all_gather", "reduce_scatter"}
        assert result["sent"] > 0


def one_result() -> dict[str, Any]:
    _, engine = engine_of(Case(stage=3))
    engine.comm.timings.clear()
    rank, world_size = world()
    batch = token_batches(1, size=GLOBAL_BATCH)[0]
    engine.backward(engine(*micro_batches(batch, world_size=world_size, accumulation=1)[0][rank]))
    result = engine.step()
    return {
        "seconds": dict(result.seconds),
        "rank_seconds": result.rank_seconds,
        "ops": {sample.op for sample in engine.comm.timings},
        "sent": int(np.sum([sample.num_bytes for sample in engine.comm.timings])),
    }


def test_a_norm_that_is_not_a_number_is_no_bound() -> None:
    """The run does not check for overflow: torch's clip_grad_norm_ puts NaN into every gradient."""
    config = {"train_batch_size": 1, "gradient_clipping": 0.5}
    engine, *_ = zt.initialize(model=nn.Linear(4, 2), config=config)
    scales = [engine.pipeline.grad_scale(norm) for norm in (math.nan, math.inf, 0.0, 0.1, 5.0)]
    assert math.isnan(scales[0])
    assert scales[1:] == [0.0, 1.0, 1.0, pytest.approx(0.1, rel=1e-6)]
    engine.close()


def test_backward_wants_a_scalar() -> None:
    model = nn.Linear(2, 2)
    engine, *_ = zt.initialize(model=model, config=Case().config(1))
    with pytest.raises(ValueError, match=r"one element; got shape \(1, 2\)"):
        engine.backward(engine(torch.ones(1, 2)))

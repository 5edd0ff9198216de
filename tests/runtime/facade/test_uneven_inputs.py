"""`uneven_inputs: join`: ranks with unequal data train as one process that sees all of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import zerotrain.runtime as zt
from tests.support.ranks import run_ranks
from zerotrain.runtime.data.uneven import num_samples

STAGES = [0, 1, 2, 3]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(3, 2), 3),
        ([torch.zeros(4), torch.zeros(9)], 4),
        ({"weight": torch.tensor(1.0), "x": torch.zeros(2, 5)}, 2),
        ((None, {"x": torch.zeros(0, 5)}), 0),
        (["a", "b"], 2),
        ([], 0),
        ({}, 0),
        (None, 0),
    ],
)
def test_samples_of_a_batch(batch: Any, samples: int) -> None:
    assert num_samples(batch) == samples


@pytest.mark.unit
def test_what_has_no_samples_to_count_is_refused() -> None:
    with pytest.raises(TypeError, match="how many samples a batch of type object has"):
        num_samples(object())


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))


def rows_of(rank: int, count: int) -> torch.Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(100 + rank))


def batches_of(rank: int, sizes: list[int]) -> list[torch.Tensor]:
    return list(torch.split(rows_of(rank, sum(sizes)), sizes)) if sizes else []


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return (out - 1).square().mean()


def settings(stage: int, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "gradient_clipping": 0.7,
        "uneven_inputs": "join",
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }


def reference(all_sizes: list[list[int]], accumulation: int, epochs: int) -> list[float]:
    """Train in one process; a step takes the same batches of every rank and averages over all their rows."""
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.5)
    for _ in range(epochs):
        whole = [batches_of(rank, sizes) for rank, sizes in enumerate(all_sizes)]
        longest = max(map(len, whole))
        for first in range(0, longest, accumulation):
            taken = [row for each in whole for row in each[first : first + accumulation] if len(row)]
            if not taken:
                continue
            loss_of(made(torch.cat(taken))).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(made.parameters(), 0.7)
            optimizer.step()
            optimizer.zero_grad()
    return flat(made)


def flat(made: nn.Module) -> list[float]:
    return [value for parameter in made.parameters() for value in parameter.detach().flatten().tolist()]


def run_joined(stage: int, all_sizes: list[list[int]], accumulation: int, epochs: int, form: str) -> Any:
    rank, made = dist.get_rank(), model()
    weights = []
    if form == "shard":
        _, optimizer = zt.shard(made, settings(stage, accumulation))
        engine = optimizer.engine
    else:
        engine, *_ = zt.initialize(model=made, config=settings(stage, accumulation))
    for _ in range(epochs):
        for batch in engine.join(batches_of(rank, all_sizes[rank])):
            weights.append(engine.batch_weight)
            if form == "shard":
                optimizer.scale(loss_of(made(batch))).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            else:
                engine.backward(loss_of(engine(batch)))
                engine.step()
    with zt.full_parameters(made):
        return engine.global_steps, weights, flat(made)


CASES = {
    "shorter": ([[4, 4, 4], [4]], 1),
    "smaller last": ([[4, 4, 3], [4, 4, 1]], 1),
    "empty in between": ([[4, 4, 4], [4, 0, 4]], 1),
    "three ranks": ([[4], [4, 4, 2], [4, 4]], 1),
    "accumulation": ([[4, 4, 4], [4, 4, 4, 4, 4, 2]], 2),
    "accumulation, step cut off": ([[4, 4, 4], [4, 4]], 4),
}


@pytest.mark.ranks
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", CASES)
def test_the_result_is_that_of_one_process_with_all_data(name: str, stage: int) -> None:
    all_sizes, accumulation = CASES[name]
    expected = reference(all_sizes, accumulation, epochs=2)
    for steps, _, found in run_ranks(len(all_sizes), run_joined, stage, all_sizes, accumulation, 2, "engine"):
        assert steps == 2 * -(-max(map(len, all_sizes)) // accumulation)
        assert found == pytest.approx(expected, abs=2e-6)


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 3])
def test_a_loop_of_ones_own(stage: int) -> None:
    sizes = [[4, 4, 4], [4, 2]]
    expected = reference(sizes, 1, epochs=1)
    for _, weights, found in run_ranks(2, run_joined, stage, sizes, 1, 1, "shard"):
        assert weights[0] == 1.0
        assert found == pytest.approx(expected, abs=2e-6)


@pytest.mark.ranks
def test_even_data_is_not_weighted() -> None:
    for _, weights, _ in run_ranks(2, run_joined, 2, [[4, 4], [4, 4]], 1, 2, "engine"):
        assert weights == [1.0] * 4


def own_loader(sizes: list[int]) -> list[Any]:
    rank, made = dist.get_rank(), model()
    data = TensorDataset(rows_of(rank, sizes[rank]))
    engine, _, loader, _ = zt.initialize(model=made, config=settings(1), training_data=data)
    assert loader is not None
    steps = []
    for _ in range(2):
        for (batch,) in loader:
            engine.backward(loss_of(engine(batch)))
            engine.step()
        steps.append(engine.global_steps)
    return steps


@pytest.mark.ranks
def test_the_engines_own_loader_is_joined() -> None:
    # Two ranks of 12 samples have 6 each, that is 2 batches; of 30 they have 15, that is 4.
    assert run_ranks(2, own_loader, [12, 30]) == [[4, 8]] * 2


def misuse(way: str) -> str:
    rank, made = dist.get_rank(), model()
    engine, *_ = zt.initialize(model=made, config=settings(1))
    try:
        if way == "no data":
            list(engine.join([] if rank == 1 else [torch.ones(4, 8)]))
        elif way == "not trained":
            list(engine.join([torch.ones(4, 8)] * 2))
        else:
            _, optimizer = zt.shard(model(), settings(1))
            for batch in optimizer.engine.join(batches_of(rank, [4, 4] if rank == 0 else [4, 2])):
                loss_of(optimizer.engine.module(batch)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing raised"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("no data", "ranks [1] have no batch at all"),
        ("not trained", "every batch is trained before the next one is taken"),
        (
            "not scaled",
            "losses are weighted: call engine.backward(loss), or scale(loss).backward()",
        ),
    ],
)
def test_misuse_is_refused_on_every_rank(way: str, message: str) -> None:
    for text in run_ranks(2, misuse, way):
        assert message in text


@pytest.mark.ranks
def test_without_the_setting_batches_pass_as_they_are() -> None:
    engine, *_ = zt.initialize(model=model(), config=settings(1, uneven_inputs="error"))
    batches: Iterator[int] = engine.join([1, 2])
    assert list(batches) == [1, 2]

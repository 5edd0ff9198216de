"""Values of `p.grad` where the engine keeps gradients elsewhere, and errors with the remedy.

Other models in the process are not affected.
"""

from __future__ import annotations

import copy
import io
import logging
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad, clip_grad_norm_, clip_grad_value_, get_total_norm

import zerotrain.runtime as zt
from tests.support.ranks import run_ranks
from tests.support.training import world
from zerotrain.runtime.step import StepResult
from zerotrain.runtime.zero import torch_calls
from zerotrain.runtime.zero.slots import GradientSharded, ShardedGradient

WIDTH = 65
SHARDED = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_param": {"device": "nvme"}}
"""A configuration with which one rank shards; it shards only what it offloads."""


def config(**zero: Any) -> dict[str, Any]:
    if "offload_param" in zero:
        zero = {**zero, "offload_param": {"device": "nvme", "nvme_path": tempfile.mkdtemp()}}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def inputs() -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))


@contextmanager
def after_backward(**zero: Any) -> Iterator[tuple[nn.Module, Any, nn.Parameter]]:
    """Provide (model, optimizer of `shard`, one parameter) between backward and step."""
    made, optimizer = zt.shard(model(), config(**(zero or SHARDED)))
    made(inputs()).square().mean().backward()
    try:
        yield made, optimizer, made.get_parameter("0.weight")
    finally:
        optimizer.engine.close()


READS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda p: p.grad.norm(),
    "norm of data": lambda p: p.grad.data.norm(2),
    "detach": lambda p: p.grad.detach() + 1,
    "item": lambda p: p.grad[0, 0].item(),
    "sum": lambda p: float(p.grad.sum()),
    "numpy": lambda p: p.grad.clone().numpy(),
    "numpy of itself": lambda p: p.grad.numpy(),
    "numpy by force": lambda p: p.grad.numpy(force=True),
    "numpy's function": lambda p: numpy.asarray(p.grad),
    "list": lambda p: p.grad.tolist(),
    "address": lambda p: p.grad.data_ptr(),
    "bool": lambda p: bool(p.grad[0, 0]),
    "clone": lambda p: p.grad.clone(),
    "isnan": lambda p: torch.isnan(p.grad).any(),
    "foreach": lambda p: torch._foreach_norm([p.grad]),
    "noise": lambda p: p.grad.add_(torch.ones(WIDTH, WIDTH)),
    "clamp": lambda p: p.grad.clamp_(-1, 1),
    "copy": lambda p: torch.zeros(WIDTH, WIDTH).copy_(p.grad),
    "product": lambda p: p.grad.mul_(torch.ones(WIDTH, WIDTH)),
    "deepcopy": lambda p: copy.deepcopy(p.grad),
    "pickle": lambda p: pickle.dumps(p.grad),
}


@pytest.mark.unit
@pytest.mark.parametrize("name", READS)
def test_reading_a_gradient_that_is_elsewhere_names_the_ways_out(name: str) -> None:
    refused = pytest.raises(GradientSharded, match=r"'0\.weight'.*get_full_grad.*clip_grad_norm_")
    with after_backward() as (_, _, parameter), refused:
        READS[name](parameter)


@pytest.mark.unit
def test_facts_of_it_can_be_asked() -> None:
    with after_backward() as (_, optimizer, parameter):
        gradient: Any = parameter.grad
        assert isinstance(gradient, ShardedGradient)
        assert (gradient.shape, gradient.dtype, gradient.is_sparse) == ((WIDTH, WIDTH), torch.float32, False)
        assert "0.weight" in repr(gradient)
        assert type(parameter).__name__ == "ShardedParameter", "hidden as ever; its own class is kept"
        optimizer.step()
        assert parameter.grad is None
        with pytest.raises(GradientSharded, match="after the step"):
            gradient.zero_()


@pytest.mark.unit
def test_a_gradient_that_was_put_in_its_place_is_refused() -> None:
    with after_backward() as (_, optimizer, parameter):
        parameter.grad = torch.ones(WIDTH, WIDTH)
        with pytest.raises(GradientSharded, match=r"'0\.weight'.*an assignment.*set_full_grad"):
            optimizer.step()


@pytest.mark.unit
def test_one_that_was_put_in_place_of_a_view_counts() -> None:
    with after_backward(stage=0) as (_, optimizer, parameter):
        parameter.grad = torch.ones(WIDTH, WIDTH)
        assert torch.equal(zt.get_full_grad(parameter), torch.ones(WIDTH, WIDTH))
        optimizer.step()


@pytest.mark.unit
def test_a_penalty_alone_is_trained_and_bounded() -> None:
    """No module's hook sees this backward pass."""
    made, optimizer = zt.shard(model(), config(stage=0))
    weight = made.get_parameter("0.weight")
    weight.square().sum().backward()  # type: ignore[no-untyped-call]
    expected = 2 * weight.detach().norm()
    assert clip_grad_norm_(made.parameters(), 1.0) == pytest.approx(float(expected), rel=1e-5)
    assert optimizer.step().grad_norm == pytest.approx(1.0, rel=1e-4)
    weight.square().sum().backward()  # type: ignore[no-untyped-call]
    optimizer.zero_grad()
    assert optimizer.step().grad_norm == 0.0
    optimizer.engine.close()


@pytest.mark.unit
@pytest.mark.parametrize("zero", [{"stage": 0}, SHARDED])
def test_hooks_before_the_update_may_read_and_bound(zero: dict[str, Any]) -> None:
    with after_backward(**zero) as (made, optimizer, parameter):
        seen: list[Any] = []

        def look(result: StepResult) -> None:
            seen.append((result.step, result.at_boundary, float(zt.get_full_grad(parameter).norm())))
            clip_grad_norm_(made.parameters(), 1e-3)

        handle = optimizer.engine.register_step_hook(look, before_update=True)
        assert optimizer.step().grad_norm == pytest.approx(1e-3, rel=1e-2)
        handle.remove()
        optimizer.step()
        assert [each[:2] for each in seen] == [(1, True)]
        assert seen[0][2] > 0.0


@pytest.mark.unit
def test_bounds_in_forward_and_of_other_orders_are_refused() -> None:
    with after_backward() as (made, _, _):
        with pytest.raises(ValueError, match=r"norm_type must be positive.*get_full_grad"):
            clip_grad_norm_(made.parameters(), 1.0, -1.0)
        handle = made.get_submodule("1").register_forward_pre_hook(
            lambda *_: clip_grad_norm_(made.parameters(), 1.0)
        )
        with pytest.raises(
            RuntimeError, match="clip_grad_norm_ is not possible while the model is in forward"
        ):
            made(inputs())
        handle.remove()


@pytest.mark.unit
def test_a_norm_that_is_not_finite() -> None:
    made, optimizer = zt.shard(model(), config(**SHARDED))
    (made(inputs()).square().mean() * float("inf")).backward()
    with pytest.raises(RuntimeError, match="is non-finite"):
        clip_grad_norm_(made.parameters(), 1.0, error_if_nonfinite=True)
    assert not torch.isfinite(clip_grad_norm_(made.parameters(), 1.0))
    assert optimizer.step().skipped
    optimizer.engine.close()


@pytest.mark.unit
def test_gradients_that_are_never_averaged_are_refused() -> None:
    one_bit = {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 1}}
    made, optimizer = zt.shard(model(), {**config(stage=0), "optimizer": one_bit})
    for _ in range(2):
        made(inputs()).square().mean().backward()
        optimizer.step()
    made(inputs()).square().mean().backward()
    with pytest.raises(RuntimeError, match="the 1-bit optimizer takes every rank's own gradient"):
        clip_grad_norm_(made.parameters(), 1.0)
    optimizer.engine.close()


@pytest.mark.unit
def test_a_scaler_is_refused_where_the_engine_scales() -> None:
    made, optimizer = zt.shard(model(), {**config(stage=0), "fp16": {"enabled": True}})
    scaler = torch.amp.GradScaler("cpu")
    loss = made(inputs().half()).float().square().mean()
    optimizer.scale(scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match=r"GradScaler.*enabled=False"):
        scaler.step(optimizer)
    optimizer.engine.close()


def gradient_of(made: nn.Module) -> torch.Tensor:
    gradient = made.get_parameter("0.weight").grad
    assert gradient is not None
    return gradient


@pytest.mark.unit
def test_other_models_are_left_alone() -> None:
    plain, twin = model(), model()
    with after_backward() as (made, _, _):
        for each in (plain, twin):
            each(inputs()).square().mean().backward()
        expected = clip_grad_norm_.__wrapped__(twin.parameters(), 0.01)  # type: ignore[attr-defined]
        assert torch.equal(clip_grad_norm_(plain.parameters(), 0.01), expected)
        assert torch.equal(gradient_of(plain), gradient_of(twin))
        clip_grad_value_(plain.parameters(), 1e-5)
        assert gradient_of(plain).abs().max() <= 1e-5
        plain.zero_grad()
        assert get_total_norm([]) == 0.0
        assert all(parameter.grad is None for parameter in plain.parameters())
        with pytest.warns(UserWarning, match="empty generator"):
            clip_grad_norm_(nn.Identity().parameters(), 1.0)
        assert made.get_parameter("0.weight").grad is not None
        assert nn.Parameter.__dict__.keys() == _parameter_class, "the class of parameters is torch's"


_parameter_class = nn.Parameter.__dict__.keys()


@pytest.mark.unit
def test_an_engine_s_parameters_and_others_in_one_call() -> None:
    plain, first, second = model(), model(), model()
    for each in (plain, first, second):
        each(inputs()).square().mean().backward()
    expected = clip_grad_norm_([*first.parameters(), *second.parameters()], 0.01)
    with after_backward() as (made, optimizer, _):
        together = [*made.parameters(), *plain.parameters()]
        assert clip_grad_norm_(together, 0.01) == pytest.approx(float(expected), rel=1e-5)
        assert torch.allclose(gradient_of(plain), gradient_of(first), atol=1e-9)
        grads = [each.grad for each in together if each.grad is not None]
        assert float(get_total_norm(grads)) == pytest.approx(0.01, rel=1e-3)
        assert optimizer.step().grad_norm == pytest.approx(0.01 / 2**0.5, rel=1e-3)


@pytest.mark.unit
def test_a_closed_engine_leaves_parameters_to_torch() -> None:
    with after_backward(stage=0) as (made, _, _):
        pass
    for parameter in made.parameters():
        parameter.grad = torch.ones_like(parameter)
    count = sum(parameter.numel() for parameter in made.parameters())
    assert clip_grad_norm_(made.parameters(), 1.0) == pytest.approx(count**0.5)


@pytest.mark.unit
def test_functions_that_torch_builds_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(parameters: Any) -> str:
        return "torch's"

    monkeypatch.setattr(clip_grad, "clip_grad_value_", theirs)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_value_", theirs)
    with pytest.warns(UserWarning, match="defines clip_grad_value_ in another way"):
        torch_calls._replace("clip_grad_value_", lambda original, parameters: "ours")
    with after_backward(stage=0) as (made, _, _):
        assert torch.nn.utils.clip_grad_value_(made.parameters()) == "ours"  # type: ignore[call-arg]


IMPORTED_BEFORE = """
from torch.nn.utils import clip_grad_norm_
import torch
import zerotrain.runtime as zt
config = {"train_batch_size": 1, "bf16": {"enabled": True}}
model, optimizer = zt.shard(torch.nn.Linear(8, 8), config)
model(torch.ones(1, 8).bfloat16()).float().square().sum().backward()
assert clip_grad_norm_(model.parameters(), 1e-3) > 1e-2
assert optimizer.step().grad_norm < 1.1e-3
"""


@pytest.mark.ranks
def test_names_that_were_imported_before() -> None:
    subprocess.run([sys.executable, "-c", IMPORTED_BEFORE], check=True)


@pytest.mark.unit
def test_one_notice_at_the_start_names_the_ways(caplog: pytest.LogCaptureFixture) -> None:
    from zerotrain.runtime import notices

    notices.log_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="zerotrain"):
        for zero in (SHARDED, SHARDED, {"stage": 0}):
            with after_backward(**zero):
                pass
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 1
    assert "get_full_grad" in texts[0]
    assert "register_step_hook" in texts[0]


def on_one_rank(stage: int) -> list[str]:
    """Make changes on one rank only: they are undone or named, so that replicas stay equal."""
    made, optimizer = zt.shard(model(), config(stage=stage, stage3_param_persistence_threshold=0))
    rank, found = world()[0], []
    made(inputs() * (1 + rank)).square().mean().backward()
    norm = torch.tensor(1.0 + rank)
    try:
        torch.nn.utils.clip_grads_with_norm_(made.parameters(), 1.0, norm)
    except RuntimeError as error:
        found.append(str(error))
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    factor = float("inf") if rank == 1 else 1.0
    scaler.scale(made(inputs()).square().mean() * factor).backward()
    scaler.step(optimizer)
    scaler.update()
    found.append(f"{optimizer.num_updates} updates, scale {scaler.get_scale()}")
    optimizer.zero_grad()
    scaler.scale(made(inputs()).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    found.append(f"{optimizer.num_updates} updates, scale {scaler.get_scale()}")
    optimizer.engine.close()
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_agree(stage: int) -> None:
    for texts in run_ranks(2, on_one_rank, stage):
        assert "another total_norm on each rank (1.0 on rank 0" in texts[0]
        assert texts[1:] == ["0 updates, scale 4.0", "1 updates, scale 4.0"]


def late(stage: int) -> list[float]:
    """Return norms of two steps with a penalty on weights.

    Its gradient comes before or after those of the modules.
    """
    made, optimizer = zt.shard(model(), config(stage=stage))
    norms = []
    for _ in range(2):
        made(inputs()).square().mean().backward()
        penalty = sum((each.square().sum() for each in made.parameters()), torch.zeros(()))
        penalty.backward()  # type: ignore[no-untyped-call]
        norms.append(float(clip_grad_norm_(made.parameters(), 1e6)))
        (made(inputs()).square().mean() + sum(each.square().sum() for each in made.parameters())).backward()
        norms.append(optimizer.step().grad_norm)
    optimizer.engine.close()
    return norms


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_outside_of_modules(stage: int) -> None:
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = []
    for _ in range(2):
        for _ in range(2):
            loss = plain(inputs()).square().mean() + sum(each.square().sum() for each in plain.parameters())
            loss.backward()
            expected.append(float(clip_grad_norm_(plain.parameters(), 1e6)))
        optimizer.step()
        optimizer.zero_grad()
    for norms in run_ranks(2, late, stage):
        assert norms == pytest.approx(expected, rel=1e-4)


def saved_gradients(stage: int) -> list[tuple[int, Any, Any]]:
    """Return size, reloaded value and deep copy of every gradient between `backward` and `step`."""
    made, optimizer = zt.shard(model(), config(stage=stage))
    made(inputs()).square().mean().backward()
    found = []
    for each in made.parameters():
        assert each.grad is not None
        assert each.grad.untyped_storage().nbytes() < 1 << 20  # else saving it ends the process
        stored = io.BytesIO()
        torch.save(each.grad, stored)
        size = stored.tell()
        stored.seek(0)
        pickled = pickle.loads(pickle.dumps(each.grad))  # noqa: S301
        assert torch.equal(pickled, each.grad)
        found.append((size, torch.load(stored).numpy(), copy.deepcopy(each.grad).numpy()))
    optimizer.engine.close()
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_are_saved_and_copied_as_their_own_values(stage: int) -> None:
    plain = model()
    plain(inputs()).square().mean().backward()
    for gradients in run_ranks(2, saved_gradients, stage):
        for (size, stored, copied), each in zip(gradients, plain.parameters(), strict=True):
            assert size < 100_000
            assert each.grad is not None
            torch.testing.assert_close(torch.from_numpy(stored), each.grad)
            torch.testing.assert_close(torch.from_numpy(copied), each.grad)

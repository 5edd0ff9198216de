"""fp32 arguments reach a low-precision model unchanged unless `auto_cast` requests a cast.

If torch cannot mix the dtypes, its error names the arguments and the switch.
"""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.ranks import run_ranks
from zerotrain.runtime.facade.dtype_errors import explain_arguments

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = [999.0, 1001.0]
"""Values that are both 1000 in bf16."""


class Pair(NamedTuple):
    first: Any
    second: Any


class Keeper(nn.Module):
    """A module that stores its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        self.seen = [*rest, *named.values()]
        out: torch.Tensor = self.layer(x.to(self.layer.weight.dtype))
        return out


def config(dtype: str, stage: int = 0, *, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **({dtype: {"enabled": True, **more}} if dtype != "fp32" else {}),
    }


def by_engine(model: nn.Module, settings: dict[str, Any]) -> Callable[..., Any]:
    engine, *_ = zt.initialize(model=model, config=settings)
    return engine


def by_shard(model: nn.Module, settings: dict[str, Any]) -> Callable[..., Any]:
    return zt.shard(model, settings)[0]


WAYS = pytest.mark.parametrize("enter", [by_engine, by_shard])


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def nested() -> tuple[Any, ...]:
    values = [torch.tensor(STEPS) for _ in range(5)]
    return values[0], [values[1]], {"t": (values[2],)}, Pair(values[3], 7), OrderedDict(b=[{"c": values[4]}])


@pytest.mark.unit
@WAYS
@pytest.mark.parametrize("dtype", DTYPES)
def test_they_arrive_as_they_are(enter: Callable[..., Any], dtype: str) -> None:
    model = Keeper()
    call = enter(model, config(dtype))
    call(torch.ones(2, 4), *nested(), timestep=torch.tensor(STEPS), mask=torch.ones(2, dtype=torch.float64))
    seen = tensors_in(model.seen)
    assert [tensor.dtype for tensor in seen] == [*[torch.float32] * 6, torch.float64]
    assert all(tensor.tolist() == STEPS for tensor in seen[:6])


@pytest.mark.unit
@WAYS
@pytest.mark.parametrize("dtype", DTYPES)
def test_auto_cast_casts_fp32_and_nothing_else(enter: Callable[..., Any], dtype: str) -> None:
    model = Keeper()
    call = enter(model, config(dtype, auto_cast=True))
    other = (torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int64), 3.5)
    call(torch.ones(2, 4), *nested(), *other, timestep=torch.tensor(STEPS))
    seen = tensors_in(model.seen)
    low = DTYPES[dtype]
    assert [tensor.dtype for tensor in seen] == [*[low] * 5, torch.float64, torch.int64, low]
    assert seen[0].tolist() == torch.tensor(STEPS).to(low).tolist()


@dataclass
class Batch:
    audio: Any
    length: int = 2


@dataclass(frozen=True, slots=True)
class FrozenBatch:
    audio: Any
    length: int = field(default=2, init=False)


class Record(dict[str, Any]):
    """A dict that torch's pytree does not look into."""


class Features(UserDict[str, Any]):
    """A mapping like those of Hugging Face's processors (`BatchEncoding`, `BatchFeature`)."""


CONTAINERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str]] = {
    "dataclass": (Batch, lambda batch: batch.audio, ".audio"),
    "frozen dataclass": (FrozenBatch, lambda batch: batch.audio, ".audio"),
    "user dict": (lambda x: Features(audio=x), lambda batch: batch["audio"], "['audio']"),
    "dict of a class": (lambda x: Record(audio=x), lambda batch: batch["audio"], "['audio']"),
    "nested": (
        lambda x: [Batch({"a": Features(audio=x)})],
        lambda batch: batch[0].audio["a"]["audio"],
        "[0].audio['a']['audio']",
    ),
}
"""Containers, and how an element is read from each."""


@pytest.mark.unit
@WAYS
@pytest.mark.parametrize("kind", CONTAINERS)
def test_auto_cast_casts_in_a_container_and_leaves_the_callers_alone(
    enter: Callable[..., Any], kind: str
) -> None:
    make, read, _ = CONTAINERS[kind]
    model = Keeper()
    call = enter(model, config("bf16", auto_cast=True))
    given = make(torch.tensor(STEPS))
    call(torch.ones(2, 4), given)
    (seen,) = model.seen
    assert type(seen) is type(given)
    assert read(seen).dtype is torch.bfloat16
    assert read(given).tolist() == STEPS
    unchanged = make(torch.ones(2, dtype=torch.int64))
    call(torch.ones(2, 4), unchanged)
    assert read(model.seen[0]) is read(unchanged)


@pytest.mark.unit
@WAYS
@pytest.mark.parametrize("kind", CONTAINERS)
def test_an_argument_in_a_container_is_named(enter: Callable[..., Any], kind: str) -> None:
    make, read, path = CONTAINERS[kind]
    call = enter(Takes(nn.Linear(4, 4), lambda layer, batch: layer(read(batch))), config("bf16"))
    with pytest.raises(RuntimeError) as caught:
        call(None, features=make(torch.ones(2, 4)))
    assert f"Takes.forward got float32 in features{path} while" in str(caught.value)


@pytest.mark.unit
@WAYS
def test_other_objects_arrive_as_they_are(enter: Callable[..., Any]) -> None:
    model = Keeper()
    call = enter(model, config("bf16", auto_cast=True))
    given = SimpleNamespace(audio=torch.tensor(STEPS))
    call(torch.ones(2, 4), given)
    assert model.seen == [given]
    assert given.audio.tolist() == STEPS


def arriving(stage: int, dtype: str) -> list[list[float]]:
    model = Keeper()
    call = by_engine(model, config(dtype, stage))
    for _ in range(2):
        call(torch.ones(2, 4), {"t": [torch.tensor(STEPS)]}, timestep=torch.tensor(STEPS))
    return [tensor.float().tolist() for tensor in tensors_in(model.seen)]


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", DTYPES)
def test_they_arrive_at_every_stage(dtype: str) -> None:
    for stage in range(4):
        assert run_ranks(2, arriving, stage, dtype) == [[STEPS, STEPS]] * 2


class Takes(nn.Module):
    """One layer behind named arguments."""

    def __init__(self, layer: nn.Module, use: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.layer, self.use = layer, use

    def forward(self, input_ids: torch.Tensor, features: Any = None, *others: Any, **more: Any) -> Any:
        return self.use(self.layer, features)


def through(layer: nn.Module, x: torch.Tensor) -> Any:
    return layer(x)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], Any], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 4), through, (2, 4)),
    "linear without bias": (lambda: nn.Linear(4, 4, bias=False), through, (2, 4)),
    "linear of a sequence": (lambda: nn.Linear(4, 4), through, (2, 3, 4)),
    "conv1d": (lambda: nn.Conv1d(4, 4, 3), through, (2, 4, 8)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3, bias=False), through, (2, 3, 8, 8)),
    "transposed conv": (lambda: nn.ConvTranspose1d(4, 4, 3), through, (2, 4, 8)),
    "lstm": (lambda: nn.LSTM(4, 4), through, (2, 3, 4)),
    "layer norm": (lambda: nn.LayerNorm(4), through, (2, 4)),
    "prelu": (lambda: nn.PReLU(), through, (2, 4)),
    "bilinear": (lambda: nn.Bilinear(4, 4, 2), lambda layer, x: layer(x, x), (2, 4)),
    "attention": (lambda: nn.MultiheadAttention(4, 2), lambda layer, x: layer(x, x, x), (3, 2, 4)),
    "product": (lambda: nn.Linear(4, 4), lambda layer, x: x @ layer.weight, (2, 4)),
    "batched product": (
        lambda: nn.Linear(4, 4),
        lambda layer, x: x.bmm(layer.weight.expand(1, 4, 4)),
        (1, 3, 4),
    ),
    "einsum": (
        lambda: nn.Linear(4, 4),
        lambda layer, x: torch.einsum("bi,ij->bj", x, layer.weight),
        (2, 4),
    ),
}


@pytest.mark.unit
@pytest.mark.parametrize("kind", LAYERS)
def test_torchs_error_names_the_argument_and_the_switch(kind: str) -> None:
    make, use, shape = LAYERS[kind]
    model = Takes(make(), use)
    call = by_engine(model, config("bf16"))
    with pytest.raises((RuntimeError, ValueError)) as caught:
        call(torch.ones(2, dtype=torch.int64), torch.ones(shape))
    text = str(caught.value)
    assert "Takes.forward got float32 in features while its weights are bfloat16" in text
    assert '"bf16": {"enabled": true, "auto_cast": true}' in text
    plain = Takes(make(), use).bfloat16()
    with pytest.raises((RuntimeError, ValueError)) as torchs:
        plain(None, torch.ones(shape))
    assert text.startswith(str(torchs.value))
    assert type(caught.value) is type(torchs.value)


class Regression(nn.Module):
    """A loss whose backward pass cannot mix dtypes although its forward pass does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.huber_loss(self.layer(x), targets)


@pytest.mark.unit
def test_an_error_of_backward_names_the_argument_too() -> None:
    engine, *_ = zt.initialize(model=Regression(), config=config("bf16"))
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    loss = engine(x, torch.ones(2, 4))
    with pytest.raises(RuntimeError) as caught:
        engine.backward(loss)
    assert "Regression.forward got float32 in targets while its weights are bfloat16" in str(caught.value)
    engine.zero_grad()
    engine.backward(engine(x, torch.ones(2, 4).bfloat16()))
    engine.step()


@pytest.mark.unit
@WAYS
def test_every_fp32_argument_is_named(enter: Callable[..., Any]) -> None:
    model = Takes(nn.Linear(4, 4), through)
    call = enter(model, config("fp16"))
    x = torch.ones(2, 4)
    with pytest.raises(RuntimeError) as caught:
        call(x, x, x, {"a": [x.half(), x]}, Pair(1, x), y=x, z=x.double())
    text = str(caught.value)
    assert "in input_ids, features, others[0], others[1]['a'][1], others[2].second, y while" in text
    assert '"fp16": {"enabled": true, "auto_cast": true}' in text


@pytest.mark.ranks
def test_a_compiled_model_is_named_as_the_plain_one() -> None:
    """The compiler takes longer to load than a unit test may run."""
    for compiled in (compile_model, compile_in_place):
        (text,) = run_ranks(1, failing_compiled, compiled)
        assert "Takes.forward got float32 in features while its weights are bfloat16" in text


def compile_model(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def compile_in_place(model: Any) -> Any:
    model.layer.compile(backend="eager")
    return model


def failing_compiled(compiled: Callable[[nn.Module], Any]) -> str:
    call = by_engine(compiled(Takes(nn.Linear(4, 4), through)), config("bf16"))
    with pytest.raises(RuntimeError) as caught:
        call(torch.ones(2, dtype=torch.int64), torch.ones(2, 4))
    return str(caught.value)


@pytest.mark.unit
def test_the_way_out_works() -> None:
    call = by_engine(Takes(nn.Conv1d(4, 4, 3), through), config("bf16", auto_cast=True))
    assert call(None, torch.ones(2, 4, 8)).dtype is torch.bfloat16


class Raises(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.layer, self.error = nn.Linear(2, 2), error

    def forward(self, x: torch.Tensor) -> None:
        raise self.error


@pytest.mark.unit
@pytest.mark.parametrize(
    ("error", "value"),
    [
        (RuntimeError("out of memory"), torch.ones(2)),
        (ValueError("input type 7"), torch.ones(2)),
        (KeyError("the dtype float32"), torch.ones(2)),
        (RuntimeError("must have the same dtype"), torch.ones(2, dtype=torch.bfloat16)),
        (RuntimeError("must have the same dtype"), None),
    ],
    ids=["other text", "other origin", "other type", "no fp32 argument", "no tensor"],
)
def test_other_errors_are_left_alone(error: Exception, value: Any) -> None:
    before = error.args
    call = by_engine(Raises(error), config("bf16"))
    with pytest.raises(type(error)) as caught:
        call(value)
    assert caught.value is error
    assert error.args == before


@pytest.mark.unit
@pytest.mark.parametrize(
    ("dtype", "more"), [("fp32", {}), ("bf16", {"auto_cast": True})], ids=["fp32", "auto_cast"]
)
def test_nothing_is_watched_where_nothing_can_be_mixed(dtype: str, more: dict[str, bool]) -> None:
    error = RuntimeError("must have the same dtype")
    call = by_engine(Raises(error), config(dtype, **more))
    with pytest.raises(RuntimeError, match=r"^must have the same dtype$"):
        call(torch.ones(2))


@pytest.mark.unit
def test_a_closed_engine_watches_no_more() -> None:
    model = Takes(nn.Linear(4, 4), through)
    engine, *_ = zt.initialize(model=model, config=config("bf16"))
    hooks = len(model._forward_hooks)
    engine.close()
    assert len(model._forward_hooks) < hooks
    with pytest.raises(RuntimeError) as caught:
        model(None, torch.ones(2, 4))
    assert "auto_cast" not in str(caught.value)


@pytest.mark.unit
def test_the_text_grows_once_and_ends() -> None:
    error = RuntimeError("expected scalar type Float but found BFloat16")
    names = [f"x{index:02}" for index in range(20)]
    for _ in range(2):
        explain_arguments(error, "Linear.forward", names, compute_dtype="bf16")
    assert str(error).count("auto_cast") == 2
    assert "x07 and 12 more while" in str(error)


def failing(stage: int) -> list[str]:
    """Return the texts that this rank gets, in forward with gradients and without."""
    call = by_engine(Takes(nn.Conv1d(4, 4, 3), through), config("bf16", stage))
    texts = []
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            try:
                call(None, features=torch.ones(2, 4, 8))
            except RuntimeError as error:
                texts.append(str(error))
    call(None, features=torch.ones(2, 4, 8, dtype=torch.bfloat16)).sum().backward()
    return texts


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_error_is_the_same_at_every_stage_and_training_goes_on(stage: int) -> None:
    for texts in run_ranks(2, failing, stage):
        assert len(texts) == 2
        assert all("in features while its weights are bfloat16" in text for text in texts)

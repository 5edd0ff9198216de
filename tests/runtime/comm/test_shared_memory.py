"""Parameters and buffers over the memory of a parameter are refused by name; all others are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.free_form import config
from zerotrain.runtime.zero.layout import LayoutError
from zerotrain.runtime.zero.ties import refuse_shared_memory

pytestmark = pytest.mark.unit


def pair() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))


def tied_by_data() -> nn.Module:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight.data = first.weight.data
    return nn.Sequential(first, second)


def transposed() -> nn.Module:
    """Return tied layers as in autoencoders."""
    first, second = nn.Linear(4, 6), nn.Linear(6, 4)
    second.weight.data = first.weight.data.t()
    return nn.Sequential(first, second)


def part_of_another() -> nn.Module:
    first, second = nn.Linear(4, 6), nn.Linear(4, 3)
    second.weight.data = first.weight.data[2:5]
    return nn.Sequential(first, second)


def columns_of_another() -> nn.Module:
    first, second = nn.Linear(4, 6), nn.Linear(2, 6)
    second.weight.data = first.weight.data[:, 1:3]
    return nn.Sequential(first, second)


def deferred() -> nn.Module:
    with zt.init_context(seed=0):
        return tied_by_data()


@pytest.mark.parametrize("make", [tied_by_data, transposed, part_of_another, columns_of_another, deferred])
def test_objects_over_one_memory_are_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(LayoutError, match=r"'0\.weight' and '1\.weight' are two objects.*module\.weight = "):
        zt.initialize(model=make(), config=config(0))


def with_buffer(of: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    model = pair()
    model.get_submodule("1").register_buffer("copy", of(model.get_parameter("0.weight")))
    return model


IN_A_WEIGHT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "data": lambda weight: weight.data,
    "the parameter itself": lambda weight: weight,
    "one row": lambda weight: weight.detach()[2],
    "transposed columns": lambda weight: weight.detach()[:, 1:3].t(),
    "expanded": lambda weight: weight.detach()[0, 0].expand(5),
    "bytes": lambda weight: weight.detach().view(torch.uint8),
}


@pytest.mark.parametrize("of", IN_A_WEIGHT.values(), ids=IN_A_WEIGHT)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_buffer_in_a_parameters_memory_is_refused(
    stage: int, of: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    way_out = r"read the parameter itself in forward.*register `weight\.detach\(\)\.clone\(\)`"
    with pytest.raises(LayoutError, match=rf"buffer '1\.copy' lies in .* '0\.weight'.*{way_out}"):
        zt.initialize(model=with_buffer(of), config=config(stage))


def with_a_copy() -> nn.Module:
    return with_buffer(lambda weight: weight.detach().clone())


def with_an_empty_view() -> nn.Module:
    return with_buffer(lambda weight: weight.detach()[:0])


def with_buffers_over_each_other() -> nn.Module:
    model, values = pair(), torch.arange(8.0)
    model.register_buffer("whole", values)
    model.register_buffer("part", values[2:4])
    return model


def flattened() -> nn.Module:
    """Return parameters one after the other in one buffer, as recurrent networks have them on GPUs."""
    model, flat = pair(), torch.zeros(24 + 6 + 24 + 4)
    start = 0
    for parameter in model.parameters():
        parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    return model


def interleaved() -> nn.Module:
    """Return halves of one matrix's columns, without a common element."""
    first, second, both = nn.Linear(2, 3, bias=False), nn.Linear(2, 3, bias=False), torch.zeros(3, 4)
    first.weight.data, second.weight.data = both[:, :2], both[:, 2:]
    return nn.Sequential(first, second)


def one_object() -> nn.Module:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(first, second)


def empty_ones() -> nn.Module:
    first, second = nn.Linear(4, 0, bias=False), nn.Linear(4, 0, bias=False)
    second.weight.data = first.weight.data
    return nn.Sequential(first, second)


BUFFERED = (with_a_copy, with_an_empty_view, with_buffers_over_each_other)


@pytest.mark.parametrize("make", [pair, flattened, interleaved, one_object, empty_ones, nn.LSTM, *BUFFERED])
def test_others_are_not(make: Callable[..., nn.Module]) -> None:
    refuse_shared_memory(make(3, 4) if make is nn.LSTM else make())


def test_a_closed_engines_model_is_taken_again() -> None:
    model = pair()
    for _ in range(2):
        engine, *_ = zt.initialize(model=model, config=config(2))
        engine.close()

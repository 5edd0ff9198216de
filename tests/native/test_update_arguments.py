"""Errors of the update kernels: wrong sizes and dtypes, and arrays that would be copied or overlap."""

from __future__ import annotations

import pytest
import torch

from tests.support.updates import HYPER, Arrays, make_arrays, update_
from zerotrain.runtime import _native

pytestmark = pytest.mark.unit


NAMES = ["master", "exp_avg", "exp_avg_sq", "grad", "weight"]


def from_list(arrays: list[torch.Tensor]) -> Arrays:
    return Arrays(master=arrays[0], states=arrays[1:3], grad=arrays[3], weight=arrays[4])


def test_wrong_arrays_are_named() -> None:
    good = [*make_arrays("adamw", 8, torch.float32, None).tensors, torch.zeros(8)]

    def update_with(**changes: torch.Tensor) -> None:
        update_(
            from_list([changes.get(name, array) for name, array in zip(NAMES, good, strict=True)]), "adamw"
        )

    with pytest.raises(ValueError, match="state 1 has 7 elements, the target has 8"):
        update_with(exp_avg_sq=torch.zeros(7))
    with pytest.raises(ValueError, match="master has 7 elements, the target has 8"):
        update_with(master=torch.zeros(7))
    with pytest.raises(ValueError, match="weight has 9 elements, the target has 8"):
        update_with(weight=torch.zeros(9))
    with pytest.raises(ValueError, match="grad must be float32, bfloat16 or float16"):
        update_with(grad=torch.zeros(8, dtype=torch.float64))
    with pytest.raises(ValueError, match="int16 master is the remainder of bfloat16 weights"):
        update_with(master=torch.zeros(8, dtype=torch.int16))
    with pytest.raises(ValueError, match="elements 0 to 8, the task has 5"):
        update_with(grad=torch.zeros(5), weight=torch.zeros(5))


def test_wrong_options_are_named() -> None:
    arrays = make_arrays("adamw", 8, torch.float32, None)
    with pytest.raises(ValueError, match="step must be at least 1; got 0"):
        update_(arrays, "adamw", step=0)
    with pytest.raises(ValueError, match=r"available: .*baseline"):
        update_(arrays, "adamw", isa="avx1024")
    with pytest.raises(ValueError, match="there are adam, adamw, adagrad and lion"):
        update_(arrays, "sgd")
    with pytest.raises(ValueError, match="the rule has 1 states; got 2"):
        update_(arrays, "lion")
    for segments in ([(0, 9)], [(4, 8), (0, 4)], [(0, 5), (4, 8)]):
        with pytest.raises(ValueError, match=r"segment \[\d, \d\) must lie behind the one before it"):
            _native.UpdateTask("adam", [_native.Segment(*one, **HYPER) for one in segments], arrays.grad)
    task = _native.UpdateTask("adam", [], arrays.grad)
    with pytest.raises(ValueError, match="master is missing"):
        _native.update_(task, None, arrays.states)
    with pytest.raises(ValueError, match="only float32 and bfloat16 weights can be the master"):
        _native.UpdateTask("adam", [], arrays.grad, torch.zeros(8).half(), weight_is_master=True)


@pytest.mark.parametrize("index", range(5), ids=NAMES)
@pytest.mark.parametrize("fault", ["dtype", "stride", "overlap"])
def test_arrays_that_would_be_copied_or_overlap_are_refused(index: int, fault: str) -> None:
    """A kernel's writes into a copy would be lost silently."""
    arrays = [*make_arrays("adamw", 8, torch.float32, None).tensors, torch.zeros(8)]
    wrong = {
        "dtype": arrays[index].double(),
        "stride": torch.zeros(16)[::2],
        "overlap": arrays[index - 1][:],
    }[fault]
    arrays[index] = wrong
    before = [array.clone() for array in arrays]
    with pytest.raises((TypeError, ValueError)):
        update_(from_list(arrays), "adamw")
    assert all(torch.equal(old, new) for old, new in zip(before, arrays, strict=True))


def test_partial_overlaps_are_refused_and_neighbours_are_not() -> None:
    memory = torch.zeros(40)
    for low, is_refused in ((7, True), (8, False)):
        arrays = Arrays(
            master=memory[0:8], states=[memory[low : low + 8], memory[32:40]], grad=torch.ones(8), weight=None
        )
        if is_refused:
            with pytest.raises(ValueError, match="master and state 0 overlap in memory"):
                update_(arrays, "adamw")
        else:
            update_(arrays, "adamw")

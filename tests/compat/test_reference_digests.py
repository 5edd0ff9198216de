"""The digest by which TRL finds log probabilities of a reference again is that of TRL's own function."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest
import torch
from torch import nn

from zerotrain.compat.libraries.mends import trl as mends

pytestmark = pytest.mark.ranks  # the import of TRL takes many seconds


def test_equal_to_that_of_trl() -> None:
    from trl.trainer import utils

    assert inspect.getsourcefile(utils.hash_module) == inspect.getsourcefile(utils), "it is replaced already"
    patched = ModuleType("patched")
    mends.hash_one_by_one(patched)
    first = nn.Linear(4, 3)
    model = nn.Sequential(first, nn.BatchNorm1d(3), nn.Linear(3, 2, dtype=torch.bfloat16))
    digest = utils.hash_module(model)
    assert patched.hash_module(model) == digest
    first.bias.data[0] += 1
    assert patched.hash_module(model) == utils.hash_module(model) != digest

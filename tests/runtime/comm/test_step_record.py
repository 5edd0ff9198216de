"""The record that ranks exchange at a step is made on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.comm.timing import Pending

pytestmark = pytest.mark.unit


class OneOfTwo(Comm):
    """A rank whose gathers return its own shard twice."""

    def __init__(self) -> None:
        self.device, self.world_size, self._watchdog = torch.device("cpu"), 2, None

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, *, label: str) -> Pending:
        full.view(2, -1).copy_(shard)
        return Pending.done()


def test_the_programs_default_device_is_not_the_records() -> None:
    comm: Any = OneOfTwo()
    torch.set_default_device("meta")
    try:
        assert comm.gather_record([1.0, 2.5]) == [[1.0, 2.5]] * 2
    finally:
        torch.set_default_device(None)

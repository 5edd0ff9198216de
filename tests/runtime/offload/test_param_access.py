"""Access to offloaded weights outside of training has the same bits as with shards on the device.

It covers whole parameters, state access, freezing, checkpoints and exports.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.offloaded_params import Where, access_outside_training_everywhere
from tests.support.ranks import run_ranks
from tests.support.training import Case

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_other_use_sees_the_same_bits(ranks: int, tmp_path: Path) -> None:
    case = Case(stage=3, dtype="bf16", clip=0.3, torch_adam=False)
    whole = [Where(), Where(params="nvme", states="cpu"), Where(params="nvme", states="nvme")]
    split = [
        Where(params="nvme", states="nvme", remainders=True, just_in_time=True),
        Where(params="nvme", remainders=True, max_in_cpu=9_000),
    ]
    if ranks > 1:
        whole.append(Where(params="host"))
        # One rank's weights are replicated: overwritten ones leave no trace of the values to keep.
        split.insert(0, Where(remainders=True))
    for number, places in enumerate((whole, split)):
        folder = tmp_path / str(number)
        folder.mkdir()
        for found in run_ranks(ranks, access_outside_training_everywhere, case, places, str(folder)):
            for where, seen in zip(places, found, strict=True):
                assert seen == found[0], where

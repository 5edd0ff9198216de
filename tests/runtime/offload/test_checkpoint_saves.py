"""Saves of offloaded states: memory, updates in the background, a damaged spill; exports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support import offloaded_saves
from tests.support.offloaded_engines import TIERS, Place, file_digests
from tests.support.offloaded_saves import STATE_BYTES
from tests.support.ranks import run_ranks
from zerotrain.contract.exit_codes import ExitCode
from zerotrain.runtime.weights.checkpoint_export import Request, export_checkpoint

pytestmark = pytest.mark.ranks


BOUND = 40 << 20
"""Largest growth in bytes: a few windows of 1 Mi elements, far below `STATE_BYTES`."""


@pytest.mark.parametrize(
    "place",
    [
        Place(tier="cpu", remainders=True),
        Place(tier="nvme"),
        Place(tier="nvme", remainders=True, param_tier="nvme"),
    ],
    ids=lambda place: place.name,
)
def test_memory_does_not_grow_with_the_states(tmp_path: Path, place: Place) -> None:
    found = run_ranks(1, offloaded_saves.growths, str(tmp_path), place, place.tier == "nvme")[0]
    assert BOUND < STATE_BYTES / 2
    assert {name: num_bytes for name, num_bytes in found.items() if num_bytes > BOUND} == {}


def test_a_copy_would_be_seen(tmp_path: Path) -> None:
    """The measurement above can fail: resident states are copied for an asynchronous save."""
    found = run_ranks(1, offloaded_saves.growths, str(tmp_path), Place(), True)[0]
    assert found["save"] >= STATE_BYTES


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_an_asynchronous_save_during_background_updates(tmp_path: Path, tier: str) -> None:
    """The bytes are those of the step of the save; spilled states are durable when the call returns."""
    place = Place(tier=tier, remainders=True, just_in_time=True)
    expected = run_ranks(2, offloaded_saves.saved_at_once, str(tmp_path), place)
    found = run_ranks(2, offloaded_saves.saved_while_training, str(tmp_path), place)
    assert file_digests(tmp_path / "asynchronous" / "x") == file_digests(tmp_path / "synchronous" / "x")
    for straight, loaded in zip(expected, found, strict=True):
        assert loaded["durable"] is (tier == "nvme")
        assert (loaded["snapshot"] == 0) is (tier == "nvme")
        assert (loaded["losses"], loaded["after"]) == (straight["losses"], straight["after"])


@pytest.mark.parametrize("how", ["read", "updated"])
def test_a_damaged_spill_is_never_stored(tmp_path: Path, how: str) -> None:
    """The save, or an update in the background before it, finds the damage; a load is then refused, too."""
    place = Place(tier="nvme", remainders=True)
    function = {
        "read": offloaded_saves.saves_after_damage,
        "updated": offloaded_saves.saves_after_a_failed_update,
    }[how]
    found = run_ranks(1, function, str(tmp_path), place)[0]
    assert set(found["errors"]) == {("SpillIntegrityError", int(ExitCode.SPILL_INTEGRITY))}
    assert found["left"] == ["step-0000000002-attempt-1"]
    assert not list((tmp_path / "w").glob("*.safetensors"))


@pytest.mark.parametrize("remainders", [False, True])
def test_exports_are_the_same_on_every_tier(tmp_path: Path, remainders: bool) -> None:
    places = [Place(tier=tier, remainders=remainders) for tier in TIERS]
    places += [Place(tier="cpu", param_tier="cpu", remainders=remainders)]
    for rank in run_ranks(2, offloaded_saves.exported, str(tmp_path), places):
        assert rank == [rank[0]] * len(places)
    written = tmp_path / f"{places[0].name}-fp32" / "model.safetensors"
    for place in places:  # from the checkpoint, by the command line's function
        output = tmp_path / "out.safetensors"
        export_checkpoint(
            Request(
                checkpoint=tmp_path / f"{place.name}-c",
                output=output,
                dtype=torch.float32,
                max_bytes=1 << 40,
                tag="x",
            )
        )
        assert _tensors(output).keys() == _tensors(written).keys()
        for name, value in _tensors(written).items():
            assert torch.equal(_tensors(output)[name], value), name


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)

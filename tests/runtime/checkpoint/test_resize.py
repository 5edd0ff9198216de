"""A checkpoint of N ranks loads at M ranks for any N and M, with every element in its place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.checkpoint_states import (
    REGROUPED,
    UNITS,
    ThreadRanks,
    good,
    layout_for,
    make_state,
    on_ranks,
)
from zerotrain.runtime import checkpoint
from zerotrain.runtime.zero.layout import ModelLayout
from zerotrain.runtime.zero.state import CheckpointState, whole

pytestmark = pytest.mark.unit


def save_at(directory: Path, layout: ModelLayout, *, step: int, salt: int = 0) -> None:
    def action(group: ThreadRanks) -> checkpoint.SaveResult:
        return checkpoint.save(make_state(group.rank, layout, salt=salt), directory, step=step, group=group)

    good(on_ranks(layout.world_size, action))


def load_at(directory: Path, layout: ModelLayout) -> list[CheckpointState]:
    def action(group: ThreadRanks) -> CheckpointState:
        state = make_state(group.rank, layout, filled=False)
        assert checkpoint.load(state, directory, group=group).path is not None
        return state

    return good(on_ranks(layout.world_size, action))


def assert_same(loaded: CheckpointState, expected: CheckpointState) -> None:
    assert loaded.streams.keys() == expected.streams.keys()
    for key, stream in expected.streams.items():
        assert torch.equal(whole(loaded.streams[key]), whole(stream)), key
    assert loaded.scalars == expected.scalars
    assert torch.equal(loaded.buffers["norm.mean"], expected.buffers["norm.mean"])


@pytest.mark.parametrize(("saved", "loaded"), [(1, 1), (2, 2), (1, 3), (2, 4), (4, 2), (3, 5), (5, 1)])
def test_every_element_arrives(tmp_path: Path, saved: int, loaded: int) -> None:
    save_at(tmp_path, layout_for(saved), step=3)
    target = layout_for(loaded)
    for rank, state in enumerate(load_at(tmp_path, target)):
        assert_same(state, make_state(rank, target))


def test_there_and_back_gives_the_same_files(tmp_path: Path) -> None:
    two, three = layout_for(2), layout_for(3)
    save_at(tmp_path / "a", two, step=3)
    states = load_at(tmp_path / "a", three)
    good(on_ranks(3, lambda group: checkpoint.save(states[group.rank], tmp_path / "b", step=3, group=group)))
    for rank, state in enumerate(load_at(tmp_path / "b", two)):
        assert_same(state, make_state(rank, two))


def test_other_unit_boundaries_do_not_matter(tmp_path: Path) -> None:
    save_at(tmp_path, layout_for(2, UNITS), step=3)
    target = layout_for(3, REGROUPED)
    for rank, state in enumerate(load_at(tmp_path, target)):
        assert_same(state, make_state(rank, target))


def test_files_are_plain_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    save_at(tmp_path, layout_for(2), step=3)
    (folder,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert folder.name == "step-0000000003-attempt-1"
    for rank in range(2):
        stored = load_file(folder / f"rank-0000{rank}-of-00002.safetensors")
        for (unit, kind), stream in make_state(rank, layout_for(2)).streams.items():
            assert torch.equal(stored[f"{unit}/{kind}"], whole(stream))

"""A whole checkpoint of another model is the user's mistake: it is named, not skipped for an older one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.support.checkpoint_states import UNITS, layout_for, make_state
from zerotrain.contract.exit_codes import ExitCode
from zerotrain.runtime import checkpoint
from zerotrain.runtime.checkpoint import CheckpointError, CheckpointMismatch, SingleRank
from zerotrain.runtime.zero.state import CheckpointState, TensorStream, whole

pytestmark = pytest.mark.unit


SAVED = layout_for(1)
Units = Sequence[tuple[str, bool, tuple]]  # type: ignore[type-arg]


def load_with(folder: Path, units: Units, kinds: Sequence[str] = ()) -> CheckpointMismatch:
    checkpoint.save(make_state(0, SAVED), folder, step=1, group=SingleRank())
    state = make_state(0, layout_for(1, units), filled=False, kinds=kinds)
    with pytest.raises(CheckpointMismatch) as caught:
        checkpoint.load(state, folder, group=SingleRank())
    assert caught.value.exit_code == ExitCode.BAD_CONFIG
    return caught.value


def test_other_shape(tmp_path: Path) -> None:
    units = (("embed", True, (("embed.weight", (13, 6)),)), *UNITS[1:])
    assert "'embed.weight' has shape [13, 6] in the model and [13, 5]" in str(load_with(tmp_path, units))


def test_parameter_missing_in_the_checkpoint(tmp_path: Path) -> None:
    units = (*UNITS, ("more", True, (("more.weight", (3,)),)))
    assert "holds no parameter 'more.weight' (1 missing" in str(load_with(tmp_path, units))


def test_parameter_missing_in_the_model(tmp_path: Path) -> None:
    assert "holds parameter 'lora.base' the model does not have" in str(load_with(tmp_path, UNITS[:2]))


def test_trained_before_frozen_now_takes_the_weight(tmp_path: Path) -> None:
    """The weights alone load in the reverse case: there are no moments of a frozen parameter."""
    units = (("embed", False, UNITS[0][2]), *UNITS[1:])
    checkpoint.save(make_state(0, SAVED), tmp_path / "a", step=1, group=SingleRank())
    state = make_state(0, layout_for(1, units), filled=False)
    checkpoint.load(state, tmp_path / "a", group=SingleRank())
    expected = whole(make_state(0, SAVED).streams["embed", "master"])
    assert torch.equal(whole(state.streams["embed", "param"]), expected.bfloat16())
    checkpoint.save(state, tmp_path / "b", step=1, group=SingleRank())
    again = make_state(0, SAVED, filled=False)
    again.streams = {key: value for key, value in again.streams.items() if key[1] in ("master", "param")}
    checkpoint.load(again, tmp_path / "b", group=SingleRank())
    assert torch.equal(whole(again.streams["embed", "master"]), expected.bfloat16().float())


def test_other_optimizer(tmp_path: Path) -> None:
    assert "needs state 'momentum'" in str(load_with(tmp_path, UNITS, kinds=["momentum"]))


def test_missing_buffer(tmp_path: Path) -> None:
    checkpoint.save(make_state(0, SAVED), tmp_path, step=1, group=SingleRank())
    state = make_state(0, SAVED, filled=False)
    state.buffers["running_var"] = torch.zeros(3)
    with pytest.raises(CheckpointMismatch, match="no buffer 'running_var'"):
        checkpoint.load(state, tmp_path, group=SingleRank())


def test_other_dtype_is_converted(tmp_path: Path) -> None:
    saved = make_state(0, SAVED)
    checkpoint.save(saved, tmp_path, step=1, group=SingleRank())
    state = make_state(0, SAVED, filled=False)
    state.streams = {key: TensorStream(whole(stream).double()) for key, stream in state.streams.items()}
    checkpoint.load(state, tmp_path, group=SingleRank())
    assert all(
        torch.equal(whole(state.streams[key]), whole(old).double()) for key, old in saved.streams.items()
    )


def test_tied_parameter_under_its_other_name(tmp_path: Path) -> None:
    """The owner of a tied pair may be the other one after a change of the model's module order."""
    checkpoint.save(make_state(0, SAVED), tmp_path, step=1, group=SingleRank())
    units = (("head", True, (("head.weight", (13, 5)),)), *UNITS[1:])
    state = make_state(0, layout_for(1, units), filled=False)
    checkpoint.load(state, tmp_path, group=SingleRank())
    expected = make_state(0, SAVED)
    assert torch.equal(whole(state.streams["head", "master"]), whole(expected.streams["embed", "master"]))


@pytest.mark.parametrize("bad", [object(), Path("a"), torch.zeros(1).to_sparse(), len, range(2)])
def test_client_state_that_comes_back_from_no_checkpoint_is_refused_whole(
    tmp_path: Path, bad: object
) -> None:
    with pytest.raises(CheckpointError, match="the state cannot be stored"):
        checkpoint.save(make_state(0, SAVED), tmp_path, step=1, client_state={"x": bad}, group=SingleRank())
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_client_state_round_trips(tmp_path: Path) -> None:
    value = {"a": 0.1 + 0.2, "b": [1, None, True, "ü"], "c": {"d": 2**60}}
    checkpoint.save(make_state(0, SAVED), tmp_path, step=1, client_state=value, group=SingleRank())
    state: CheckpointState = make_state(0, SAVED, filled=False)
    assert checkpoint.load(state, tmp_path, group=SingleRank()).client_state == value


@pytest.mark.parametrize("tag", ["", ".hidden", "a/b", "..", "latest", "x" * 101])
def test_tag_must_be_a_folder_name(tmp_path: Path, tag: str) -> None:
    with pytest.raises(ValueError, match=r"not usable as a folder name.* none of latest, "):
        checkpoint.save(make_state(0, SAVED), tmp_path, step=1, tag=tag, group=SingleRank())

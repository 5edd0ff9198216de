"""Checkpoints that DeepSpeed wrote are converted: every element is in its place, and no code runs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import deepspeed_files
from tests.support.checkpoint_states import ThreadRanks, good, layout_for, make_state, on_ranks
from zerotrain.contract.exit_codes import ExitCode
from zerotrain.runtime.checkpoint import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    SingleRank,
    load,
)
from zerotrain.runtime.checkpoint.from_deepspeed.convert import convert
from zerotrain.runtime.checkpoint.from_deepspeed.partitions import flat_pieces, sharded_pieces
from zerotrain.runtime.checkpoint.from_deepspeed.pickles import UnsafeCheckpoint, load_file
from zerotrain.runtime.checkpoint.from_deepspeed.recognise import deepspeed_path
from zerotrain.runtime.checkpoint.from_deepspeed.spawn import import_checkpoint, readable
from zerotrain.runtime.checkpoint.intervals import check_coverage
from zerotrain.runtime.zero.state import whole


def wrapped_name(name: str) -> str:
    """Return the name in a compiled model with checkpoint_wrapper around its blocks."""
    return "_orig_mod." + name.replace("blocks.0.", "blocks.0._checkpoint_wrapped_module.")


@pytest.mark.unit
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_names_are_those_of_the_plain_model(tmp_path: Path, stage: int) -> None:
    source = deepspeed_files.write(tmp_path / "ds", stage=stage, world_size=2, named=wrapped_name)
    convert(source, tmp_path / "ours", tag=None)
    layout = layout_for(1)
    state, expected = make_state(0, layout, filled=False), make_state(0, layout)
    load(state, tmp_path / "ours", group=SingleRank())
    for key, stream in expected.streams.items():
        assert torch.equal(whole(state.streams[key]), whole(stream)), key
    assert torch.equal(state.buffers["norm.mean"], torch.arange(4.0))


@pytest.mark.unit
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("written", "loaded"), [(1, 2), (2, 1), (2, 3), (5, 2), (64, 1)])
def test_every_element_arrives(tmp_path: Path, stage: int, written: int, loaded: int) -> None:
    """Uneven sizes, several groups, frozen and tied parameters, more ranks than elements."""
    source = deepspeed_files.write(tmp_path / "ds", stage=stage, world_size=written)
    path, notices = convert(source, tmp_path / "ours", tag=None)
    assert path == tmp_path / "ours" / "step-0000000006-attempt-1"
    assert notices == []
    layout = layout_for(loaded)

    def action(group: ThreadRanks) -> Any:
        state = make_state(group.rank, layout, filled=False)
        return load(state, tmp_path / "ours", group=group), state

    for rank, (result, state) in enumerate(good(on_ranks(loaded, action))):
        expected = make_state(rank, layout)
        for key, stream in expected.streams.items():
            assert torch.equal(whole(state.streams[key]), whole(stream)), key
        assert torch.equal(state.buffers["norm.mean"], torch.arange(4.0))
        assert result.step == deepspeed_files.STEP
        assert not result.rng_restored
        assert result.client_state == {"args": {"lr": 0.1, "name": "x"}, "epoch": 2}
        assert state.scalars["global_steps"] == 6
        assert state.scalars["skipped_steps"] == 1
        assert state.scalars["scheduler"] == {"num_updates": 5}
        assert state.scalars["optimizer"]["num_updates"] == 5
        assert state.scalars["optimizer"]["groups"][1] == {
            "lr": 2e-3,
            "betas": [0.9, 0.95],
            "eps": 1e-8,
            "weight_decay": 0.1,
        }
        assert state.scalars["loss_scale"] == {
            "scale": 1024.0,
            "iteration": 9,
            "last_overflow": 3,
            "hysteresis": 2,
        }


@pytest.mark.unit
def test_partitions_with_padding_between_parameters() -> None:
    shapes = {"a": (3,), "b": (2, 2), "c": (0,), "d": (5,)}
    pieces = flat_pieces(shapes, partition=5, paddings=[1, 0, 0, 3])
    assert [(p.file, p.offset, p.length) for p in pieces["a"]] == [(0, 0, 3)]
    assert [(p.file, p.offset, p.length) for p in pieces["b"]] == [(0, 4, 1), (1, 0, 3)]
    assert [(p.file, p.offset, p.length) for p in pieces["d"]] == [(1, 3, 2), (2, 0, 3)]
    cut, held = sharded_pieces(shapes, world_size=3)
    assert held == 1 + 2 + 0 + 2
    assert [(p.file, p.offset, p.start, p.length) for p in cut["d"]] == [
        *[(0, 3, 0, 2), (1, 3, 2, 2), (2, 3, 4, 1)]
    ]
    for fqn, numel in (("a", 3), ("b", 4), ("c", 0), ("d", 5)):
        check_coverage(fqn, numel, pieces[fqn])
        check_coverage(fqn, numel, cut[fqn])


@pytest.mark.ranks
def test_nothing_of_deepspeed_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of that name is on the path of the importing process and leaves a mark when imported."""
    bait = tmp_path / "site" / "deepspeed" / "__init__.py"
    bait.parent.mkdir(parents=True)
    mark = tmp_path / "imported"
    bait.write_text(f"open({str(mark)!r}, 'w')\n")
    monkeypatch.setenv("PYTHONPATH", str(bait.parent.parent))
    source = deepspeed_files.write(tmp_path / "ds", stage=2, world_size=2)
    assert import_checkpoint(source, tmp_path / "ours", tag="start").path == tmp_path / "ours" / "start"
    assert not mark.exists()


class Hostile:
    """An object that runs a command when it is unpickled in the ordinary way."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.ranks
@pytest.mark.parametrize("where", ["client state", "module", "optimizer"])
def test_any_other_name_is_refused_and_not_run(tmp_path: Path, where: str) -> None:
    mark = tmp_path / "ran"
    extra = {"mine": Hostile(mark)} if where == "client state" else None
    source = deepspeed_files.write(tmp_path / "ds", stage=2, world_size=2, extra=extra)
    if where != "client state":
        pattern = "*_model_states.pt" if where == "module" else "*rank_1_*_optim_states.pt"
        (file,) = source.glob(pattern)
        torch.save({"module": {"x": Hostile(mark)}, "optimizer_state_dict": Hostile(mark)}, file)
    with pytest.raises(UnsafeCheckpoint, match=r"names '(posix|os)\.system'"):
        convert(source, tmp_path / "ours", tag=None)
    with pytest.raises(CheckpointError, match=r"names '(posix|os)\.system'") as caught:
        import_checkpoint(source, tmp_path / "ours")
    assert caught.value.exit_code == ExitCode.CHECKPOINT_UNUSABLE
    assert not mark.exists()
    assert not (tmp_path / "ours").exists() or not list((tmp_path / "ours").glob("step-*"))


@pytest.mark.ranks
def test_what_is_no_json_is_left_out_with_a_notice(tmp_path: Path) -> None:
    extra = {"mask": torch.ones(2), "nan": float("nan"), "list": [1, (2, 3)]}
    source = deepspeed_files.write(tmp_path / "ds", stage=1, world_size=1, extra=extra)
    imported = import_checkpoint(source, tmp_path / "ours")
    assert [notice.split(":")[0] for notice in imported.notices] == [
        *["client state 'mask' was left out", "client state 'nan' was left out"]
    ]
    with pytest.raises(CheckpointError, match="exists; give another destination"):
        import_checkpoint(source, tmp_path / "ours")


@pytest.mark.unit
@pytest.mark.parametrize(
    ("break_it", "error", "text"),
    [
        (
            lambda p: (p / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink(),
            CheckpointDamaged,
            "rank 0",
        ),
        (
            lambda p: (p / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink(),
            CheckpointDamaged,
            r"cut into \[3\] parts",
        ),
        (
            lambda p: (p / "bf16_zero_pp_rank_99999999999999_mp_rank_00_optim_states.pt").touch(),
            CheckpointDamaged,
            "of rank 3",
        ),
        (lambda p: (p / "mp_rank_01_model_states.pt").touch(), CheckpointMismatch, "tensor parallelism"),
        (lambda p: (p / "layer_01-model_states.pt").touch(), CheckpointMismatch, "pipeline"),
        (lambda p: os.truncate(p / "mp_rank_00_model_states.pt", 900), CheckpointDamaged, "cut short"),
        (lambda p: [f.unlink() for f in p.glob("*optim_states.pt")], CheckpointMismatch, "stage 0"),
    ],
)
def test_incomplete_folders(tmp_path: Path, break_it: Any, error: type[Exception], text: str) -> None:
    source = deepspeed_files.write(tmp_path / "ds", stage=2, world_size=3)
    break_it(source)
    with pytest.raises(error, match=text):
        convert(source, tmp_path / "ours", tag=None)
    assert not list((tmp_path / "ours").glob("*")) if (tmp_path / "ours").exists() else True


@pytest.mark.unit
@pytest.mark.parametrize("shape", [(2**62, 4), (-4,)])
def test_a_shape_that_is_not_there(tmp_path: Path, shape: tuple[int, ...]) -> None:
    source = deepspeed_files.write(tmp_path / "ds", stage=2, world_size=2)
    file = source / "mp_rank_00_model_states.pt"
    groups = [dict(group) for group in load_file(file)["param_shapes"]]
    groups[0]["more"] = shape
    torch.save({"module": {}, "param_shapes": groups}, file)
    with pytest.raises(CheckpointDamaged, match=r"come to \d+ elements|'more' is recorded with shape"):
        convert(source, tmp_path / "ours", tag=None)


@pytest.mark.unit
@pytest.mark.parametrize("tag", [f"../ds/global_step{deepspeed_files.STEP}", "x" * 300, "a\0b", ""])
def test_a_tag_is_a_name_inside_the_folder(tmp_path: Path, tag: str) -> None:
    deepspeed_files.write(tmp_path / "ds", stage=2, world_size=1)
    (tmp_path / "run").mkdir()
    assert deepspeed_path(tmp_path / "run", tag) is None


@pytest.mark.unit
def test_a_partition_that_is_too_short_is_no_shifted_weight(tmp_path: Path) -> None:
    source = deepspeed_files.write(tmp_path / "ds", stage=3, world_size=2)
    short = deepspeed_files.write(tmp_path / "other", stage=3, world_size=3)
    name = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(short / name, source / name)
    with pytest.raises(
        CheckpointDamaged, match=r"rank 1 holds 43 elements of group 0; its parameters come to 65"
    ):
        convert(source, tmp_path / "ours", tag=None)


@pytest.mark.ranks
def test_a_load_takes_the_folder_as_it_stands(tmp_path: Path) -> None:
    deepspeed_files.write(tmp_path, stage=3, world_size=2)
    before = sorted(path.name for path in tmp_path.iterdir())

    def action(group: ThreadRanks) -> Any:
        with readable(tmp_path, None, group) as (folder, tag, foreign):
            state = make_state(group.rank, layout_for(2), filled=False)
            return load(state, folder, tag, group=group).step, foreign

    assert good(on_ranks(2, action)) == [(6, tmp_path / "global_step6")] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert deepspeed_path(tmp_path, "global_step6") == tmp_path / "global_step6"
    assert deepspeed_path(tmp_path / "global_step6") == tmp_path / "global_step6"
    assert deepspeed_path(tmp_path, "other") is None

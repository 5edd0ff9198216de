"""Old checkpoints are removed, but never the newest, a tagged one, one being read, or a foreign folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.checkpoint_states import layout_for, make_state
from zerotrain.runtime import checkpoint
from zerotrain.runtime.checkpoint import Owner, SingleRank
from zerotrain.runtime.checkpoint.names import Committed, committed
from zerotrain.runtime.checkpoint.retention import reading, superfluous

pytestmark = pytest.mark.unit


LAYOUT = layout_for(1)


def save(folder: Path, step: int, *, keep_last: int | None = None, tag: str | None = None) -> tuple[str, ...]:
    result = checkpoint.save(
        make_state(0, LAYOUT, salt=step),
        folder,
        step=step,
        tag=tag,
        owner=Owner(attempt=1),
        keep_last=keep_last,
        group=SingleRank(),
    )
    return result.removed


def steps(folder: Path) -> list[int]:
    return sorted(item.step for item in committed(folder))


def test_newest_ones_stay(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        assert save(tmp_path, step, keep_last=3) == ()
    assert save(tmp_path, 40, keep_last=3) == ("step-0000000010-attempt-1",)
    assert save(tmp_path, 50, keep_last=1) == (
        "step-0000000040-attempt-1",
        "step-0000000030-attempt-1",
        "step-0000000020-attempt-1",
    )
    assert steps(tmp_path) == [50]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_newest_is_the_last_committed_not_the_highest_step(tmp_path: Path) -> None:
    save(tmp_path, 100)
    save(tmp_path, 50, keep_last=1)
    assert steps(tmp_path) == [50]


def test_tagged_and_foreign_folders_stay(tmp_path: Path) -> None:
    save(tmp_path, 10, tag="best")
    (tmp_path / "notes").mkdir()
    for step in (20, 30):
        save(tmp_path, step, keep_last=1)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        "best",
        "notes",
        "step-0000000030-attempt-1",
    ]


def test_one_that_is_being_read_stays_until_it_is_not(tmp_path: Path) -> None:
    save(tmp_path, 10)
    with reading(tmp_path / "step-0000000010-attempt-1"):
        save(tmp_path, 20, keep_last=1)
        assert steps(tmp_path) == [10, 20]
    save(tmp_path, 30, keep_last=1)
    assert steps(tmp_path) == [30]


def test_damaged_one_does_not_count_as_kept(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    (rank_file,) = (tmp_path / "step-0000000020-attempt-1").glob("*.safetensors")
    rank_file.write_bytes(rank_file.read_bytes()[:-1])
    loaded = checkpoint.load(make_state(0, LAYOUT, filled=False), tmp_path, group=SingleRank())
    assert loaded.step == 10
    save(tmp_path, 30, keep_last=2)
    assert steps(tmp_path) == [10, 20, 30]  # 30 and 10 are whole; 20 is removed once two newer ones are
    save(tmp_path, 40, keep_last=2)
    assert steps(tmp_path) == [30, 40]


def test_torn_folder_goes_once_enough_whole_ones_exist(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (tmp_path / "step-0000000010-attempt-1" / "COMMIT").unlink()
    save(tmp_path, 20, keep_last=1)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["step-0000000020-attempt-1"]


@given(
    st.lists(st.booleans(), max_size=12), st.integers(min_value=1, max_value=5), st.sets(st.integers(0, 11))
)
def test_newest_whole_one_always_stays(tags: list[bool], keep_last: int, damaged: set[int]) -> None:
    items = [
        Committed(
            path=Path("/c", f"tag-{index}" if tagged else f"step-{index:010d}-attempt-1"),
            step=index,
            attempt=1,
            sequence=index,
            manifest_sha256="",
        )
        for index, tagged in reversed(list(enumerate(tags)))
    ]
    broken = {item.path.name for item in items if item.step in damaged}
    gone = superfluous(items, keep_last=keep_last, damaged=broken)
    whole = [item for item in items if item.path.name not in broken and item.path.name.startswith("step-")]
    assert set(gone).isdisjoint(whole[:keep_last])
    assert set(whole[keep_last:]) <= set(gone)
    assert not [item for item in gone if item.path.name.startswith("tag-")]


def test_keep_none_is_refused() -> None:
    with pytest.raises(ValueError, match="keep_last must be at least 1"):
        superfluous([], keep_last=0)

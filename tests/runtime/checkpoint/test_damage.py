"""A torn or damaged checkpoint is found, reported and skipped for the one before; it is never loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.checkpoint_states import ThreadRanks, good, layout_for, make_state, on_ranks
from zerotrain.contract.exit_codes import ExitCode
from zerotrain.runtime import checkpoint
from zerotrain.runtime.checkpoint import LoadResult
from zerotrain.runtime.checkpoint.rawfile import WrittenFile, hash_file
from zerotrain.runtime.zero.state import CheckpointState, whole

pytestmark = pytest.mark.unit


WORLD = 2
NEWEST = "step-0000000020-attempt-1"
OLDER = "step-0000000010-attempt-1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with checkpoints of steps 10 and 20 whose contents differ."""
    for step in (10, 20):
        save_at(tmp_path, step)
    return tmp_path


def save_at(directory: Path, step: int) -> None:
    layout = layout_for(WORLD)

    def action(group: ThreadRanks) -> object:
        return checkpoint.save(make_state(group.rank, layout, salt=step), directory, step=step, group=group)

    good(on_ranks(WORLD, action))


def load_at(
    directory: Path, world: int = WORLD, tag: str | None = None
) -> list[tuple[LoadResult, CheckpointState]]:
    layout = layout_for(world)

    def action(group: ThreadRanks) -> tuple[LoadResult, CheckpointState]:
        state = make_state(group.rank, layout, filled=False)
        return checkpoint.load(state, directory, tag, group=group), state

    return good(on_ranks(world, action))


def flip_a_bit(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def cut(path: Path, keep: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])


def empty_object(path: Path) -> None:
    path.write_text("{}")


RANK_1 = "rank-00001-of-00002.safetensors"
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "data bit flipped": (lambda path: flip_a_bit(path / RANK_1, -1), f"{RANK_1} does not have the digest"),
    "header bit flipped": (lambda path: flip_a_bit(path / RANK_1, 20), f"{RANK_1} does not have the digest"),
    "file cut": (lambda path: cut(path / RANK_1, 0.5), f"{RANK_1} has"),
    "file empty": (lambda path: cut(path / RANK_1, 0), f"{RANK_1} has 0 bytes"),
    "file missing": (lambda path: (path / RANK_1).unlink(), f"{RANK_1} is missing"),
    "manifest cut": (lambda path: cut(path / "manifest.json", 0.9), "manifest.json does not have the digest"),
    "manifest bit flipped": (
        lambda path: flip_a_bit(path / "manifest.json", 99),
        "manifest.json does not have",
    ),
    "manifest missing": (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
    "commit missing": (lambda path: (path / "COMMIT").unlink(), "COMMIT is missing"),
    "commit cut": (lambda path: cut(path / "COMMIT", 0.5), ""),
    "commit empty object": (lambda path: empty_object(path / "COMMIT"), "COMMIT is torn"),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("world", [1, 3])
def test_previous_one_is_used_and_the_damage_reported(folder: Path, kind: str, world: int) -> None:
    damage, reason = DAMAGE[kind]
    damage(folder / NEWEST)
    for rank, (result, state) in enumerate(load_at(folder, world)):
        assert result.path == folder / OLDER
        assert result.step == 10
        ((path, message),) = result.rejected
        assert path == folder / NEWEST
        assert reason in message
        expected = make_state(rank, layout_for(world), salt=10)
        assert all(
            torch.equal(whole(state.streams[key]), whole(expected.streams[key])) for key in expected.streams
        )
        assert state.scalars == expected.scalars


def test_whole_folder_gone_or_latest_torn_does_not_matter(folder: Path) -> None:
    (folder / "latest").write_text("{")
    assert load_at(folder)[0][0].step == 20
    shutil.rmtree(folder / NEWEST)
    result = load_at(folder)[0][0]
    assert (result.step, result.rejected) == (10, ())


def test_nothing_whole_left_is_an_error_not_a_fresh_start(folder: Path) -> None:
    for name in (NEWEST, OLDER):
        flip_a_bit(folder / name / RANK_1, -1)
    for outcome in on_ranks(
        WORLD,
        lambda group: checkpoint.load(
            make_state(group.rank, layout_for(WORLD), filled=False), folder, group=group
        ),
    ):
        assert isinstance(outcome, checkpoint.CheckpointDamaged)
        assert outcome.exit_code == ExitCode.CHECKPOINT_UNUSABLE
        assert NEWEST in str(outcome)
        assert OLDER in str(outcome)


def test_damaged_one_that_was_asked_for_is_an_error(folder: Path) -> None:
    flip_a_bit(folder / NEWEST / RANK_1, -1)
    with pytest.raises(checkpoint.CheckpointDamaged, match=NEWEST):
        load_at(folder, tag=NEWEST)
    assert load_at(folder, tag=OLDER)[0][0].step == 10


def test_a_tag_that_is_not_there_names_those_that_are(folder: Path) -> None:
    with pytest.raises(checkpoint.CheckpointDamaged) as caught:
        load_at(folder, tag="global_step20")
    assert "checkpoint 'global_step20'" in str(caught.value)
    assert f"the folder holds: {NEWEST}, {OLDER}" in str(caught.value)


def test_empty_or_absent_folder_is_a_fresh_start(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "absent"):
        assert all(result.path is None for result, _ in load_at(directory))


def edited(change: Callable[[dict[str, object]], None]) -> Callable[[Path], None]:
    """Edit the manifest and sign it again, as if a faulty program had written it."""
    import hashlib

    def damage(path: Path) -> None:
        manifest = json.loads((path / "manifest.json").read_text())
        change(manifest)
        data = json.dumps(manifest).encode()
        (path / "manifest.json").write_bytes(data)
        commit = json.loads((path / "COMMIT").read_text())
        (path / "COMMIT").write_text(
            json.dumps(commit | {"manifest_sha256": hashlib.sha256(data).hexdigest()})
        )

    return damage


def _set(*keys: str | int, value: object) -> Callable[[dict[str, object]], None]:
    def change(manifest: dict[str, object]) -> None:
        node: object = manifest
        for key in keys[:-1]:
            node = node[key]  # type: ignore[index]
        node[keys[-1]] = value  # type: ignore[index]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("version", value=2), "this version reads"),
        (_set("extra", value=1), "manifest.extra is not a known key"),
        (_set("step", value="20"), "manifest.step must be a whole number"),
        (_set("step", value=True), "manifest.step must be a whole number"),
        (_set("world_size", value=3), "manifest.files has 2 entries for 3 ranks"),
        (_set("files", 0, "name", value="../../etc/passwd"), "must be a plain file name"),
        (_set("tensors", "embed.weight", "pieces", 0, 3, value=1), "leave a gap or overlap"),
        (_set("tensors", "embed.weight", "pieces", value=[]), "cover 0 of 65 elements"),
        (_set("tensors", "embed.weight", "pieces", 0, 0, value=7), "names file 7 of 2"),
        (_set("tensors", "embed.weight", "unit", value="none"), "is not in manifest.units"),
        (_set("units", "embed", "kinds", value={"master": "F33"}), "unknown dtype 'F33'"),
        (_set("client_state", value=[]), "manifest.client_state must be an object"),
    ],
)
def test_manifest_is_read_strictly(
    folder: Path, change: Callable[[dict[str, object]], None], message: str
) -> None:
    edited(change)(folder / NEWEST)
    result, _ = load_at(folder)[0]
    assert result.step == 10
    assert message in result.rejected[0][1]


def test_every_file_is_hashed_by_exactly_one_rank(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []

    def counting(path: Path) -> WrittenFile:
        hashed.append(path.name)
        return hash_file(path)

    monkeypatch.setattr("zerotrain.runtime.checkpoint.reader.hash_file", counting)
    for world in (1, 2, 3):
        hashed.clear()
        load_at(folder, world)
        assert sorted(hashed) == [f"rank-0000{rank}-of-00002.safetensors" for rank in range(2)]

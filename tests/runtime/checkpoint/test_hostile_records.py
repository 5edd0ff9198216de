"""A record that no JSON reader accepts is damage like any other.

Readers of the folder use the checkpoint before, saves continue, and every listing of the folder reports the
error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.checkpoint_states import layout_for, make_state
from zerotrain.runtime import checkpoint
from zerotrain.runtime.checkpoint import Owner, SingleRank
from zerotrain.runtime.checkpoint.fence import read_fence
from zerotrain.runtime.checkpoint.inspect import Condition, survey, verify

pytestmark = pytest.mark.unit

OWNER = Owner(attempt=1)
OLDER, NEWER = "step-0000000001-attempt-1", "step-0000000002-attempt-1"
HOSTILE: dict[str, str | bytes] = {
    "lists": "[" * 30_000,
    "objects": '{"step":' * 8_000,
    "closed lists": "[" * 30_000 + "]" * 30_000,
    "infinite": '{"step": 1e999, "attempt": Infinity, "job_uid": "", "sequence": 1e400}',
    "no number": '{"step": NaN, "attempt": NaN, "job_uid": ""}',
    "too many digits": '{"step": ' + "1" * 5000 + "}",
    "a number beyond 64 bits": '{"step": 1, "attempt": '
    + "9" * 400
    + ', "sequence": 1, "manifest_sha256": ""}',
    "no UTF-8": b'{"step": "\xff"}',
    "nothing": "",
    "a list": "[]",
    "a text": '"step"',
}


def write(path: Path, text: str | bytes) -> None:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def damage_commit(folder: Path, text: str | bytes) -> None:
    write(folder / "COMMIT", text)


def damage_manifest(folder: Path, text: str | bytes) -> None:
    """Replace the manifest and its digest in COMMIT, as a faulty or hostile writer would."""
    write(folder / "manifest.json", text)
    record = json.loads((folder / "COMMIT").read_bytes())
    record["manifest_sha256"] = hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    write(folder / "COMMIT", json.dumps(record))


def damage_client_state(folder: Path, text: str | bytes) -> None:
    """Damage the client state, a free-form part of an otherwise valid manifest."""
    manifest = (folder / "manifest.json").read_bytes()
    inner = text if isinstance(text, bytes) else text.encode()
    damage_manifest(folder, manifest.replace(b'"client_state":{}', b'"client_state":{"a":' + inner + b"}"))


def save(folder: Path, step: int) -> None:
    options = checkpoint.SaveOptions(owner=OWNER, keep_last=4)
    checkpoint.save(
        make_state(0, layout_for(1), salt=step), folder, step=step, options=options, group=SingleRank()
    )


def load(folder: Path) -> checkpoint.LoadResult:
    return checkpoint.load(make_state(0, layout_for(1), filled=False), folder, group=SingleRank())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (1, 2):
        save(tmp_path, step)
    return tmp_path


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("damage", [damage_commit, damage_manifest])
def test_the_one_before_is_taken(
    damage: Callable[[Path, str | bytes], None], text: str | bytes, folder: Path
) -> None:
    damage(folder / NEWER, text)
    looked_at = {row.path.name: row for row in survey(folder)}
    assert looked_at[NEWER].condition is Condition.DAMAGED
    assert looked_at[NEWER].reason
    assert looked_at[OLDER].is_latest
    assert verify(folder / NEWER, lambda _: None)
    assert verify(folder / OLDER, lambda _: None) == []
    loaded = load(folder)
    assert loaded.path is not None
    assert loaded.path.name == OLDER


@pytest.mark.parametrize("name", ["lists", "objects", "closed lists"])
def test_depth_within_a_whole_manifest(name: str, folder: Path) -> None:
    damage_client_state(folder / NEWER, HOSTILE[name])
    reasons = {row.path.name: row.reason for row in survey(folder)}
    assert "manifest.json is nested more than 64 deep" in reasons[NEWER]
    loaded = load(folder)
    assert loaded.path is not None
    assert loaded.path.name == OLDER


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_save_goes_on(text: str | bytes, folder: Path) -> None:
    damage_commit(folder / NEWER, text)
    extra = folder / "step-0000000009-attempt-1"
    extra.mkdir()
    write(extra / "COMMIT", text)
    save(folder, 3)
    loaded = load(folder)
    assert loaded.path is not None
    assert loaded.path.name == "step-0000000003-attempt-1"


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_damaged_fence_is_none(text: str | bytes, folder: Path) -> None:
    write(folder / "fence.json", text)
    assert read_fence(folder) is None
    save(folder, 3)
    assert load(folder).path == folder / "step-0000000003-attempt-1"


@pytest.mark.parametrize("attempt", ["1e999", "9" * 400, "-1", "true", '"1"', "null", "1.5"])
def test_an_attempt_that_cannot_be_one_fences_no_owner_off(attempt: str, folder: Path) -> None:
    write(folder / "fence.json", f'{{"attempt": {attempt}, "job_uid": ""}}')
    assert read_fence(folder) is None


@pytest.mark.parametrize("depth", [60, 20_000])
def test_client_state_that_could_not_be_read_back_is_refused_at_the_save(depth: int, folder: Path) -> None:
    nested: object = 1
    for _ in range(depth):
        nested = [nested]
    options = checkpoint.SaveOptions(owner=OWNER, client_state={"a": nested})
    with pytest.raises(checkpoint.CheckpointError, match="nested more than"):
        checkpoint.save(make_state(0, layout_for(1)), folder, step=5, options=options, group=SingleRank())

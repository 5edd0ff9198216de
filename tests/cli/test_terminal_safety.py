"""Commands that read a folder of checkpoints or a configuration never pass its texts raw to a terminal."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest

from tests.cli.test_checkpoint_commands import save_at
from tests.support.commands import Done, zerotrain

pytestmark = pytest.mark.unit


ATTACK = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"
FORBIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
NO_COLOUR = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200"}


def clean(done: Done) -> Done:
    """Check that the output contains no control sequence."""
    for text in (done.out, done.err):
        assert FORBIDDEN.search(text) is None, repr(text)
    return done


def test_the_check_sees_an_attack() -> None:
    with pytest.raises(AssertionError):
        clean(Done(code=0, out=f"a {ATTACK}", err=""))


def test_names_and_reasons_of_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    hostile = save_at(folder, 1, step=1, salt=1).rename(folder / f"best{ATTACK}")
    (hostile / "DAMAGED").write_text(json.dumps({"reason": f"no{ATTACK}reason"}))
    torn = folder / f"torn{ATTACK}"
    torn.mkdir()
    (torn / "COMMIT").write_text(json.dumps({"step": ATTACK}))
    for output in ("table", "json", "yaml"):
        listed = clean(zerotrain("checkpoint", "ls", folder, "-o", output, env=NO_COLOUR))
        assert "best" in listed.out
        assert "reason" in listed.out
        assert "torn" in clean(zerotrain("checkpoint", "verify", folder, "-o", output, env=NO_COLOUR)).out
    other = save_at(tmp_path / "other", 1, step=1)
    clean(zerotrain("checkpoint", "diff", torn, other, env=NO_COLOUR))
    clean(zerotrain("checkpoint", "export", torn, tmp_path / "out", env=NO_COLOUR))
    done = clean(zerotrain("checkpoint", "export", hostile, tmp_path / f"out{ATTACK}", env=NO_COLOUR))
    assert done.code == 0, done.err
    done = clean(zerotrain("report", folder, "--file", tmp_path / f"page{ATTACK}.html", env=NO_COLOUR))
    assert done.code == 0, done.err


def test_names_of_tensors(tmp_path: Path) -> None:
    """Names of tensors come from the manifest; the training program chooses those of a model's parameters."""
    first = save_at(tmp_path / "first", 1, step=1)
    second = shutil.copytree(first, tmp_path / "second" / first.name)
    manifest = json.loads((second / "manifest.json").read_text())
    name = next(name for name in manifest["tensors"] if name not in manifest["aliases"].values())
    manifest["tensors"][f"{name}{ATTACK}"] = manifest["tensors"].pop(name)
    data = json.dumps(manifest).encode()
    (second / "manifest.json").write_bytes(data)
    commit = json.loads((second / "COMMIT").read_text())
    commit["manifest_sha256"] = hashlib.sha256(data).hexdigest()
    (second / "COMMIT").write_text(json.dumps(commit))
    for output in ("table", "json", "yaml"):
        done = clean(zerotrain("checkpoint", "diff", first, second, "-o", output, env=NO_COLOUR))
        assert name in done.out, done.err


def test_keys_and_values_of_a_configuration(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({"train_batch_size": 4, f"odd{ATTACK}": f"value{ATTACK}"}))
    for verb in ("show", "check"):
        for output in ("table", "json", "yaml"):
            done = clean(zerotrain("config", verb, file, "-o", output, env=NO_COLOUR))
            assert "odd" in done.out + done.err
    file.write_text(json.dumps({"train_batch_size": 4, "wall_clock_breakdown": True, "optimizer": None}))
    assert clean(zerotrain("config", "show", file, env=NO_COLOUR)).code == 0

"""`zerotrain checkpoint ls|verify|diff|import` on whole, damaged and unfinished checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support import deepspeed_files
from tests.support.checkpoint_states import ThreadRanks, good, layout_for, make_state, on_ranks
from tests.support.private_mount import can_mount
from zerotrain.cli.checkpoint import age_text, size_text
from zerotrain.cli.errors import CliError
from zerotrain.cli.main import app
from zerotrain.contract.exit_codes import ExitCode
from zerotrain.runtime.checkpoint import save


def save_at(
    directory: Path, world_size: int, *, step: int, salt: int = 0, change: Any = None, **options: Any
) -> Path:
    layout = layout_for(world_size)

    def action(group: ThreadRanks) -> Path:
        state = make_state(group.rank, layout, salt=salt)
        if change is not None:
            change(state)
        return save(state, directory, step=step, group=group, **options).path

    return good(on_ranks(world_size, action))[0]


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)], catch_exceptions=True)
    if isinstance(result.exception, CliError):
        return result.exception.code, str(result.exception)
    return result.exit_code, result.output


def rows(directory: Path) -> dict[str, dict[str, Any]]:
    code, output = run("ls", directory, "-o", "json")
    assert code == 0
    return {row["name"]: row for row in json.loads(output)}


@pytest.mark.unit
def test_ls(tmp_path: Path) -> None:
    old = save_at(tmp_path, 2, step=3)
    new = save_at(tmp_path, 3, step=5)
    best = save_at(tmp_path, 1, step=4, tag="best", save_latest=False)
    (tmp_path / ".tmp-step-0000000009-attempt-1-aa-0").mkdir()
    found = rows(tmp_path)
    assert list(found) == [best.name, new.name, old.name, ".tmp-step-0000000009-attempt-1-aa-0"]
    assert [
        (row["step"], row["world_size"], row["condition"], row["is_latest"]) for row in found.values()
    ] == [
        *[
            (4, 1, "whole", False),
            (5, 3, "whole", True),
            (3, 2, "whole", False),
            (None, None, "partial", False),
        ]
    ]
    assert found[old.name]["num_bytes"] == sum(file.stat().st_size for file in old.iterdir())
    (line,) = [line for line in run("ls", tmp_path)[1].splitlines() if "step-0000000005-attempt-1" in line]
    assert line.split()[1:4] == ["5", "1", "3"]


@pytest.mark.unit
def test_damage_is_seen(tmp_path: Path) -> None:
    whole = save_at(tmp_path, 2, step=1)
    cut = save_at(tmp_path, 2, step=2)
    flipped = save_at(tmp_path, 2, step=3)
    torn = save_at(tmp_path, 2, step=4)
    with open(cut / "rank-00001-of-00002.safetensors", "r+b") as file:
        file.truncate(4100)
    with open(flipped / "rank-00000-of-00002.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    (torn / "manifest.json").write_bytes((torn / "manifest.json").read_bytes() + b" ")
    found = {name: (row["condition"], row["reason"]) for name, row in rows(tmp_path).items()}
    assert found[whole.name] == ("whole", "")
    assert found[cut.name] == ("damaged", "rank-00001-of-00002.safetensors has 4100 bytes instead of 20096")
    assert found[torn.name] == ("damaged", "manifest.json does not have the digest that COMMIT records")
    assert found[flipped.name] == ("whole", "")  # sizes alone cannot tell
    code, output = run("verify", tmp_path, "-o", "json")
    assert code == ExitCode.CHECKPOINT_UNUSABLE
    problems = {Path(item["path"]).name: item["problems"] for item in json.loads(output)}
    assert problems[whole.name] == []
    assert problems[flipped.name] == [
        "rank-00000-of-00002.safetensors does not have the digest that manifest.json records"
    ]
    assert problems[cut.name]
    assert problems[torn.name]
    assert run("verify", tmp_path, whole.name) == (0, f"{whole.name}: whole\n")
    assert run("verify", flipped)[0] == ExitCode.CHECKPOINT_UNUSABLE


READERS = (
    ["ls", "{run}"],
    ["verify", "{run}"],
    ["diff", "{path}", "{path}"],
    ["export", "{run}", "{run}/../weights"],
)


@pytest.mark.ranks
@pytest.mark.parametrize("command", READERS, ids=lambda command: command[0])
def test_a_volume_that_fails_is_no_damage(tmp_path: Path, command: list[str]) -> None:
    """The kernel gives its own input/output error: a file of which no byte can be read is mounted over
    one.
    """
    if reason := can_mount():
        pytest.skip(f"no private mount here: {reason}")
    path = save_at(tmp_path / "run", 1, step=1)
    arguments = [part.format(run=path.parent, path=path) for part in command]
    script = 'mount --bind /proc/$$/mem "$1" && shift && exec "$@"'
    cli = [sys.executable, "-m", "zerotrain.cli", "checkpoint", *arguments]
    result = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", str(path / "manifest.json"), *cli],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == ExitCode.STORAGE_FAILED, result.stderr
    assert "Input/output error" in result.stderr
    assert result.stdout == ""


@pytest.mark.unit
def test_diff_across_numbers_of_ranks(tmp_path: Path) -> None:
    first = save_at(tmp_path / "a", 2, step=3)
    save_at(tmp_path / "b", 5, step=3)
    assert run("diff", tmp_path / "a", tmp_path / "b") == (
        *(0, "equal: every parameter, optimizer state and buffer\n"),
    )

    def change(state: Any) -> None:
        if state.rank == 1:  # element 20 of the unit's flat buffer, the first of rank 1 of 4
            stream = state.streams["embed", "master"]
            stream.write(0, stream.read(0, 1) + 0.5)

    save_at(tmp_path / "c", 4, step=4, change=change)
    code, output = run("diff", first, tmp_path / "c", "-o", "json")
    assert code == 1
    answer = json.loads(output)
    assert answer["steps"] == [3, 4]
    (difference,) = answer["differences"]
    assert (difference["fqn"], difference["kind"], difference["differing"]) == ("embed.weight", "master", 1)
    assert difference["max_abs"] == pytest.approx(0.5)
    assert "step 3 against step 4" in run("diff", first, tmp_path / "c")[1]


@pytest.mark.unit
def test_diff_names_what_one_side_lacks(tmp_path: Path) -> None:
    save_at(tmp_path / "a", 1, step=1)

    def change(state: Any) -> None:
        state.streams = {key: value for key, value in state.streams.items() if key[0] != "frozen"}
        del state.streams["embed", "exp_avg"]

    save_at(tmp_path / "b", 1, step=1, change=change)
    code, output = run("diff", tmp_path / "a", tmp_path / "b", "-o", "json")
    assert code == 1
    assert [(row["fqn"], row["kind"], row["note"]) for row in json.loads(output)["differences"]] == [
        ("embed.weight", "exp_avg", "only in the first"),
        ("lora.base", "*", "only in the first"),
    ]


@pytest.mark.ranks
def test_import(tmp_path: Path) -> None:
    deepspeed_files.write(tmp_path / "ds", stage=3, world_size=2, extra={"odd": {1, 2}})
    code, output = run("import", tmp_path / "ds", tmp_path / "ours")
    assert code == 0
    assert "client state 'odd' was left out: set is not plain data" in output
    save_at(tmp_path / "reference", 1, step=6)
    assert run("verify", tmp_path / "ours")[0] == 0
    assert run("diff", tmp_path / "ours", tmp_path / "reference")[0] == 0
    code, text = run("import", tmp_path / "ours", tmp_path / "more")
    assert code == ExitCode.BAD_CONFIG
    assert "holds no DeepSpeed checkpoint" in text


@pytest.mark.unit
@pytest.mark.parametrize("command", [["ls"], ["verify"], ["diff", "."]])
def test_folders_that_are_not_there(command: list[str], tmp_path: Path) -> None:
    code, text = run(*command, tmp_path / "missing")
    assert code == ExitCode.BAD_CONFIG
    assert "missing: No such file or directory" in text


@pytest.mark.unit
def test_a_side_without_a_checkpoint_is_reported_with_a_next_step(tmp_path: Path) -> None:
    error = CliRunner().invoke(app, ["checkpoint", "diff", str(tmp_path), str(tmp_path)]).exception
    assert isinstance(error, CliError)
    assert (error.code, "holds no whole checkpoint" in str(error)) == (ExitCode.CHECKPOINT_UNUSABLE, True)
    assert f"zerotrain checkpoint verify {tmp_path}" in str(error.next_step)


@pytest.mark.ranks
def test_looking_needs_no_torch() -> None:
    program = "import sys, zerotrain.cli.checkpoint; print('torch' in sys.modules or 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.unit
def test_texts() -> None:
    assert [size_text(value) for value in (0, 1023, 1536, 3 * 2**30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 GiB",
    ]
    assert [age_text(value) for value in (-1, 59, 120, 7200, 200_000)] == [
        "0 s",
        "59 s",
        "2 min",
        "2 h",
        "2 d",
    ]

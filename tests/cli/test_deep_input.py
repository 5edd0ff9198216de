"""Files with very deep nesting, or with numbers and characters that no reader accepts: every command that
takes a file ends with code 64, names the file, and prints no traceback.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.commands import Done, zerotrain
from zerotrain.client.yaml_document import MAX_DEPTH, YamlProblem, read_documents
from zerotrain.contract.config import ConfigError, load
from zerotrain.contract.exit_codes import ExitCode

pytestmark = pytest.mark.unit

DEEP = 1200
DEEP_YAML = 500
"""Depth of YAML, whose reader takes several frames for each level."""

HEAD = "apiVersion: zerotrain.dev/v1alpha1\nkind: ZeroTrainingJob\nmetadata: {name: deep}\nspec:\n"


def chain(first: str, step: str) -> str:
    """Return a chain of aliases, each of which refers to the one before."""
    lines = [f"a0: &a0 {first}"] + [f"a{n}: &a{n} " + step.format(n - 1) for n in range(1, DEEP_YAML)]
    return "\n".join(lines)


HOSTILE = {
    "lists": HEAD + "  workers: " + "[" * DEEP_YAML + "]" * DEEP_YAML,
    "open lists": "[" * DEEP_YAML,
    "mappings": HEAD + "  config: " + "{a: " * DEEP_YAML + "1" + "}" * DEEP_YAML,
    "blocks": "".join(" " * level + "a:\n" for level in range(300)) + " " * 300 + "a: 1",
    "dashes": "- " * DEEP_YAML + "1",
    "keys": "? " * DEEP_YAML + "1",
    "chained lists": chain("[1]", "[*a{}]"),
    "chained merges": chain("{b: 1}", "{{<<: *a{}}}"),
    "doubled merges": chain("{}", "{{<<: [*a{0}, *a{0}]}}"),
    "endless list": "a: &a [*a]",
    "endless merge": "a: &a {<<: *a}",
    "a long number": HEAD + "  workers: " + "1" * 5000,
    "a tagged text": HEAD + "  workers: !!int two",
    "a tagged float": HEAD + "  workers: !!float two",
    "no character": 'a: "\\U99999999"',
}

DEEP_JSON = '{"a":' * DEEP + "1" + "}" * DEEP


def check_failure(done: Done, name: str) -> None:
    assert done.code == int(ExitCode.BAD_CONFIG)
    assert "Traceback" not in done.err + done.out
    assert name in done.err + done.out
    assert len(done.err) < 20_000


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_documents(text: str) -> None:
    with pytest.raises(YamlProblem):
        read_documents(text)


@pytest.mark.parametrize("name", ["mappings", "chained lists", "a long number"])
@pytest.mark.parametrize("command", ["plan", "run", "submit", "config show", "config check"])
def test_job_files(command: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(HOSTILE[name])
    check_failure(zerotrain(*command.split(), "job.yaml"), "job.yaml")


@pytest.mark.parametrize("command", ["config show", "config check"])
@pytest.mark.parametrize("text", [DEEP_JSON, "{" + "[" * DEEP, '{"a": ' + "1" * 5000 + "}"])
def test_configurations(command: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds_config.json").write_text(text)
    check_failure(zerotrain(*command.split(), "ds_config.json"), "ds_config.json")


@pytest.mark.parametrize("text", [DEEP_JSON, "[" * DEEP, '{"hidden_size": ' + "1" * 5000 + "}"])
def test_model_folders(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(text)
    check_failure(
        zerotrain("init", "job.yaml", "--model", "/models/m", "--model-config", tmp_path / "model"),
        "config.json",
    )


def test_what_nothing_has_counted_before_ends_with_the_code_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(**more: str) -> None:
        endless(**more)

    monkeypatch.setattr("zerotrain.cli.main.app", endless)
    done = zerotrain("plan", "job.yaml")
    check_failure(done, "nests its values too deeply")


def test_the_depth_that_is_allowed_is_read() -> None:
    text = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    [document] = read_documents(text)
    assert json.dumps(document.value) == text


def test_a_configuration_in_code_has_the_bound_of_a_file() -> None:
    nested: object = 1
    for _ in range(DEEP):
        nested = {"a": nested}
    for depth in (DEEP, 64):
        with pytest.raises(ConfigError, match="may nest 64 deep"):
            load(json.loads('{"a":' * depth + "{}" + "}" * depth) if depth < 100 else {"a": nested})


@given(st.text(alphabet=" \n-?:{}[]&*a!<'\"|>%#@`\\x\t,0e.~=", max_size=60))
def test_any_text_is_read_or_refused_with_one_error(text: str) -> None:
    with contextlib.suppress(YamlProblem):
        read_documents(text)

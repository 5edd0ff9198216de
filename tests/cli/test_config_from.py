"""spec.configFrom without a cluster: the ConfigMap of the job's file, or the file that --config names.

The same job with its configuration in spec.config is the reference.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Done, zerotrain
from zerotrain.client import Client, ConfigSourceError, load_job, local_run
from zerotrain.contract.config import loads

pytestmark = pytest.mark.unit


TEXT = """\
{
  "train_micro_batch_size_per_gpu": 4,     // a comment
  "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8,},
}
"""
OTHER = '{"train_micro_batch_size_per_gpu": 2}'
SOURCE = {"configFrom": {"configMapKeyRef": {"name": "ds", "key": "ds.json"}}}


def job(namespace: str | None = None, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "zerotrain.dev/v1alpha1",
        "kind": "ZeroTrainingJob",
        "metadata": {"name": "gpt", **({"namespace": namespace} if namespace else {})},
        "spec": {
            "workers": 2,
            "image": "i",
            "model": {"preset": "gpt-1m"},
            "data": {"path": "builtin:python-stdlib"},
            "steps": 10,
            "resources": {"memory": "1Gi"},
            **(spec or SOURCE),
        },
    }


def config_map(
    name: str = "ds", namespace: str | None = None, data: Any = None, **fields: Any
) -> dict[str, Any]:
    place = {"namespace": namespace} if namespace else {}
    held = {"data": {"ds.json": TEXT} if data is None else data} if not fields else {}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, **place}, **held, **fields}


def written(folder: Path, *documents: dict[str, Any], name: str = "job.yaml") -> Path:
    path = folder / name
    path.write_text("\n---\n".join(json.dumps(item, indent=1) for item in documents))
    return path


def plan(*arguments: str | Path) -> Done:
    return zerotrain("plan", *arguments, "-o", "json")


def answer(done: Done) -> dict[str, Any]:
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    found.pop("config_from")
    return found


def run_files(file: Path, config: Path | None = None) -> dict[str, Any]:
    """Return the files that the ranks of a local run read."""
    files = local_run(load_job(file), config=config).files
    assert set(files) == {"ds_config.json", "train.json"}
    return {name: json.loads(text) for name, text in files.items()}


@pytest.fixture
def inline(tmp_path: Path) -> Path:
    """The same job with its configuration in the spec."""
    return written(tmp_path, job(config=loads(TEXT)), name="inline.yaml")


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "ds.json"
    path.write_text(TEXT)
    return path


ENCODED = {"ds.json": base64.b64encode(TEXT.encode()).decode()}
FOUND: list[tuple[str, list[dict[str, Any]]]] = [
    ("before the job", [config_map(), job()]),
    ("after the job", [job(), config_map()]),
    ("both in one namespace", [config_map(namespace="a"), job("a")]),
    ("a job that names none", [config_map(namespace="a"), job()]),
    ("a ConfigMap that names none", [config_map(), job("a")]),
    (
        "the job's own namespace first",
        [config_map(namespace="b", data={}), config_map(namespace="a"), config_map(data={}), job("a")],
    ),
    ("applied last", [config_map(data={"ds.json": OTHER}), config_map(), job()]),
    (
        "others beside it",
        [
            config_map(name="x", data={}),
            {"kind": "ConfigMap"},
            config_map(),
            config_map(kind="Secret"),
            job(),
        ],
    ),
    ("binaryData", [config_map(binaryData=ENCODED), job()]),
]


@pytest.mark.parametrize("documents", [case[1] for case in FOUND], ids=[case[0] for case in FOUND])
def test_the_config_map_of_the_file(documents: list[dict[str, Any]], inline: Path, tmp_path: Path) -> None:
    file = written(tmp_path, *documents)
    assert answer(plan(file)) == answer(plan(inline))
    for command in ("check", "show"):
        done = zerotrain("config", command, file, "-o", "json")
        assert done == zerotrain("config", command, inline, "-o", "json")
        assert "zero_optimization.stage" in done.out
    assert run_files(file) == run_files(inline)
    assert Client.plan(file) == Client.plan(inline)


def test_the_file_that_is_named(inline: Path, text_file: Path, tmp_path: Path) -> None:
    file = written(tmp_path, job())
    assert answer(plan(file, "--config", text_file)) == answer(plan(inline))
    for command in ("check", "show"):
        done = zerotrain("config", command, file, "--config", text_file, "-o", "json")
        assert done == zerotrain("config", command, inline, "-o", "json")
    assert run_files(file, text_file) == run_files(inline)
    assert Client.plan(job(), config=text_file) == Client.plan(inline)


@pytest.mark.parametrize("documents", [[config_map(), job()], [job(config=loads(TEXT))]], ids=["map", "spec"])
def test_a_file_with_the_same_configuration_is_accepted(
    documents: list[dict[str, Any]], inline: Path, text_file: Path, tmp_path: Path
) -> None:
    file = written(tmp_path, *documents)
    assert answer(plan(file, "--config", text_file)) == answer(plan(inline))


def test_the_plan_names_the_source_of_the_configuration(
    text_file: Path, inline: Path, tmp_path: Path
) -> None:
    file, alone = written(tmp_path, config_map(), job()), written(tmp_path, job(), name="alone.yaml")
    assert "- configuration: ConfigMap ds, key ds.json; the cluster's" in zerotrain("plan", file).out
    named = zerotrain("plan", alone, "--config", text_file).out
    assert f"- configuration: --config {text_file}; the cluster's" in named
    assert json.loads(plan(inline).out)["config_from"] == "spec.config"


WRONG: list[tuple[str, list[dict[str, Any]], str, str]] = [
    (
        "no ConfigMap",
        [job()],
        "spec.configFrom: the configuration is in ConfigMap ds, which is not in this file; it is not read",
        "give the JSON that its key ds.json holds with --config FILE",
    ),
    (
        "another one",
        [config_map(name="dz"), job()],
        "ConfigMap ds, which is not in this file (it has -/dz, namespace/name)",
        "--config FILE",
    ),
    (
        "another namespace",
        [config_map(namespace="b"), job("a")],
        "ConfigMap a/ds, which is not in this file (it has b/ds, namespace/name)",
        "--config FILE",
    ),
    (
        "two namespaces",
        [config_map(namespace="b"), config_map(namespace="a"), job()],
        "exists in namespaces a, b",
        "write metadata.namespace into the job",
    ),
    (
        "no such key",
        [config_map(data={"a.json": TEXT, "b.json": TEXT}), job()],
        "spec.configFrom.configMapKeyRef.key: must be a key of ConfigMap ds, which has a.json, b.json; got "
        "'ds.json'",
        "name one of its keys, or add ds.json to its data",
    ),
    ("no key", [config_map(data={}), job()], "which has none; got 'ds.json'", "add ds.json to its data"),
    (
        "no text",
        [config_map(data={"ds.json": {"a": 1}}), job()],
        "data.ds.json: must be a text; got a mapping",
        "write it as a block: ds.json: |",
    ),
    (
        "no base64",
        [config_map(binaryData={"ds.json": "{...}"}), job()],
        "binaryData.ds.json: must be UTF-8 text in base64",
        "put the JSON under data",
    ),
    (
        "no UTF-8",
        [config_map(binaryData={"ds.json": "/w=="}), job()],
        "binaryData.ds.json: must be UTF-8 text in base64",
        "put the JSON under data",
    ),
    (
        "no JSON",
        [config_map(data={"ds.json": '{\n "a" 1}'}), job()],
        "ConfigMap ds, key ds.json:2:6: must be JSON",
        "correct ",
    ),
    (
        "a wrong value",
        [config_map(data={"ds.json": '{"zero_optimization": {"stage": 7}}'}), job()],
        "job.yaml:8: ConfigMap ds, key ds.json: zero_optimization.stage: must be one of 0, 1, 2, 3; got 7",
        "correct ",
    ),
]


@pytest.mark.parametrize(
    ("documents", "expected", "way_out"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG]
)
def test_what_cannot_be_read(
    documents: list[dict[str, Any]], expected: str, way_out: str, tmp_path: Path
) -> None:
    done = plan(written(tmp_path, *documents))
    assert done.code == 64
    message, next_step = done.err.split("\nnext: ")
    assert message.startswith(f"error (64): {tmp_path / 'job.yaml'}:")
    assert expected in message
    assert way_out in next_step


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "--config must be a readable file (No such file or directory); got "),
        (b"\xff", "--config must be UTF-8 text"),
        (b"[1]", "ds.json: must be a JSON object; got [1]"),
        (b'{"a" 1}', "ds.json:1:6: must be JSON"),
        (b'{"zero_optimization": {"stage": 7}}', "ds.json: zero_optimization.stage: must be one of"),
    ],
    ids=["nowhere", "bytes", "list", "syntax", "value"],
)
def test_a_named_file_that_is_wrong(content: bytes | None, expected: str, tmp_path: Path) -> None:
    given = tmp_path / "ds.json"
    if content is not None:
        given.write_bytes(content)
    done = plan(written(tmp_path, job()), "--config", given)
    assert done.code == 64
    assert expected in done.err
    assert "--config" in done.err.splitlines()[0]


@pytest.mark.parametrize(
    ("documents", "place"),
    [([config_map(), job()], "ConfigMap ds, key ds.json"), ([job(config=loads(TEXT))], "spec.config")],
    ids=["map", "spec"],
)
@pytest.mark.parametrize("command", [("plan",), ("run",), ("config", "check"), ("config", "show")], ids=str)
def test_two_configurations_that_differ(
    documents: list[dict[str, Any]], place: str, command: tuple[str, ...], tmp_path: Path
) -> None:
    """The command must not guess which of the two the workers would read."""
    (tmp_path / "ds.json").write_text(OTHER)
    done = zerotrain(*command, written(tmp_path, *documents), "--config", tmp_path / "ds.json")
    assert done.code == 64
    differ = f"{place} and --config {tmp_path / 'ds.json'} differ in 'train_micro_batch_size_per_gpu'"
    assert differ in done.err
    assert "leave out --config" in done.err


def test_a_configuration_has_no_other(text_file: Path) -> None:
    done = zerotrain("config", "check", text_file, "--config", text_file)
    assert done.code == 2
    assert "is a configuration itself" in done.err


def test_without_it_the_answer_of_a_program_is_the_operators(tmp_path: Path) -> None:
    for given in (job(), written(tmp_path, job())):
        found = Client.plan(given)
        assert found.verdict == "Unknown"
        assert "`zerotrain plan JOB.YAML` plans it" in found.message
    with pytest.raises(ConfigSourceError, match="must be a key"):
        Client.plan(written(tmp_path, config_map(data={}), job()))


HINTS: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
    ({"command": ["x"], "config": {}, "model": None, "data": None}, (), "spec.model.parameters, or a config"),
    ({"model": {"path": "/m"}, "config": {}}, (), "the model's config.json with --model-config"),
    ({"model": {"factory": {"function": "a.b:c"}}, "config": {}}, (), "the model's size as spec.model"),
    ({"config": {"train_batch_size": 4}}, ("--workers", "3"), "give other --workers"),
]


@pytest.mark.parametrize(("spec", "options", "hint"), HINTS, ids=["program", "path", "factory", "batch"])
def test_the_way_out_is_the_cases_own(
    spec: dict[str, Any], options: tuple[str, ...], hint: str, tmp_path: Path
) -> None:
    body = job(**spec)
    body["spec"] = {key: value for key, value in body["spec"].items() if value is not None}
    done = plan(written(tmp_path, body), *options)
    assert done.code == 64
    assert hint in done.err.split("\nnext: ")[1]

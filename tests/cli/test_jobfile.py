"""Job files: values are what kubectl sends, errors name file, line, field, rule and value."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.devcluster import Devcluster
from zerotrain.client.jobfile import MAX_PROBLEMS, JobFileError, load_job, parse_job
from zerotrain.client.yaml_document import YamlProblem, read_documents

JOB = """\
apiVersion: zerotrain.dev/v1alpha1
kind: ZeroTrainingJob
metadata: {name: gpt}
spec:
  workers: 2
  image: example.org/zerotrain:1
  model: {gpt: {dModel: 64, layers: 2, heads: 4, context: 64}}
  data: {path: "builtin:python-stdlib"}
  steps: 1e3
  config: {optimizer: {type: AdamW, params: {lr: 5e-6}}}
"""

SAME_FOR_KUBECTL = [
    *("5e-6", "5e8", "1e3", "0.0001", "1.", ".5", "+5", "-3", "1_000", "0o17", "0x1F", "0b11", "1.5e+3", "0"),
    *("true", "True", "FALSE", "null", "~", "", '"yes"', "'017'", "2024-01-01", "12:30:45", "5e", "1.2.3"),
    *("hello world", "{a: 5e8, b: [1, 2.0]}", "[a, 1]", '"5e8"', "!!str 5", "v1", "0.1.0"),
]


def value_of(text: str) -> Any:
    [document] = read_documents(f"value: {text}\n")
    return document.value["value"]


@pytest.fixture(scope="module")
def kubectl(devcluster: Devcluster) -> tuple[str, ...]:
    return str(devcluster.program), "kubectl"


@pytest.mark.cluster
def test_values_are_what_kubectl_sends(kubectl: tuple[str, ...], tmp_path: Path) -> None:
    """kubectl itself turns the file into JSON, without a cluster."""
    file = tmp_path / "values.yaml"
    lines = [f"  v{index}: {text}" for index, text in enumerate(SAME_FOR_KUBECTL)]
    file.write_text("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: x}\nspec:\n" + "\n".join(lines) + "\n")
    out = subprocess.run(
        [*kubectl, "annotate", "--local", "-f", str(file), "a=b", "-o", "json"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    sent = json.loads(out)["spec"]
    ours = read_documents(file.read_text())[0].value["spec"]
    for index, text in enumerate(SAME_FOR_KUBECTL):
        key = f"v{index}"
        assert (ours[key], type(ours[key])) == (sent[key], type(sent[key])), text


@pytest.mark.unit
@pytest.mark.parametrize("text", ["yes", "No", "on", "OFF", "y", "N", "017", "-08"])
def test_values_that_kubectl_reads_another_way_are_refused(text: str) -> None:
    with pytest.raises(YamlProblem, match=r"kubectl"):
        value_of(text)


@pytest.mark.unit
@pytest.mark.parametrize("text", [".inf", "-.INF", ".nan", "1e400"])
def test_numbers_without_a_form_in_json_are_refused(text: str) -> None:
    with pytest.raises(YamlProblem, match="finite"):
        value_of(text)


@pytest.mark.unit
def test_anchors_and_merge_keys_are_resolved() -> None:
    [document] = read_documents("base: &b {x: 1, z: 2}\nother:\n  <<: *b\n  z: 3\nthird: *b\n")
    assert document.value["other"] == {"x": 1, "z": 3}
    assert document.value["third"] == {"x": 1, "z": 2}


@pytest.mark.unit
def test_a_bomb_of_aliases_is_refused() -> None:
    lines = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 6)]
    with pytest.raises(YamlProblem, match="more than"):
        read_documents("\n".join(lines))


@pytest.mark.unit
def test_a_correct_file_becomes_the_operators_model(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + JOB.encode())
    job = load_job(path).job
    assert (job.name, job.spec.steps, job.spec.world_size) == ("gpt", 1000, 2)
    assert job.spec.config == {"optimizer": {"type": "AdamW", "params": {"lr": 5e-6}}}


@pytest.mark.unit
def test_a_claim_in_the_jobs_file_is_left_to_kubectl() -> None:
    claim = "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: c}\n---\n"
    assert parse_job(claim + JOB, source="job.yaml").job.name == "gpt"


def errors(text: str) -> str:
    with pytest.raises(JobFileError) as caught:
        parse_job(text, source="job.yaml")
    return str(caught.value)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "  workers: 2",
            "  workers: 0",
            "job.yaml:5: spec.workers: Input should be greater than or equal to 1",
        ),
        (
            "  workers: 2",
            "  wokers: 2",
            "job.yaml:5: spec.wokers: is not a field here; did you mean workers?",
        ),
        (
            "  workers: 2",
            '  workers: "2"',
            "job.yaml:5: spec.workers: Input should be a valid integer; got '2'",
        ),
        ("  workers: 2", "  workers: yes", "job.yaml:5: spec.workers: yes is a text"),
        ("  workers: 2", "  workers: 2\n  workers: 3", "job.yaml:6: spec.workers: is given twice"),
        ("layers: 2", "layers: two", "job.yaml:7: spec.model.gpt.layers: Input should be a valid integer"),
        (
            "layers: 2",
            "layer: 2",
            "job.yaml:7: spec.model.gpt.layer: is not a field here; did you mean layers?",
        ),
        ("layers: 2, ", "", "job.yaml:7: spec.model.gpt.layers: is missing; it has no default"),
        ("builtin:python-stdlib", "relative", "job.yaml:8: spec.data.path: "),
        ("  image: example.org/zerotrain:1\n", "", "job.yaml:4: spec.image: is missing"),
        ("v1alpha1", "v9", "job.yaml:1: apiVersion: "),
        ("kind: ZeroTrainingJob", "kind: Job", "job.yaml:1: holds no object with"),
        ("  steps: 1e3", "\tsteps: 1", "job.yaml:9: not YAML"),
        ("  steps: 1e3", "  steps: !big 1", "job.yaml:9: spec.steps: tag !big is not known"),
        ("  steps: 1e3", "  steps: 1.5", "job.yaml:9: spec.steps: "),
        ("  steps: 1e3", "  5: 1", "job.yaml:9: spec: a key must be a text"),
    ],
)
def test_errors_name_line_field_rule_and_value(old: str, new: str, expected: str) -> None:
    assert old in JOB
    assert expected in errors(JOB.replace(old, new, 1))


@pytest.mark.unit
def test_two_jobs_in_one_file_are_refused() -> None:
    assert "2 objects of kind ZeroTrainingJob" in errors(f"{JOB}---\n{JOB}")


@pytest.mark.unit
def test_all_problems_are_listed_at_once_up_to_a_limit() -> None:
    text = errors(JOB.replace("steps: 1e3", "steps: -1").replace("heads: 4", "heads: 0"))
    assert "spec.steps" in text
    assert "spec.model.gpt.heads" in text
    many = "".join(f"  bad{index}: 1\n" for index in range(50))
    assert len(errors(JOB + many).splitlines()) == MAX_PROBLEMS + 1


@pytest.mark.unit
@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, "cannot be read"), (b"\xff\xfe", "is not UTF-8"), (b"#" * (2 << 20), "bytes")],
)
def test_files_that_are_no_text_are_named(tmp_path: Path, content: bytes | None, expected: str) -> None:
    path = tmp_path / "job.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(JobFileError, match=expected):
        load_job(path)

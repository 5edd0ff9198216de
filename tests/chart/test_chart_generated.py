"""The chart's generated files and its values: one source, one schema, one table."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from deploy.chart import generate
from deploy.chart.reference import documented, table
from tests.support.helm import CHART

pytestmark = pytest.mark.unit


VALUES = (CHART / "values.yaml").read_text()
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
FREE_FORM = {"global", "crds.annotations", "commonLabels"}
"""Objects whose keys are the user's: they are described by their values."""


def test_generated_files_are_what_the_generator_writes() -> None:
    found = [str(path.relative_to(generate.ROOT)) for path in generate.differences()]
    assert found == [], "run `python -m deploy.chart`"


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy of the chart in another folder, for edits."""
    chart = tmp_path / "zerotrain"
    shutil.copytree(CHART, chart)
    monkeypatch.setattr(generate, "CHART", chart)
    generate.write()
    assert generate.differences() == []
    return chart


@pytest.mark.parametrize(
    "name",
    [
        "files/generated/crds/zerotrain.dev_zerotrainingjobs.yaml",
        "files/generated/rbac/operator.yaml",
        "README.md",
    ],
)
def test_an_edit_of_a_generated_file_is_seen_and_undone(copy: Path, name: str) -> None:
    path = copy / name
    path.write_text(path.read_text().replace("zerotrain", "zerotrian", 1) + "more\n")
    if name == "README.md":
        path.write_text(path.read_text().replace("`operator.replicas`", "`operator.copies`"))
    assert generate.differences() == [path]
    generate.write()
    assert generate.differences() == []


def test_a_file_that_nothing_makes_any_more_is_seen_and_removed(copy: Path) -> None:
    stray = copy / "files" / "generated" / "rules" / "old.yaml"
    stray.parent.mkdir(exist_ok=True)
    stray.write_text("groups: []\n")
    assert generate.differences() == [stray]
    generate.write()
    assert not stray.exists()


def test_a_rule_that_mixes_scopes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = '{apiGroups: [""], resources: [pods, nodes], verbs: [list]}'
    (tmp_path / "cluster_role.yaml").write_text(f"rules: [{rule}]\n")
    monkeypatch.setattr(generate, "KUSTOMIZE", tmp_path)
    with pytest.raises(ValueError, match="mixes resources"):
        generate.generated()


def leaves(values: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield the paths of all values; a map that a user fills counts as one value."""
    for key, value in values.items():
        here = f"{path}.{key}" if path else key
        inner = _schema_at(here)
        if isinstance(value, dict) and "properties" in inner and here != "operator.resources":
            yield from leaves(value, here)
        else:
            yield here


def schema_leaves(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    for key, inner in schema["properties"].items():
        here = f"{path}.{key}" if path else key
        resolved = _resolved(inner)
        if "properties" in resolved and here not in ("operator.resources", "operator.affinity"):
            yield from schema_leaves(resolved, here)
        else:
            yield here


def _resolved(schema: dict[str, Any]) -> dict[str, Any]:
    reference = schema.get("$ref")
    return SCHEMA["$defs"][reference.rsplit("/", 1)[1]] if reference else schema


def _schema_at(path: str) -> dict[str, Any]:
    schema = SCHEMA
    for key in path.split("."):
        schema = _resolved(schema["properties"].get(key, {}))
        if "properties" not in schema:
            break
    return schema


def test_every_value_is_in_the_schema_and_in_the_table() -> None:
    defaults = set(leaves(yaml.safe_load(VALUES))) - {"operator.affinity"}
    allowed = set(schema_leaves(SCHEMA)) - {"global", "operator.affinity"}
    described = {".".join(value.path) for value in documented(VALUES)} - {"operator.affinity"}
    assert defaults == allowed, "values.yaml and values.schema.json name different values"
    assert defaults == described, "a value of values.yaml lacks its `# --` line"


def test_the_table_shows_defaults() -> None:
    text = "a:\n  # -- How many | at most.\n  count: 3\n  other: 1\n# -- A list.\nitems: [{x: 1}]\n"
    found = documented(text)
    assert [(value.path, value.default) for value in found] == [(("a", "count"), 3), (("items",), [{"x": 1}])]
    assert "| `a.count` | `3` | How many \\| at most. |" in table(text)


def test_the_example_in_the_charts_metadata_is_a_job_that_is_accepted() -> None:
    from zerotrain.operator.api import ZeroTrainingJob

    annotations = yaml.safe_load((CHART / "Chart.yaml").read_text())["annotations"]
    (example,) = yaml.safe_load(annotations["artifacthub.io/crdsExamples"])
    example["metadata"]["namespace"] = "default"
    assert ZeroTrainingJob.model_validate(example).spec.workers == 2
    for name in ("changes", "images", "crds"):
        assert yaml.safe_load(annotations[f"artifacthub.io/{name}"])

"""References in the documents are valid: links, make targets, and the job in the README."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_repo_shape import ROOT, tracked
from zerotrain.client.jobfile import load_job
from zerotrain.operator.api.validation import refusals

pytestmark = pytest.mark.unit


LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")


def broken_links(text: str, folder: Path) -> list[str]:
    return [target for target in LINK.findall(text) if not (folder / target).exists()]


def test_relative_links_lead_somewhere() -> None:
    documents = tracked(".md")
    assert len(documents) > 5
    found = {str(path.relative_to(ROOT)): broken_links(path.read_text(), path.parent) for path in documents}
    assert {name: links for name, links in found.items() if links} == {}


def test_the_link_check_sees_a_violation(tmp_path: Path) -> None:
    assert broken_links("[a](nowhere.md) [b](https://example.org/x)", tmp_path) == ["nowhere.md"]


def missing_places(text: str) -> list[str]:
    """Return the paths of the table of where a change goes that do not exist. A name without a folder is
    beside the path before it."""
    table = text.split("## Where a change goes")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 20, "the table has hardly any rows: it checks nothing"
    missing: list[str] = []
    for _, *places in rows:
        folder = ROOT
        for name in re.findall(r"`([^`]+)`", " ".join(places)):
            path = ROOT / name if "/" in name else folder / name
            folder = path.parent
            missing += [] if path.exists() else [name]
    return missing


def test_changes_go_to_files_that_exist() -> None:
    assert missing_places((ROOT / "CONTRIBUTING.md").read_text()) == []


def test_the_check_of_where_changes_go_sees_a_violation() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    moved = text.replace("reconcile/conditions.py", "reconcile/elsewhere.py").replace("`rules.py`", "`no.py`")
    assert missing_places(moved) == ["operator/zerotrain/operator/reconcile/elsewhere.py", "no.py"]


def test_the_readme_names_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"^\$ make ([a-z-]+)", (ROOT / "README.md").read_text(), flags=re.MULTILINE))
    assert {"demo", "test"} <= named
    assert named <= targets, named - targets


def test_the_readme_is_short() -> None:
    """Limit of the README; the rest belongs into docs/, where docs/README.md lists it."""
    assert len((ROOT / "README.md").read_text().split()) <= 700


def readme_job(tmp_path: Path) -> Path:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    path = tmp_path / "job.yaml"
    path.write_text(next(block for block in blocks if "ZeroTrainingJob" in block))
    return path


@pytest.mark.parametrize("source", ["README", "deploy/examples/gpt.yaml"])
def test_the_jobs_people_are_shown_are_accepted(source: str, tmp_path: Path) -> None:
    path = readme_job(tmp_path) if source == "README" else ROOT / source
    assert refusals(load_job(path).job.spec) == ()

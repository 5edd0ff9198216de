"""Equal charts give equal archives, and an archive installs what the folder does."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path

import pytest

from deploy.chart.package import package
from tests.support.helm import CHART, Helm

pytestmark = pytest.mark.tools


def test_an_archive_depends_on_the_files_alone(helm: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / "zerotrain"
    shutil.copytree(CHART, other)
    os.utime(other / "values.yaml", (1, 1))
    first = package(CHART, tmp_path / "1", helm=helm)
    second = package(other, tmp_path / "2", helm=helm)
    assert first.read_bytes() == second.read_bytes()
    (other / "values.yaml").write_text((other / "values.yaml").read_text() + "# more\n")
    assert package(other, tmp_path / "3", helm=helm).read_bytes() != first.read_bytes()

    with tarfile.open(first) as archive:
        names = {name.removeprefix("zerotrain/") for name in archive.getnames()}
    assert {"values.schema.json", "README.md", "templates/NOTES.txt"} <= names
    assert not [name for name in names if name.startswith("ci/")]
    renderer = Helm(program=helm, home=tmp_path)
    assert without_key(renderer.template(chart=first)) == without_key(renderer.template())


def without_key(manifests: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return the manifests without the key, which is a new one each time that helm has no cluster to look it
    up in.
    """
    return [item for item in manifests if item["kind"] != "Secret"]

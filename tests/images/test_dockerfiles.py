"""The Dockerfiles as text and as scripts: the points of an audit, and what the operator relies on."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from pathlib import Path

import pytest

from deploy.images.context import HERE, IMAGES, ROOT, SUMS, Image, default_wheels, make_context
from zerotrain.operator.resources.container import WORKER_USER

BOTH = pytest.mark.parametrize("image", IMAGES.values(), ids=list(IMAGES))


def instructions(image: Image) -> list[tuple[str, str]]:
    text = re.sub(r"\\\n\s*", "", image.dockerfile.read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines]


@pytest.mark.unit
@BOTH
def test_bases_are_arguments_with_a_version(image: Image) -> None:
    found = instructions(image)
    bases = [text for name, text in found if name == "FROM"]
    assert len(bases) >= 2, "multi-stage: what builds is not what runs"
    assert all(base.split()[0] in ("${BASE}", "${BUILD_BASE}") for base in bases)
    for name, text in found:
        if name == "ARG" and "BASE=" in text:
            assert re.search(r":\d", text), f"{text} has no version"


@pytest.mark.unit
@BOTH
def test_it_runs_as_the_user_of_the_pods(image: Image) -> None:
    users = [text for name, text in instructions(image) if name == "USER"]
    assert users == [f"{WORKER_USER}:{WORKER_USER}"]


@pytest.mark.unit
@BOTH
def test_the_user_has_a_name_without_an_account(image: Image) -> None:
    """kopf and torch need it: `getpass` fails for a user number that /etc/passwd does not know."""
    (environ,) = [text for name, text in instructions(image) if name == "ENV"]
    assert {"USER=zerotrain", "LOGNAME=zerotrain", "HOME=/tmp"} <= set(environ.split())


@pytest.mark.unit
@BOTH
def test_nothing_is_fetched_by_address(image: Image) -> None:
    found = instructions(image)
    assert not [text for name, text in found if name == "ADD"]
    assert "http" not in image.dockerfile.read_text()


@pytest.mark.unit
@BOTH
def test_only_the_environment_is_taken_into_the_last_stage(image: Image) -> None:
    found = instructions(image)
    last = max(index for index, (name, _) in enumerate(found) if name == "FROM")
    assert [text for name, text in found[last:] if name == "COPY"] == [
        "--from=build /opt/zerotrain /opt/zerotrain"
    ]
    assert not [name for name, _ in found[last:] if name == "RUN"]


@pytest.mark.unit
@BOTH
def test_the_script_is_given_the_entries_of_the_table(image: Image) -> None:
    (run,) = [text for name, text in instructions(image) if name == "RUN"]
    assert run.split() == ["sh", "deploy/images/install.sh", image.name, image.extras, *image.wheel_options]


@pytest.mark.unit
@BOTH
def test_gpus_are_the_device_plugins_to_give(image: Image) -> None:
    """NVIDIA's runtime reads this variable from the image, too: a pod without GPUs would see all GPUs of the
    node, other tenants' included. The device plugin sets it for pods that request GPUs.
    """
    assert not [text for _, text in instructions(image) if "NVIDIA_VISIBLE_DEVICES" in text]


@pytest.mark.unit
def test_the_drivers_libraries_are_asked_for() -> None:
    """A pod with a GPU has no libcuda without `compute`, and no NVML without `utility`."""
    (environ,) = [text for name, text in instructions(IMAGES["runtime"]) if name == "ENV"]
    (wanted,) = [word for word in environ.split() if word.startswith("NVIDIA_DRIVER_CAPABILITIES=")]
    assert set(wanted.partition("=")[2].split(",")) == {"compute", "utility"}


@pytest.mark.unit
def test_the_variant_of_torch_is_an_argument_and_on_the_label() -> None:
    found = instructions(IMAGES["runtime"])
    stages = [index for index, (name, _) in enumerate(found) if name == "FROM"]
    arguments = [
        (index, text) for index, (name, text) in enumerate(found) if name == "ARG" and "TORCH" in text
    ]
    assert [text for _, text in arguments] == [f"TORCH={IMAGES['runtime'].torch(None)}", "TORCH", "TORCH"]
    before, build, last = (index for index, _ in arguments)
    assert before < stages[0] < build < stages[1] < last, (
        "each stage sees it, and no stage has a default apart"
    )
    (label,) = [text for name, text in found if name == "LABEL"]
    assert 'dev.zerotrain.torch="${TORCH}"' in label.split()


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Folder deploy/images of the operator's context, with its folder of wheels."""
    folder = make_context(tmp_path / "context", IMAGES["operator"], wheels=None) / "deploy" / "images"
    (folder / "wheels" / "operator").mkdir(parents=True, exist_ok=True)
    return folder


def place(folder: Path, *names: str, content: bytes = b"wheel") -> None:
    for name in names:
        (folder / name).write_bytes(content)


def write_down(folder: Path, *names: str) -> None:
    digest = hashlib.sha256(b"wheel").hexdigest()
    (folder / SUMS).write_text("".join(f"{digest}  {name}\n" for name in names))


def install(
    here: Path, *, venv: int = 7, variant: int = 9, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run the script with a fake Python that records its arguments and makes a wheel, but no /opt/zerotrain.

    That Python exits with `venv` when it is called to make the environment, and with `variant` for the
    variant of torch.
    """
    tools, calls = here.parent / "tools", here.parent / "calls"
    tools.mkdir()
    (tools / "python3").write_text(
        f"""#!/bin/sh
echo "$*" >>{calls}
case "$*" in
*variants.py*) exit {variant} ;;
*" wheel "*) while [ "$1" != --wheel-dir ]; do shift; done; echo >"$2/zerotrain-9-py3-none-any.whl" ;;
"-m venv"*/opt/zerotrain) exit {venv} ;;
"-m venv"*) mkdir "$4/bin"; for name in python cyclonedx-py; do ln -s {tools}/python3 "$4/bin/$name"; done ;;
esac
"""
    )
    (tools / "python3").chmod(0o755)
    command = ["sh", str(here / "install.sh"), "operator", "operator"]
    path = {"PATH": f"{tools}:{os.environ['PATH']}", "TMPDIR": str(here.parent)}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env={**path, **environ}, cwd=here
    )


def asked(here: Path) -> str:
    calls = here.parent / "calls"
    return calls.read_text() if calls.exists() else ""


KOPF, OURS = "kopf-1-py3-none-any.whl", "zerotrain-1-py3-none-any.whl"
EXTRA = "kopf-99-py3-none-any.whl"


@pytest.mark.ranks
def test_wheels_as_they_were_written_down_are_taken(here: Path) -> None:
    wheels = here / "wheels" / "operator"
    place(wheels, KOPF, OURS)
    write_down(wheels, KOPF, OURS)
    assert install(here, PIP_ARGS="--no-index").returncode == 7, "as far as the environment"
    assert " wheel " not in asked(here)


@pytest.mark.ranks
def test_a_wheel_that_is_not_the_one_written_down_stops_the_build(here: Path) -> None:
    wheels = here / "wheels" / "operator"
    place(wheels, KOPF, content=b"something else")
    write_down(wheels, KOPF)
    done = install(here)
    assert done.returncode == 1
    assert f"{KOPF}: FAILED" in done.stdout


@pytest.mark.ranks
def test_a_wheel_that_was_not_written_down_stops_the_build(here: Path) -> None:
    """pip would install the newest wheel that it finds."""
    wheels = here / "wheels" / "operator"
    place(wheels, KOPF, EXTRA)
    write_down(wheels, KOPF)
    done = install(here)
    assert done.returncode == 1
    assert EXTRA in done.stderr
    assert asked(here) == ""


@pytest.mark.ranks
def test_a_wheel_that_is_missing_stops_the_build(here: Path) -> None:
    wheels = here / "wheels" / "operator"
    place(wheels, KOPF)
    write_down(wheels, KOPF, EXTRA)
    assert install(here).returncode == 1


@pytest.mark.ranks
def test_wheels_without_a_list_stop_the_build(here: Path) -> None:
    place(here / "wheels" / "operator", KOPF)
    done = install(here)
    assert done.returncode == 1
    assert KOPF in done.stderr
    assert SUMS in done.stderr


@pytest.mark.ranks
def test_the_source_is_built_although_a_wheel_of_it_lies_there(here: Path) -> None:
    """The wheel may be from an older source, and the other image's wheel has other extras."""
    wheels = here / "wheels" / "operator"
    place(wheels, KOPF, OURS)
    write_down(wheels, KOPF, OURS)
    place(here / "wheels", OURS)
    assert install(here).returncode == 7
    assert " wheel " in asked(here)
    assert OURS not in asked(here)


@pytest.mark.ranks
def test_without_an_index_the_wheel_must_be_there(here: Path) -> None:
    done = install(here, PIP_ARGS="--no-index")
    assert done.returncode == 1
    assert "python -m deploy.images wheels operator" in done.stderr


@pytest.mark.ranks
@pytest.mark.parametrize(("given", "wanted"), [({}, "none"), ({"TORCH": "cpu"}, "cpu")])
def test_the_variant_of_torch_is_looked_at_once_it_is_installed(
    here: Path, given: dict[str, str], wanted: str
) -> None:
    assert install(here, venv=0, variant=9, **given).returncode == 9, "the build fails with it"
    *_, installed, last = asked(here).splitlines()
    assert " install " in installed
    assert last.split()[0].endswith("deploy/images/variants.py")
    assert last.split()[1:] == ["/opt/zerotrain", wanted]


def installs(here: Path) -> list[str]:
    """Return the arguments of each `pip install`, in order."""
    return [line.split(" install ", 1)[1] for line in asked(here).splitlines() if " install " in line]


@pytest.mark.ranks
@pytest.mark.parametrize("torch", ["none", "cpu", "cuda"])
def test_only_listed_files_are_installed(here: Path, torch: str) -> None:
    """Requirements are installed by digest and without a resolver; the project then finds all its
    dependencies there.
    """
    assert install(here, venv=0, variant=0, TORCH=torch).returncode == 127, "as far as compiling"
    *listed, project = installs(here)
    wanted = ["tools", "build", "operator", *(["torch-cuda"] if torch == "cuda" else [])]
    if torch == "cpu":
        pinned = listed.pop()
        assert re.search(r" --no-deps torch==[0-9.]+$", pinned), "no index of ours knows its digest"
    assert [re.findall(r"/requirements/(\S+)\.txt$", call) for call in listed] == [[name] for name in wanted]
    for call in listed:
        assert {"--no-deps", "--require-hashes", "--only-binary"} <= set(call.split())
    assert {"--no-index", "--no-compile"} <= set(project.split())
    assert project.endswith("/zerotrain-9-py3-none-any.whl[operator]")


@pytest.mark.ranks
def test_build_requirements_are_the_listed_ones(here: Path) -> None:
    install(here)
    (wheel,) = [line for line in asked(here).splitlines() if " wheel " in line]
    assert "--no-build-isolation" in wheel.split(), "an isolated build would take the newest"


@pytest.mark.ranks
def test_further_packages_keep_to_the_pins(here: Path) -> None:
    install(here, venv=0, variant=0, EXTRA="transformers tokenizers")
    extra = installs(here)[-1].split()
    assert extra[-2:] == ["transformers", "tokenizers"]
    constraints = Path(extra[extra.index("--constraint") + 1])
    assert constraints.samefile(here.parent / "constraints.txt")


@pytest.mark.unit
@BOTH
def test_each_image_has_wheels_of_its_own(image: Image, tmp_path: Path) -> None:
    wheels = tmp_path / "collected"
    wheels.mkdir()
    place(wheels, OURS)
    write_down(wheels, OURS)
    folder = make_context(tmp_path / "context", image, wheels=wheels) / "deploy" / "images" / "wheels"
    assert [path.parent.name for path in folder.rglob("*.whl")] == [image.name]
    assert default_wheels(image) == HERE / "wheels" / image.name


@pytest.mark.unit
def test_both_images_see_the_same_of_the_repository() -> None:
    assert len({image.ignore_file.read_text() for image in IMAGES.values()}) == 1


@pytest.mark.unit
def test_the_context_holds_what_the_wheel_is_made_of(tmp_path: Path) -> None:
    """.dockerignore lets through what pyproject.toml names, and nothing that is built."""
    folder = make_context(tmp_path, IMAGES["runtime"], wheels=None)
    text = (ROOT / "pyproject.toml").read_text()
    packages = text.split("[tool.scikit-build.wheel.packages]", 1)[1].split("\n[", 1)[0]
    for source in re.findall(r'= "([^"]+)"', packages):
        assert (folder / source).is_dir(), source
    assert (folder / "csrc" / "CMakeLists.txt").is_file()
    assert not (folder / "build").exists()
    assert not list(folder.rglob("__pycache__"))

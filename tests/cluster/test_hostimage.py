"""The image made of this machine's Python: its content, and that any user can run it."""

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from deploy.devcluster.builder import hostimage
from deploy.devcluster.builder.errors import BuildError
from deploy.devcluster.builder.filetree import FileTree, Node
from deploy.devcluster.builder.hostimage import ENVIRONMENT, USER_ID, build_host_image
from deploy.devcluster.builder.paths import Paths
from deploy.devcluster.builder.progress import Reporter
from deploy.devcluster.builder.pythonenv import add_environment, inspect_environment

ROOT = Path(__file__).resolve().parents[2]

PROJECT_TABLE = '[tool.scikit-build.wheel.packages]\n"zerotrain/part" = "src/zerotrain/part"\n'


@pytest.fixture
def clone(tmp_path: Path) -> Paths:
    """Return a small project of the same shape, with a virtual environment of its own."""
    repository = tmp_path / "clone"
    part = repository / "src" / "zerotrain" / "part"
    part.mkdir(parents=True)
    (repository / "pyproject.toml").write_text(PROJECT_TABLE)
    (part / "__init__.py").write_text("ANSWER = 42\n")
    (part / "table.json").write_text("{}")
    venv.create(repository / ".venv", symlinks=True)
    site = Path(inspect_environment(repository).site_packages[0])
    (site / "helper.py").write_text("NAME = 'helper'\n")
    install(site, "ruff", "ruff_tool.py")
    # As an editable install leaves it: a hook that leads into the clone, and the compiled modules.
    install(site, "zerotrain", "_zerotrain_editable.pth", "zerotrain/part/_native.so")
    (site / "zerotrain" / "part" / "unrecorded.py").write_text("")
    return Paths(repository=repository, cache=tmp_path / "cache")


def install(site: Path, name: str, *recorded: str) -> None:
    metadata = f"{name}-1.0.dist-info/METADATA"
    for path in (*recorded, metadata):
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text("import sys\n")
    (site / metadata).write_text(f"Name: {name}\nVersion: 1.0\n")
    (site / metadata).with_name("RECORD").write_text("".join(f"{path},,\n" for path in (*recorded, metadata)))


def build(paths: Paths) -> Path:
    return build_host_image(paths, Reporter(stream=io.StringIO()))


def read_config(archive: Path) -> tuple[list[str], dict[str, Any]]:
    """Return names of the layers' files in the archive, and the image's configuration."""
    with tarfile.open(archive) as tar:
        (manifest,) = json.load(_member(tar, "manifest.json"))
        return manifest["Layers"], json.load(_member(tar, manifest["Config"]))


def layers(archive: Path) -> dict[str, str]:
    """Return the digest by layer file name, as in the image's configuration."""
    names, config = read_config(archive)
    return dict(zip(names, config["rootfs"]["diff_ids"], strict=True))


def _member(tar: tarfile.TarFile, name: str) -> IO[bytes]:
    file = tar.extractfile(name)
    assert file is not None
    return file


def unpack(archive: Path, target: Path) -> Path:
    """Unpack the layers in order and return the container's root folder."""
    with tarfile.open(archive) as outer:
        for name in layers(archive):
            with tarfile.open(fileobj=_member(outer, name)) as layer:
                # `extractall(filter=...)` came with 3.11.4, Debian 12 has 3.11.2; the tar is our own.
                layer.extraction_filter = lambda member, path: member
                layer.extractall(target)
    return target


def run_inside(archive: Path, root: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the unpacked image with its environment, and as root also with its user."""
    if shutil.which("unshare") is None:
        pytest.skip("no `unshare` on PATH: cannot enter the image without it")
    as_root = os.geteuid() == 0
    settings = read_config(archive)[1]["config"]
    enter = ["chroot", *([f"--userspec={settings['User']}"] if as_root else []), str(root)]
    enter += ["env", "-i", *settings["Env"], *command]
    inside = f"mount --rbind /dev {root}/dev && exec {shlex.join(enter)}"
    done = subprocess.run(
        ["unshare", *(["-m"] if as_root else ["-U", "-r", "-m"]), "sh", "-c", inside],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    if "unshare failed" in done.stderr:
        pytest.skip(f"this account may not create namespaces: {done.stderr.strip()}")
    return done


@pytest.mark.ranks
def test_image_runs_as_a_user_that_owns_nothing(clone: Paths, tmp_path: Path) -> None:
    archive = build(clone)
    root = unpack(archive, tmp_path / "root")
    code = (
        "import os, ssl, sqlite3, ctypes, importlib.metadata, helper, zerotrain.part as part;"
        "print(os.getuid(), part.ANSWER, part.__file__, os.path.exists(part.__cached__));"
        "print(importlib.metadata.version('zerotrain'), ssl.create_default_context().get_ca_certs() != [])"
    )
    done = run_inside(archive, root, "python", "-c", code)
    assert done.returncode == 0, done.stderr
    environment = inspect_environment(clone.repository)
    site = environment.site_packages[-1].replace(environment.prefix, ENVIRONMENT)
    user = USER_ID if os.geteuid() == 0 else 0
    assert done.stdout == f"{user} 42 {site}/zerotrain/part/__init__.py True\n1.0 True\n"
    shell = run_inside(archive, root, "/bin/sh", "-c", "echo ok > /tmp/x && cat /tmp/x && ls /root")
    assert shell.stdout == "ok\n", shell.stderr


@pytest.mark.ranks
def test_the_clones_own_place_is_not_in_the_image(clone: Paths, tmp_path: Path) -> None:
    """Pods mount over /tmp, and the image should not reveal the path of the clone."""
    root = unpack(build(clone), tmp_path / "root")
    assert list((root / "tmp").iterdir()) == []
    binaries = (root / ENVIRONMENT.strip("/") / "bin").iterdir()
    scripts = [path.read_bytes() for path in binaries if path.is_file() and not path.is_symlink()]
    assert not [text for text in scripts if text.startswith(f"#!{clone.repository}".encode())]


@pytest.mark.unit
def test_moving_a_folder_takes_scripts_and_links_along(tmp_path: Path) -> None:
    tree = FileTree()
    tree.add_bytes("/a/env/bin/tool", b"#!/a/env/bin/python\nimport x\n", mode=0o755)
    tree.add_bytes("/a/environment", b"not in it")
    tree.nodes["/usr/bin/tool"] = Node(mode=0o777, link_to="/a/env/bin/tool")
    tree.move("/a/env", "/opt/place")
    assert tree.nodes["/opt/place/bin/tool"].body == b"#!/opt/place/bin/python\nimport x\n"
    assert tree.nodes["/usr/bin/tool"].link_to == "/opt/place/bin/tool"
    assert "/a/environment" in tree.nodes
    assert not [path for path in tree.nodes if path.startswith("/a/env/") or path == "/a/env"]


@pytest.mark.ranks
def test_what_never_runs_in_a_pod_stays_out(clone: Paths, tmp_path: Path) -> None:
    names = {
        str(path.relative_to(tmp_path / "root"))
        for path in unpack(build(clone), tmp_path / "root").rglob("*")
    }
    for wanted in ("helper.py", "zerotrain/part/table.json", "zerotrain/part/_native.so"):
        assert [name for name in names if name.endswith(f"/{wanted}")], wanted
    for unwanted in (
        "unrecorded.py",
        "ruff_tool.py",
        "_zerotrain_editable.pth",
        "ruff-1.0.dist-info",
        "idlelib",
        "RECORD",
    ):
        assert not [name for name in names if name.endswith(f"/{unwanted}")], unwanted


@pytest.mark.ranks
def test_libraries_of_the_projects_own_modules_are_looked_up(
    clone: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = inspect_environment(clone.repository).site_packages[-1]
    native = f"{site}/zerotrain/part/_native.so"
    shutil.copy(os.path.realpath(sys.executable), native)
    asked: list[str] = []

    def note(programs: Sequence[str]) -> set[str]:
        asked.extend(programs)
        return set()

    monkeypatch.setattr(hostimage, "needed_libraries", note)
    build(clone)
    assert native in asked


@pytest.mark.ranks
def test_a_clone_behind_a_link_and_linked_library_folders_work(clone: Paths, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to("clone")
    library = clone.repository / ".venv" / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    library.rename(library.with_name("moved"))  # as `lib64` is a link to `lib` on some distributions
    library.symlink_to("moved")
    archive = build(Paths(repository=tmp_path / "alias", cache=clone.cache))
    root = unpack(archive, tmp_path / "root")
    code = "import helper, zerotrain.part as p; print(p.ANSWER)"
    done = run_inside(archive, root, "python", "-c", code)
    assert done.stdout == "42\n", done.stderr


@pytest.mark.ranks
def test_an_edit_of_the_project_makes_a_new_second_layer_only(clone: Paths) -> None:
    before = layers(build(clone))
    (clone.repository / "src/zerotrain/part/__init__.py").write_text("ANSWER = 43\n")
    after = layers(build(clone))
    assert after["dependencies.tar"] == before["dependencies.tar"]
    assert after["project.tar"] != before["project.tar"]


@pytest.mark.ranks
def test_an_edit_of_a_dependency_makes_a_new_first_layer(clone: Paths) -> None:
    before = layers(build(clone))
    site = Path(inspect_environment(clone.repository).site_packages[0])
    (site / "helper.py").write_text("NAME = 'other helper'\n")
    assert layers(build(clone))["dependencies.tar"] != before["dependencies.tar"]


@pytest.mark.ranks
def test_nothing_is_written_when_nothing_changed_and_equal_input_gives_equal_bytes(clone: Paths) -> None:
    archive = build(clone)
    first = archive.stat().st_ino
    assert build(clone).stat().st_ino == first
    before = archive.read_bytes()
    site = Path(inspect_environment(clone.repository).site_packages[0])
    (site / "__pycache__").mkdir()
    (site / "__pycache__" / "helper.cpython-311.pyc").write_bytes(b"compiled by somebody's import")
    assert build(clone).stat().st_ino == first
    shutil.rmtree(site / "__pycache__")
    archive.with_suffix(".json").unlink()
    assert build(clone).stat().st_ino != first
    assert archive.read_bytes() == before


@pytest.mark.ranks
def test_a_layer_is_not_taken_over_from_a_replaced_archive(clone: Paths) -> None:
    archive = build(clone)
    before = layers(archive)
    archive.write_bytes(b"not an image")
    assert layers(build(clone)) == before


@pytest.mark.ranks
def test_an_environment_that_is_none_is_refused(tmp_path: Path) -> None:
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "python").symlink_to(os.path.realpath(sys.executable))
    with pytest.raises(BuildError, match="is not a virtual environment"):
        inspect_environment(tmp_path)


@pytest.mark.unit
def test_links_are_kept_with_what_they_lead_to(tmp_path: Path) -> None:
    real = tmp_path / "real"
    (real / "lib").mkdir(parents=True)
    (real / "lib" / "x.so.1").write_text("x")
    (real / "lib" / "x.so").symlink_to("x.so.1")
    (tmp_path / "alias").symlink_to("real")
    (tmp_path / "absolute").symlink_to(tmp_path / "alias" / "lib")
    tree = FileTree()
    assert tree.add(f"{tmp_path}/absolute/../lib/x.so") == f"{real}/lib/x.so.1"
    shown = {
        path.removeprefix(f"{tmp_path}/"): node.link_to.removeprefix(f"{tmp_path}/") if node.link_to else None
        for path, node in tree.nodes.items()
        if path.startswith(f"{tmp_path}/")
    }
    assert shown == {
        "absolute": "alias/lib",
        "alias": "real",
        "real": None,
        "real/lib": None,
        "real/lib/x.so": "x.so.1",
        "real/lib/x.so.1": None,
    }


@pytest.mark.unit
def test_a_loop_of_links_and_a_missing_file_are_errors(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(BuildError, match="loop"):
        FileTree().add(str(tmp_path / "a"))
    with pytest.raises(FileNotFoundError):
        FileTree().add(str(tmp_path / "missing"))


@pytest.mark.unit
def test_everything_is_readable_by_everybody_and_set_user_id_is_dropped(tmp_path: Path) -> None:
    secretive = tmp_path / "home"
    secretive.mkdir(mode=0o700)
    for name, mode in (("tool", 0o4750), ("data", 0o600)):
        (secretive / name).write_text("x")
        (secretive / name).chmod(mode)
    tree = FileTree()
    tree.add_tree(str(secretive), lambda entry: False)
    modes = {path.removeprefix(str(tmp_path)): node.mode for path, node in tree.nodes.items()}
    assert (modes["/home"], modes["/home/tool"], modes["/home/data"]) == (0o755, 0o755, 0o644)


def allowed_origins(prefix: str, base_executable: str, stdlib: tuple[str, ...]) -> tuple[str, ...]:
    return (
        f"{prefix}/lib",
        f"{prefix}/bin",
        f"{prefix}/pyvenv.cfg",
        base_executable,
        *stdlib,
        "/usr",
        "/etc/python",
    )


@pytest.mark.ranks
def test_nothing_of_the_user_is_taken_along() -> None:
    environment = inspect_environment(ROOT)
    tree = FileTree()
    add_environment(tree, environment)
    base_executable = os.path.realpath(environment.named_paths[1])
    allowed = allowed_origins(environment.prefix, base_executable, environment.stdlib)
    sources = [node.source for node in tree.nodes.values() if node.source]
    assert len(sources) > 1000
    assert [path for path in sources if not path.startswith(allowed)] == []
    assert [path for path in sources if path.endswith(("pip.conf", ".netrc", ".pypirc"))] == []
    sites = environment.site_packages
    for left_out in (
        "mypy",
        "pip",
        "go",
        "cmake",
        "torch/include",
        "_pytest",
        "matplotlib",
        "PIL",
        "kubernetes_validate",
        "zerotrain",
    ):
        below = tuple(f"{site}/{left_out}/" for site in sites)
        assert [path for path in tree.nodes if f"{path}/".startswith(below)] == [], "no empty folder either"
    for kept in ("torch/lib", "kopf", "kubernetes", "pydantic"):
        assert [path for path in sources if path.startswith(tuple(f"{site}/{kept}/" for site in sites))], kept


@pytest.fixture
def real_image(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Provide the real image and its unpacked tree, which takes a gigabyte and is removed at once."""
    archive = build(Paths(repository=ROOT, cache=tmp_path))
    yield archive, unpack(archive, tmp_path / "root")
    shutil.rmtree(tmp_path / "root")


@pytest.mark.cluster
def test_worker_and_operator_import_inside_the_image(real_image: tuple[Path, Path]) -> None:
    code = (
        "import torch, torch.distributed, kopf, kubernetes, pydantic, safetensors, aiohttp, cryptography;"
        "import zerotrain.runtime, zerotrain.operator, zerotrain.contract;"
        "assert torch.distributed.is_gloo_available(); print(float(torch.ones(3).sum()))"
    )
    done = run_inside(*real_image, "python", "-c", code)
    assert done.returncode == 0, done.stderr
    assert "version" in run_inside(*real_image, "kopf", "--version").stdout
    assert done.stdout == "3.0\n"

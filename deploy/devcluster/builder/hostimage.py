"""`build.py image`: the image of this machine's own Python, the project's environment and the project's code.

It needs no registry, no base image and no container tool: programs that run here also run in the pods. It has
two layers: all that changes rarely, and the project's code. An unchanged first layer is copied from the
archive of the last run.
"""

import hashlib
import json
import os
import ssl
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from .archive import ArchiveWriter, ImageConfig, Layer, archive_at
from .cache import locked
from .filetree import FileTree
from .paths import Paths
from .progress import Reporter
from .projectcode import add_project
from .pythonenv import add_environment, inspect_environment
from .sharedlibs import is_elf, needed_libraries

IMAGE_TAG = "localhost/zerotrain:dev"
ENVIRONMENT = "/opt/zerotrain"
"""Path of the virtual environment in the image, independent of the clone's folder."""
USER_ID = 65532
USER_NAME = "zerotrain"

_DEPENDENCIES, _PROJECT = "dependencies", "project"
# For `kubectl exec`: a shell and basic tools. Those missing on this machine are missing in the image.
_PROGRAMS = ("sh", "cat", "ls", "ps", "kill", "sleep", "env", "df", "du", "head", "tail", "grep", "id")
_PROGRAM_FOLDERS = ("/bin", "/usr/bin")
_CERTIFICATES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
_ETC = {
    "passwd": f"root:x:0:0:root:/root:/bin/sh\n{USER_NAME}:x:{USER_ID}:{USER_ID}::/tmp:/bin/sh\n",
    "group": f"root:x:0:\n{USER_NAME}:x:{USER_ID}:\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "hosts": "127.0.0.1 localhost\n",
    "hostname": "localhost\n",
    "resolv.conf": "",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Record:
    """Record of the last run, stored beside the archive.

    It is valid only for the very archive file that it describes.
    """

    archive: tuple[int, int, int]
    """Inode, size and modification time (ns) of the archive."""
    dependencies_key: str
    image_key: str
    layer: Layer


def build_host_image(paths: Paths, reporter: Reporter) -> Path:
    """Bring build/devcluster/images/host.tar up to date, and return its path."""
    archive = paths.images / "host.tar"
    on_wait = partial(reporter.print_line, "host image: another process is building it; waiting")
    with locked(paths.images / ".host.lock", on_wait):
        reporter.start("host image: looking at the Python environment")
        environment = inspect_environment(paths.repository)
        dependencies, project = FileTree(), FileTree()
        add_environment(dependencies, environment)
        add_project(project, environment, paths.repository)
        compiled = [path for path in project.nodes if os.path.isfile(path) and is_elf(path)]
        _add_system(dependencies, compiled, reporter)
        for tree in (dependencies, project):
            # A clone may be in a folder that pods mount over, such as /tmp.
            tree.move(environment.prefix, ENVIRONMENT)
        _add_folders(dependencies)
        project.drop_folders_of(dependencies)
        _write(archive, dependencies, project, reporter)
    return archive


def image_config() -> ImageConfig:
    """Return the image's settings.

    There is no entry point, because the operator sets the command of every container.
    """
    certificates = next((path for path in _CERTIFICATES if os.path.exists(path)), None)
    return ImageConfig(
        environ={
            "PATH": f"{ENVIRONMENT}/bin:/usr/local/bin:/usr/bin:/bin",
            "HOME": "/tmp",
            "LANG": "C.UTF-8",
            "PYTHONUNBUFFERED": "1",  # a container's log must show a line when it is printed
            "PYTHONDONTWRITEBYTECODE": "1",
            **({"SSL_CERT_FILE": certificates} if certificates else {}),
        },
        command=("python",),
        user=f"{USER_ID}:{USER_ID}",
    )


def _add_system(tree: FileTree, compiled: Sequence[str], reporter: Reporter) -> None:
    """Add the libraries, loader, certificates, accounts and shell that programs expect.

    `compiled` are the project's own extension modules, whose libraries belong in this layer, too.
    """
    for name in _PROGRAMS:
        for folder in _PROGRAM_FOLDERS:
            if os.access(f"{folder}/{name}", os.X_OK):
                tree.add(f"{folder}/{name}")
                break
    for path in (*_CERTIFICATES, ssl.get_default_verify_paths().cafile, "/etc/ld.so.cache"):
        if path and os.path.isfile(path):
            tree.add(path)
    programs = sorted(path for path, node in tree.nodes.items() if node.source and is_elf(path))
    programs += compiled
    reporter.update(detail=f"shared libraries of {len(programs)} programs and extension modules")
    for library in sorted(needed_libraries(programs)):
        tree.add(library)
    for name, text in _ETC.items():
        tree.add_bytes(f"/etc/{name}", text.encode())


def _add_folders(tree: FileTree) -> None:
    """Add mount points, a home and folders for temporary files, whether or not other content exists."""
    for folder in ("/proc", "/sys", "/dev", "/run", "/root"):
        tree.add_folder(folder)
    for folder in ("/tmp", "/var/tmp"):
        tree.add_folder(folder, mode=0o1777)


def _write(
    archive: Path,
    dependencies: FileTree,
    project: FileTree,
    reporter: Reporter,
) -> None:
    config = image_config()
    dependencies_key = dependencies.fingerprint()
    image_key = _hash(dependencies_key, project.fingerprint(), config.to_json([]).decode(), IMAGE_TAG)
    last = _read_record(archive)
    if last is not None and last.image_key == image_key:
        reporter.finish(f"{IMAGE_TAG} is up to date: {archive}, {_megabytes(archive.stat().st_size)}")
        return
    reuse = last.layer if last is not None and last.dependencies_key == dependencies_key else None
    with archive_at(archive) as writer:
        layer = _write_dependencies(writer, archive, reuse, dependencies, reporter)
        writer.add_layer(_PROJECT, project.entries())
        writer.finish(tag=IMAGE_TAG, config=config)
    record = _Record(
        archive=_identity(archive), dependencies_key=dependencies_key, image_key=image_key, layer=layer
    )
    _record_path(archive).write_text(json.dumps(asdict(record)))
    taken = "as in the last run" if reuse else "new"
    reporter.finish(
        f"{IMAGE_TAG}: dependencies ({taken}) {_megabytes(dependencies.size)}, "
        f"{len(dependencies.nodes)} files; "
        f"project {project.size / 1e6:.1f} MB, {len(project.nodes)} files: {archive}"
    )


def _write_dependencies(
    writer: ArchiveWriter, archive: Path, reuse: Layer | None, tree: FileTree, reporter: Reporter
) -> Layer:
    if reuse is not None:
        with archive.open("rb") as source:
            return writer.copy_layer(source, reuse)
    written = 0

    def count(path: str) -> None:
        nonlocal written
        written += 1
        reporter.update(detail=f"packing {path}", done=written, total=len(tree.nodes))

    return writer.add_layer(_DEPENDENCIES, tree.entries(count))


def _read_record(archive: Path) -> _Record | None:
    """Return the record of the last run; None if there is none or it describes another archive."""
    try:
        facts = json.loads(_record_path(archive).read_text())
        record = _Record(
            archive=tuple(facts["archive"]),
            dependencies_key=facts["dependencies_key"],
            image_key=facts["image_key"],
            layer=Layer(**facts["layer"]),
        )
        return record if record.archive == _identity(archive) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _record_path(archive: Path) -> Path:
    return archive.with_suffix(".json")


def _identity(archive: Path) -> tuple[int, int, int]:
    status = archive.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB"

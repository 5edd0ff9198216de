"""A content-addressed cache of built programs, shared by several clones and processes of one user.

An entry is a folder `<module>-<hash>`. It appears by one rename when it is complete and never changes
afterwards, so a reader needs no lock. Builders of the same entry exclude each other by a lock file.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

SECONDS_PER_DAY = 86_400
KEEP_UNUSED_DAYS = 14
"""Days after which the next build removes an entry that no clone has linked."""

_HASH_CHARACTERS = 20
_IGNORED_FOLDERS = {"testdata", "__pycache__"}
_IGNORED_SUFFIXES = (".py", ".md", "_test.go", "~", ".swp", ".log")


def source_files(folder: Path) -> list[Path]:
    """Return the files that can change the programs of a Go module.

    Embedded files are included, files of nested modules are not.
    """
    found: list[Path] = []
    for base, folders, names in os.walk(folder):
        here = Path(base)
        folders[:] = sorted(
            name
            for name in folders
            if name not in _IGNORED_FOLDERS
            and not name.startswith(".")
            and not (here / name / "go.mod").exists()
        )
        found += [
            here / name for name in names if not name.startswith(".") and not name.endswith(_IGNORED_SUFFIXES)
        ]
    return sorted(found)


def content_key(folder: Path, settings: Iterable[str]) -> str:
    """Return a hash of a module's sources (names and bytes) and of its build settings."""
    digest = hashlib.sha256()
    for setting in settings:
        _add(digest.update, setting.encode())
    for path in source_files(folder):
        _add(digest.update, str(path.relative_to(folder)).encode())
        _add(digest.update, path.read_bytes())
    return digest.hexdigest()[:_HASH_CHARACTERS]


def _add(update: Callable[[bytes], None], data: bytes) -> None:
    # The length prefix makes different lists of parts hash different bytes.
    update(len(data).to_bytes(8, "little"))
    update(data)


@contextmanager
def locked(lock: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive lock on a file. The kernel releases it when this process ends in any way."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def build_once(
    entry: Path, build: Callable[[Path], None], *, on_wait: Callable[[], None], on_found: Callable[[], None]
) -> Path:
    """Return the entry, after building it in a temporary folder if it is absent.

    A build that fails or is killed leaves no entry; the next builder of the same entry removes its remains.
    """
    if not entry.is_dir():
        with locked(entry.parent / f".{entry.name}.lock", on_wait):
            if not entry.is_dir():
                _build_and_publish(entry, build)
                return entry
    os.utime(entry)  # marks it as in use, for remove_unused
    on_found()
    return entry


def _build_and_publish(entry: Path, build: Callable[[Path], None]) -> None:
    prefix = f".{entry.name}.tmp-"
    for left in entry.parent.glob(f"{prefix}*"):  # this process holds the lock: no other builds this entry
        shutil.rmtree(left, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=entry.parent))
    try:
        build(temporary)
        temporary.chmod(0o755)
        temporary.rename(entry)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_unused(tools: Path, *, keep: Iterable[Path], now: float | None = None) -> list[Path]:
    """Remove the entries that were not used for KEEP_UNUSED_DAYS, and return the removed paths."""
    oldest = (time.time() if now is None else now) - KEEP_UNUSED_DAYS * SECONDS_PER_DAY
    kept = set(keep)
    removed = []
    for entry in sorted(tools.iterdir()):
        try:
            if entry in kept or entry.stat().st_mtime >= oldest:
                continue
        except FileNotFoundError:  # another build is removing entries at the same time
            continue
        if entry.is_dir():  # an entry, or the rest of a killed build; no build takes this long
            shutil.rmtree(entry, ignore_errors=True)
            removed.append(entry)
        elif not (tools / entry.name.removeprefix(".").removesuffix(".lock")).exists():
            entry.unlink(missing_ok=True)
    return removed


def link(target: Path, at: Path) -> None:
    """Point the symbolic link `at` to `target` atomically: a reader never sees it missing."""
    at.parent.mkdir(parents=True, exist_ok=True)
    if at.is_symlink() and at.readlink() == target:
        return
    temporary = at.with_name(f".{at.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(at)

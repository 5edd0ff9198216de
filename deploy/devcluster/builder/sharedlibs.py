"""Search for the shared libraries that programs and extension modules of an image need."""

import os
import re
import subprocess
from collections.abc import Sequence

from .errors import BuildError

_BATCH = 100  # files per call of ldd
_RESOLVED = re.compile(r"^\t(?:\S+ => )?(/\S+) \(0x[0-9a-f]+\)$", re.MULTILINE)

# Loaded by name at run time, so no file declares that it needs them: name service, and unwinding at thread
# exit.
_LOADED_BY_NAME = ("libnss_files.so.2", "libnss_dns.so.2", "libresolv.so.2", "libgcc_s.so.1")


def needed_libraries(programs: Sequence[str]) -> set[str]:
    """Return the direct and indirect libraries of these ELF files, and the loader, by the loader's paths."""
    found: set[str] = set()
    for start in range(0, len(programs), _BATCH):
        found |= set(_RESOLVED.findall(_ldd(programs[start : start + _BATCH])))
    folders = {os.path.dirname(path) for path in found if os.path.basename(path).startswith("libc.so")}
    by_name = {os.path.join(folder, name) for folder in folders for name in _LOADED_BY_NAME}
    return found | {path for path in by_name if os.path.exists(path)}


def is_elf(path: str) -> bool:
    """Return whether the file is a program or shared library. Only likely files are opened."""
    name = os.path.basename(path)
    if not (".so" in name or os.access(path, os.X_OK)) or name.endswith((".py", ".pyc", ".json")):
        return False
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"


def _ldd(files: Sequence[str]) -> str:
    # Without LD_LIBRARY_PATH, which does not exist in the image: libraries found only through it would be
    # missing there.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LD_")} | {
        "LC_ALL": "C"
    }
    try:
        # The status says only that a file was static or lacked a library. A missing library matters only to
        # the program that loads the file (such as a CUDA library on a machine without a driver).
        answer = subprocess.run(["ldd", *files], env=environ, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise BuildError(
            "`ldd` is not on PATH; it comes with the C library (package libc-bin or glibc-common)"
        ) from None
    return answer.stdout

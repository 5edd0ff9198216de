"""The importing process: `python -m zerotrain.runtime.checkpoint.from_deepspeed SOURCE DESTINATION [TAG]`.

It prints one JSON line on standard output: `{"path": ..., "notices": [...]}`, or `{"error": ..., "code":
...}` with that exit code. The process is separate, so that whatever a foreign file does to the unpickler
stays out of the ranks. Its memory is bounded by the size of the files, since it counts with that of the rank
that started it.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

from zerotrain.contract.exit_codes import ExitCode
from zerotrain.runtime.checkpoint.errors import CheckpointError
from zerotrain.runtime.checkpoint.from_deepspeed.convert import convert

_TOO_MUCH = "{} needs several times the memory that its files have bytes; no checkpoint does"
SPARE_BYTES = 1 << 30
"""Bytes for threads and libraries."""
COPIES = 3
"""Number of copies of the files' contents: as mapped, as gathered, as written."""


def bound_memory(source: Path) -> None:
    """Limit this process's memory to what the files under `source` can justify. The limit is RLIMIT_DATA, not
    RLIMIT_AS: every thread reserves address space that it never touches."""
    declared = sum(path.stat().st_size for path in source.rglob("*.pt") if path.is_file())
    allowed = _private_bytes() + COPIES * declared + SPARE_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        allowed = min(allowed, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, hard))


def _private_bytes() -> int:
    with open("/proc/self/status") as lines:
        found = next((line.split()[1] for line in lines if line.startswith("VmData:")), "0")
    return int(found) << 10


def main(arguments: list[str]) -> int:
    source, destination, *tag = arguments
    try:
        bound_memory(Path(source))
        path, notices = convert(Path(source), Path(destination), tag=tag[0] if tag else None)
    except MemoryError:
        print(json.dumps({"error": _TOO_MUCH.format(source), "code": int(ExitCode.CHECKPOINT_UNUSABLE)}))
        return int(ExitCode.CHECKPOINT_UNUSABLE)
    except (CheckpointError, OSError, ValueError, KeyError, TypeError) as error:
        code = getattr(error, "exit_code", ExitCode.CHECKPOINT_UNUSABLE)
        text = (
            str(error) if isinstance(error, CheckpointError | OSError) else f"{type(error).__name__}: {error}"
        )
        print(json.dumps({"error": text, "code": int(code)}))
        return int(code)
    print(json.dumps({"path": str(path), "notices": notices}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

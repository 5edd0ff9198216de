"""Points at which a process may be killed while it saves: before each file that it creates, renames or
removes.

Set KILL_POINT to `RANK:STEP:NAME` in a rank's environment to have it killed before it touches the file of
that name in the checkpoint of that step. Set INSPECT to a file to have a line written there at every point:
the checkpoint that another attempt would resume from if the process were killed now, and the folders with the
name of a checkpoint that are none.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")
_busy: list[bool] = []


def install() -> None:
    """Watch this process as its environment says."""
    import safetensors.torch
    import torch
    import transformers.modeling_utils as modeling

    # Files that are written without Python: no audit event names them.
    torch.save = _before(torch.save, place=1)
    safetensors.torch.save_file = modeling.safe_save_file = _before(safetensors.torch.save_file, place=1)  # type: ignore[attr-defined]
    sys.addaudithook(_audit)


def _before(function: Callable[..., Any], *, place: int) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        if isinstance(args[place], str | os.PathLike):
            _at(str(args[place]))
        return function(*args, **kwargs)

    return watched


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event not in EVENTS or not isinstance(args[0], str | os.PathLike):
        return
    if event == "open" and not (args[2] or 0) & (os.O_WRONLY | os.O_RDWR):
        return
    _at(os.fspath(args[1] if event == "os.rename" else args[0]))


def _at(path: str) -> None:
    if _busy or "checkpoint-" not in path:
        return
    _busy.append(True)
    try:
        rank, step, name = os.environ.get("KILL_POINT", "-1:0:none").split(":")
        if os.environ["RANK"] == rank and f"checkpoint-{step}" in path and Path(path).name == name:
            os.kill(os.getpid(), signal.SIGKILL)
        if "INSPECT" in os.environ and os.environ["RANK"] == "0":
            _inspect(Path(os.environ["INSPECT"]), path)
    finally:
        _busy.clear()


def _inspect(log: Path, path: str) -> None:
    from zerotrain.compat.job.folders import OutputFolder
    from zerotrain.compat.job.records import read_record
    from zerotrain.runtime.checkpoint.group import SingleRank

    folder = OutputFolder.in_job(Path(os.environ["ZEROTRAIN_CHECKPOINT_DIR"]) / "script" / "out")
    assert folder is not None
    choice = folder.choose(SingleRank(), of_job_only=True)
    chosen = None if choice.path is None else choice.path.name
    torn = [found.name for found in folder.checkpoints() if read_record(found) is None]
    with log.open("a") as file:
        print(json.dumps([Path(path).name, chosen, torn]), file=file)

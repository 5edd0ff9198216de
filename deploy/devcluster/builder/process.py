"""Execution of one long command, whose output is passed on by line, with ticks to update the progress."""

import queue
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from .errors import BuildError

TICK_S = 0.2
STOP_TIMEOUT_S = 5.0
TAIL_LINES = 30


def run_streaming(
    command: Sequence[str],
    *,
    folder: Path,
    environ: Mapping[str, str],
    on_line: Callable[[str], None],
    on_tick: Callable[[], None],
) -> None:
    """Run a command to its end. Raises BuildError with its last lines if it fails.

    The child process ends with this one.
    """
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    with subprocess.Popen(
        list(command),
        cwd=folder,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        threading.Thread(target=_read_lines, args=(process.stdout, lines), daemon=True).start()
        try:
            for line in _until_end(lines, on_tick):
                tail.append(line)
                on_line(line)
            status = process.wait()
        except BaseException:
            _stop(process)
            raise
    if status != 0:
        shown = "\n".join(f"    {line}" for line in tail)
        raise BuildError(f"`{' '.join(command)}` in {folder} ended with status {status}:\n{shown}")


def _stop(process: "subprocess.Popen[str]") -> None:
    # On an interrupt `go` ends its compilers and removes its work folder; on SIGTERM it would do neither. But
    # a shell may have started this process with interrupts ignored, which children inherit.
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.terminate()


def _read_lines(stream: IO[str], lines: "queue.SimpleQueue[str | None]") -> None:
    for line in stream:
        lines.put(line.rstrip("\n"))
    lines.put(None)


def _until_end(lines: "queue.SimpleQueue[str | None]", on_tick: Callable[[], None]) -> Iterator[str]:
    while True:
        try:
            line = lines.get(timeout=TICK_S)
        except queue.Empty:
            on_tick()
            continue
        if line is None:
            return
        yield line

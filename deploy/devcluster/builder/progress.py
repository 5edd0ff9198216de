"""Progress of a long build: a line that is redrawn on a terminal, a new line every 10 s elsewhere."""

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TextIO

LINE_INTERVAL_S = 10.0
REDRAW_INTERVAL_S = 0.2
BAR_WIDTH = 24


def duration(seconds: float) -> str:
    """Return a duration such as `7 s` or `2 min 05 s`."""
    whole = int(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60:02d} s"


@dataclass
class Reporter:
    """Writer of progress to one stream; `clock` is an argument so that tests need not wait."""

    stream: TextIO = field(default_factory=lambda: sys.stderr)
    clock: Callable[[], float] = time.monotonic
    _title: str = ""
    _upcoming: str = ""
    _started_at: float = 0.0
    _shown_at: float = 0.0
    _detail: str = ""
    _done: int = 0
    _total: int = 0

    def print_line(self, text: str) -> None:
        """Print a line that stays."""
        self._erase()
        print(text, file=self.stream, flush=True)

    def start(self, title: str, *, upcoming: tuple[str, ...] = ()) -> None:
        """Begin a step; `upcoming` names the steps after it."""
        self._title, self._detail, self._done, self._total = title, "", 0, 0
        self._upcoming = f"; next: {', '.join(upcoming)}" if upcoming else ""
        self._started_at = self._shown_at = self.clock()
        self.print_line(f"{title}{self._upcoming}")

    def update(self, *, detail: str, done: int = 0, total: int = 0) -> None:
        """Set the progress of the step, and show it if enough time has passed."""
        self._detail, self._done, self._total = detail, done, total
        self.tick()

    def tick(self) -> None:
        """Show the current state if enough time has passed since it was last shown."""
        now = self.clock()
        interval = REDRAW_INTERVAL_S if self._on_terminal else LINE_INTERVAL_S
        if now - self._shown_at < interval:
            return
        self._shown_at = now
        if self._on_terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{self._line(bar=True)[:width]}", end="", file=self.stream, flush=True)
        else:
            print(self._line(bar=False), file=self.stream, flush=True)

    def finish(self, outcome: str) -> None:
        """End the step with a line that gives its duration."""
        self.print_line(f"  {outcome} ({duration(self.clock() - self._started_at)})")

    @property
    def _on_terminal(self) -> bool:
        return self.stream.isatty()

    def _line(self, *, bar: bool) -> str:
        elapsed = duration(self.clock() - self._started_at)
        share = f"{self._done}/{self._total} " if self._total else ""
        if bar and self._total:
            filled = BAR_WIDTH * min(self._done, self._total) // self._total
            share = f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {share}"
        return f"  {share}{self._detail}  {elapsed}{'' if bar else self._upcoming}"

    def _erase(self) -> None:
        if self._on_terminal:
            print("\r\x1b[K", end="", file=self.stream)

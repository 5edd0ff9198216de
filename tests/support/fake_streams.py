"""Streams and events of a GPU that is not there: what runs on which, and what it has waited for.

Operations still run at once, on CPU tensors. Each stream counts what is noted on it, and knows up to which
count it has waited for the others, as an event carries that from one stream to the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

MAIN, SIDE = "main", "side"
CUDA = torch.device("cuda", 0)


@dataclass(eq=False)
class FakeStream:
    """A stream, and how much it has seen of every stream."""

    name: str
    device: torch.device = CUDA
    seen: dict[str, int] = field(default_factory=dict)

    def wait_event(self, event: FakeEvent) -> None:
        """Take over what the event has seen."""
        for name, count in event.seen.items():
            self.seen[name] = max(self.seen.get(name, 0), count)

    def wait_stream(self, stream: FakeStream) -> None:
        """Take over what the other stream has seen."""
        for name, count in stream.seen.items():
            self.seen[name] = max(self.seen.get(name, 0), count)


@dataclass(eq=False)
class FakeEvent:
    """An event at one place of one stream."""

    cuda: FakeCuda
    seen: dict[str, int] = field(default_factory=dict)

    def record(self, stream: FakeStream | None = None) -> None:
        """Record the stream, or the current one of the current device."""
        self.seen = dict((stream or torch.cuda.current_stream()).seen)  # type: ignore[union-attr]


@dataclass(frozen=True)
class Note:
    """Operation of a stream: its number there, and how much the stream had seen of each."""

    stream: str
    what: str
    label: str
    place: int
    seen: dict[str, int]


class FakeCuda:
    """Stands in for the streams of `torch.cuda`, and records what is noted."""

    def __init__(self) -> None:
        self.main = self.current = FakeStream(MAIN)
        self.notes: list[Note] = []

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Replace torch's functions until the patch is undone."""
        patch.setattr(torch.cuda, "Stream", lambda *_, **__: FakeStream(SIDE))
        patch.setattr(torch.cuda, "Event", lambda *_, **__: FakeEvent(self))
        patch.setattr(torch.cuda, "current_stream", lambda *_: self.current)
        patch.setattr(torch.cuda, "stream", self._on)

    def note(self, what: str, label: str) -> None:
        """Record an operation of the current stream."""
        seen = self.current.seen
        seen[self.current.name] = place = seen.get(self.current.name, 0) + 1
        self.notes.append(Note(self.current.name, what, label, place, dict(seen)))

    def found(self, what: str, label: str | None = None) -> list[Note]:
        """Return the notes of a kind, those of one label or all."""
        return [note for note in self.notes if note.what == what and label in (None, note.label)]

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

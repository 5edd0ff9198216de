"""Objects as they change: a list, then a watch from its version, across lost connections and busy API
servers.

Used by `waiting` for one job, by `reading` for many, by `log_follow` for pods. An error that does not resolve
itself (401, 403, 404, a certificate) ends it. Any other error is reported once and the request tried again,
each time after a longer pause.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from zerotrain.client.errors import (
    CertificateError,
    ClientError,
    ExpiredError,
    ForbiddenError,
    ServerError,
    UnreachableError,
)
from zerotrain.client.lenient_json import Fields, read_line
from zerotrain.client.transport import Listing, Transport

WATCH_S = 240.0
"""Seconds after which the API server ends a watch; the next one begins where it ended."""

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0
LIST_EVERY_S = 10.0
"""Seconds between two lists for users that may list but not watch."""

Json: TypeAlias = dict[str, Any]
Batch: TypeAlias = dict[str, Json | None]
"""Objects by `namespace/name`; None for those that are gone."""


def log_warning(text: str) -> None:
    """Log a warning: the default of `on_problem`."""
    logging.getLogger(__name__).warning("%s", text)


class Watched:
    """Watch on the objects at one path; `batches` may be called once."""

    def __init__(
        self,
        transport: Transport,
        path: str,
        query: Mapping[str, str],
        *,
        what: str,
        known: Iterable[str] = (),
        patience_s: float = math.inf,
        on_problem: Callable[[str], None] = log_warning,
    ) -> None:
        """`known` are the keys of objects that the caller has seen. `patience_s` is how long the API
        server may be unavailable. `on_problem` is called once at the beginning of each outage, and once at
        its end."""
        self._transport, self._path, self._query, self._what = transport, path, dict(query), what
        self._keys = set(known)
        self._patience_s, self._on_problem = patience_s, on_problem
        self._version = ""
        self._unavailable_since: float | None = None
        self._pause_s = FIRST_PAUSE_S
        self._has_answered = False

    def batches(self, deadline: float = math.inf) -> Iterator[Batch]:
        """Iterate over all objects, then over changes, until `deadline` (time.monotonic). Raises ClientError
        for errors that do not resolve themselves, and for every error of the first list."""
        while True:
            try:
                if not self._version:
                    yield self._listed()
                yield from self._changes(deadline)
            except ExpiredError:
                self._version = ""
            except CertificateError:
                raise
            except (UnreachableError, ServerError) as error:
                self._back_off(error, deadline)
            if time.monotonic() >= deadline:
                return

    def _listed(self) -> Batch:
        """Return all existing objects, and None for known ones that no longer exist."""
        listing = Listing(self._transport, self._path, self._query, what=self._what)
        found: dict[str, Json | None] = {key_of(item): item for item in listing}
        self._version = listing.version
        gone: Batch = dict.fromkeys(self._keys - found.keys())
        self._keys = set(found)
        self._record_answer()
        return found | gone

    def _changes(self, deadline: float) -> Iterator[Batch]:
        """Watch once from the last version seen, and iterate over the changes."""
        began = time.monotonic()
        left_s = min(deadline - began, WATCH_S)
        if left_s <= 0:
            return
        query = {
            **self._query,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(math.ceil(left_s)),
        }
        try:
            with self._transport.stream(self._path, query, what=self._what, timeout_s=left_s + 15) as chunks:
                for line in lines_of(chunks):
                    change = self._parse_change(line)
                    self._record_answer()
                    if change:
                        yield change
                    if time.monotonic() >= deadline:
                        return
        except ForbiddenError:
            self._version = ""
            time.sleep(max(0.0, min(LIST_EVERY_S, deadline - began)))
            return
        if time.monotonic() < began + FIRST_PAUSE_S < deadline:
            # Proxies that cannot hold watches end them at once.
            time.sleep(FIRST_PAUSE_S)

    def _parse_change(self, line: bytes) -> Batch:
        """Return the change in one line of a watch. Raises ExpiredError, ServerError, UnreachableError."""
        try:
            raw = read_line(line)
        except ValueError as error:
            raise UnreachableError(f"{self._what}: the watch broke off in the middle of a line") from error
        event = Fields(raw)
        kind, thing = event.text("type"), event.part("object")
        if kind == "ERROR":
            if thing.whole("code") == 410:
                raise ExpiredError(f"{self._what}: {thing.text('message')}")
            self._version = ""
            raise ServerError(f"{self._what}: the watch ended: {thing.text('message')}")
        self._version = thing.part("metadata").text("resourceVersion") or self._version
        if kind not in ("ADDED", "MODIFIED", "DELETED"):
            return {}
        key = key_of(raw["object"])
        if kind == "DELETED":
            self._keys.discard(key)
            return {key: None}
        self._keys.add(key)
        return {key: raw["object"]}

    def _record_answer(self) -> None:
        """Record that the API server answers."""
        if self._unavailable_since is not None:
            self._on_problem(f"{self._what}: the API server answers again")
        self._unavailable_since, self._pause_s, self._has_answered = None, FIRST_PAUSE_S, True

    def _back_off(self, error: ClientError, deadline: float) -> None:
        """Wait before the next try. Raises the error if the API server has never answered, or not for too
        long."""
        now = time.monotonic()
        if not self._has_answered:
            raise error  # a server that has never answered is probably at a wrong address
        if self._unavailable_since is None:
            self._unavailable_since = now
            self._on_problem(f"{' '.join(str(error).split())}; trying again")
        if now > self._unavailable_since + self._patience_s:
            raise error
        pause_s = self._pause_s * random.uniform(0.5, 1.0)
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        time.sleep(max(0.0, min(pause_s, deadline - now)))


def key_of(item: Mapping[str, Any]) -> str:
    """Return the key `namespace/name`."""
    meta = Fields(item).part("metadata")
    return f"{meta.text('namespace')}/{meta.text('name')}"


def lines_of(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Iterate over whole lines, without their ends, including a last one that has no end."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
    if rest:
        yield rest

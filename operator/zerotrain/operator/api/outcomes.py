"""Cache of resolved configurations, errors included: a job that waits or is refused asks again in every
pass."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Hashable

from zerotrain.contract.config import ConfigError, EngineConfig

MOST = 256


class Outcomes:
    """Newest outcomes, shared by all threads."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._known: dict[tuple[bytes, Hashable], EngineConfig | ConfigError] = {}
        self._change = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def of(self, config: str, terms: Hashable, resolve: Callable[[], EngineConfig]) -> EngineConfig:
        """Return what `resolve` returned for this configuration under these terms, or raise what it raised.
        Raises ConfigError."""
        key = (hashlib.sha256(config.encode(errors="surrogatepass")).digest(), terms)
        found = self._known.get(key)
        if found is None:
            try:
                found = resolve()
            except ConfigError as error:
                found = error
            with self._change:
                while len(self._known) >= self._most:
                    del self._known[next(iter(self._known))]
                self._known[key] = found
        if isinstance(found, ConfigError):
            # Drop the frames of earlier callers, which each raise would add to.
            raise found.with_traceback(None)
        return found

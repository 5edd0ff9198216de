"""The folders that the builder reads and writes: only the clone's `build/` and the user's cache."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Paths:
    """Folders of one clone, and of the cache that all clones of one user share."""

    repository: Path
    cache: Path
    """Folder `${XDG_CACHE_HOME:-~/.cache}/zerotrain`, or one in the clone if the home is not writable."""

    @property
    def devcluster(self) -> Path:
        return self.repository / "deploy" / "devcluster"

    @property
    def build(self) -> Path:
        return self.repository / "build" / "devcluster"

    @property
    def bin(self) -> Path:
        return self.build / "bin"

    @property
    def tool_bin(self) -> Path:
        """Folder of programs that are not part of a cluster, such as helm and promtool."""
        return self.repository / "build" / "tools" / "bin"

    @property
    def images(self) -> Path:
        return self.build / "images"

    @property
    def cache_is_in_clone(self) -> bool:
        return self.cache.is_relative_to(self.repository)

    @property
    def tools(self) -> Path:
        return self.cache / "tools"


def find_paths(repository: Path, environ: Mapping[str, str]) -> Paths:
    """Choose the cache folder. An account without a usable home (`nobody`) gets one inside the clone."""
    configured = environ.get("XDG_CACHE_HOME") or ""
    # The XDG rules require that a relative XDG_CACHE_HOME is ignored.
    base = Path(configured) if configured.startswith("/") else Path(os.path.expanduser("~")) / ".cache"
    cache = base / "zerotrain"
    if not _can_write(cache):
        cache = repository / "build" / "cache"
    return Paths(repository=repository, cache=cache)


def _can_write(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)

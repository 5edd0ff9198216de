"""A resolved configuration as the JSON object that it came from, like DeepSpeed's `engine.config`.

`config.get("zero_optimization", {}).get("stage")` returns what the file sets. The final values, defaults
included, are the attributes of `EngineConfig`.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any


class WrittenMapping:
    """Read-only mapping over `source`.

    A configuration is true even if the mapping is empty.
    """

    __slots__ = ()

    source: Mapping[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.source[key]

    def __contains__(self, key: object) -> bool:
        return key in self.source

    def __iter__(self) -> Iterator[str]:
        return iter(self.source)

    def __len__(self) -> int:
        return len(self.source)

    def __bool__(self) -> bool:
        return True

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of the key in the file."""
        return self.source.get(key, default)

    def keys(self) -> KeysView[str]:
        """Return the top-level names."""
        return self.source.keys()

    def values(self) -> ValuesView[Any]:
        """Return the values of the top-level names."""
        return self.source.values()

    def items(self) -> ItemsView[str, Any]:
        """Return the pairs of names and values."""
        return self.source.items()

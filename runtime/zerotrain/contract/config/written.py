"""A resolved configuration read as the JSON object that it came from, the way DeepSpeed's `engine.config` is.

`config.get("zero_optimization", {}).get("stage")` gives what the file says; what is final, defaults included,
are the attributes of `EngineConfig`.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any


class WrittenMapping:
    """The reading half of a mapping over `source`; a config is true also where that is empty."""

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
        """The value that the file gives the key."""
        return self.source.get(key, default)

    def keys(self) -> KeysView[str]:
        """The top-level names."""
        return self.source.keys()

    def values(self) -> ValuesView[Any]:
        """Their values."""
        return self.source.values()

    def items(self) -> ItemsView[str, Any]:
        """Both."""
        return self.source.items()

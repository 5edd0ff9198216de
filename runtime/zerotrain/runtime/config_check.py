"""Check that all ranks were given the same configuration, before `setup` shards anything.

Ranks that differ in a learning rate would silently train different weights; ranks that differ in a bucket
size or in the accumulation steps would wait for each other for ever.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

from zerotrain.contract.config import ConfigError, EngineConfig
from zerotrain.runtime.comm.group import Comm

_FREE = frozenset(("nvme_path", "paths", "notices", "unsupported", "report", "source"))
"""Fields that are not compared. Folders may differ between machines; the reader's messages and the notation
of the file are not settings."""


def check_same_config(config: EngineConfig, comm: Comm) -> None:
    """Raise ConfigError on every rank, naming the first setting in which a rank differs. Collective."""
    values = dict(settings_of(config))
    mine = [float(zlib.crc32(f"{path} {value!r}".encode())) for path, value in values.items()]
    rows = comm.gather_record([float(zlib.crc32(repr(mine).encode()))])
    if all(row == rows[0] for row in rows):
        return
    rows = comm.gather_record(mine)
    for place, (path, value) in enumerate(values.items()):
        mismatched = [rank for rank, row in enumerate(rows) if row[place] != rows[0][place]]
        if mismatched:
            raise ConfigError(
                path,
                f"must be the same on every rank, and rank {mismatched[0]} has another value than rank 0; "
                f"this is rank {comm.rank}",
                value,
                "Give every rank the same configuration.",
            )


def settings_of(config: EngineConfig) -> Iterator[tuple[str, Any]]:
    """Yield every setting by path; the number and the order are the same for every configuration."""
    yield from _settings(EngineConfig, config, "")


def _settings(kind: type, block: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(kind)
    for item in fields(kind):
        if item.name in _FREE:
            continue
        path, hint = f"{prefix}{item.name}", hints[item.name]
        value = getattr(block, item.name, None)  # also None where the whole block is absent
        kinds = (each for each in (hint, *get_args(hint)) if isinstance(each, type) and is_dataclass(each))
        if (block_kind := next(kinds, None)) is not None:
            yield f"{path} (block)", value is not None
            yield from _settings(block_kind, value, f"{path}.")
        else:
            yield path, sorted(value.items()) if isinstance(value, Mapping) else value

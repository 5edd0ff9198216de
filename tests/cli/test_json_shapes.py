"""Keys of the records that `-o json` prints: programs rely on them, so a change of one is a decision made
here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import zerotrain

pytestmark = pytest.mark.unit


CONFIG = {"train_batch_size": 4, "zero_optimization": {"stage": 2}}

SHAPES: dict[tuple[str, ...], Any] = {
    ("checkpoint", "ls", "FOLDER"): [
        "attempt condition created_at is_latest job_uid name num_bytes path reason step world_size"
    ],
    ("checkpoint", "verify", "FOLDER"): ["path problems"],
    ("config", "show", "CONFIG"): "keys not_run notes",
    ("config", "check", "CONFIG"): ["key outcome value why"],
    ("explain", "exit-codes"): "commands workers",
    ("explain", "memory", "7B"): "conventions parameters ranks",
    ("explain", "alert"): ["name severity summary"],
    ("version",): "kopf kubernetes python torch zerotrain",
    ("env",): "native module packages python system variables",
}
"""Command -> sorted keys of its record, in a list where it prints a list of records."""


def shape(value: Any) -> Any:
    """Return the top-level keys of a record; of a list, those of its first record."""
    return [shape(value[0])] if isinstance(value, list) else " ".join(sorted(value))


@pytest.mark.parametrize("command", SHAPES, ids=" ".join)
def test_keys_stay(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "step-0000000001-attempt-1").mkdir()
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps(CONFIG))
    places = {"FOLDER": tmp_path, "CONFIG": config}
    done = zerotrain(*(places.get(word, word) for word in command), "-o", "json")
    assert shape(json.loads(done.out)) == SHAPES[command]

"""Frozen expositions of a worker and of the operator: names, types, labels, buckets and values."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.expositions import FOLDER, families_of, operator_text, worker_text

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(("name", "text"), [("worker", worker_text), ("operator", operator_text)])
def test_expositions_are_as_stored(
    name: str, text: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in a user's program: creation times are exported unless one asks for none.
    monkeypatch.setattr("prometheus_client.metrics._use_created", True)
    stored, found = families_of((FOLDER / f"{name}.txt").read_text()), families_of(text())
    for family in stored.keys() & found.keys():
        assert found[family] == stored[family], family
    assert found.keys() == stored.keys()
    assert not [family for family in found if family.endswith("_created")]

"""The names that `reconcile` exports to other modules exist."""

from __future__ import annotations

import pytest

from zerotrain.operator import reconcile

pytestmark = pytest.mark.unit


def test_every_name_in_all_exists() -> None:
    missing = [name for name in reconcile.__all__ if not hasattr(reconcile, name)]
    assert missing == []

"""Every reason that is documented as one of the operator's is one that it emits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zerotrain.operator import constants
from zerotrain.operator.api import Phase
from zerotrain.operator.constants import Reason

pytestmark = pytest.mark.unit

CONSTANTS = Path(constants.__file__)


def test_every_reason_is_emitted_somewhere() -> None:
    sources = [path.read_text() for path in CONSTANTS.parent.rglob("*.py") if path != CONSTANTS]
    named = {name for text in sources for name in re.findall(r"\bReason\.([A-Z_]+)\b", text)}
    # Conditions of a phase that needs no reason of its own have its word.
    phases = {phase.value for phase in Phase}
    assert {item.name for item in Reason if item.value not in phases} <= named

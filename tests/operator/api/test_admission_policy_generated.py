"""The policy's file is what its module prints, and the chart has the same."""

from __future__ import annotations

import pytest

from deploy.chart.generate import differences
from tests.support.devcluster import REPOSITORY
from zerotrain.operator.api.admission_policy import render

pytestmark = pytest.mark.unit


def test_the_file_is_generated() -> None:
    assert (REPOSITORY / "deploy" / "policy" / "jobs.yaml").read_text() == render()


def test_the_chart_has_it() -> None:
    assert not [path for path in differences() if path.parent.name == "policy"]

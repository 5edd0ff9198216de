"""The script that compares and measures kernels on a GPU runs on a CPU too, with their host build."""

from __future__ import annotations

import json

import pytest
import torch

from tests.gpu import kernels

pytestmark = pytest.mark.ranks


@pytest.mark.skipif(torch.cuda.is_available(), reason="it measures a GPU, which takes long")
def test_it_prints_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main() == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["refused"] == {}
    assert len(result["rows"]) > 20
    assert all(row["launches"] == 1 for row in result["rows"] if "64 units" not in row["what"])

"""The factor that a device computes from the ranks' sums of squares is the host's, also for infinite ones."""

from __future__ import annotations

from math import inf, isfinite, nan

import pytest
import torch

from zerotrain.runtime.optim.device_scale import device_scale
from zerotrain.runtime.zero.clipping import clip_factor

pytestmark = pytest.mark.unit

SQUARES = ([4.0], [0.0, 0.0], [1e-12, 3e-9], [9.0, 1e8, 0.25], [inf, 1.0], [1.0, nan], [1e308, 1e308])


@pytest.mark.parametrize("gradient_scale", [1.0, 3.0, 65536.0])
@pytest.mark.parametrize("squares", SQUARES)
def test_equal_to_the_hosts_factor(squares: list[float], gradient_scale: float) -> None:
    given = torch.tensor(squares, dtype=torch.float64)
    found = device_scale(given, gradient_scale=gradient_scale, max_norm=0.5, skips_non_finite=True)
    norm = sum(squares) ** 0.5 / gradient_scale
    wanted = clip_factor(0.5, norm) / gradient_scale
    assert found.factor.tolist() == pytest.approx([wanted], rel=1e-15, nan_ok=True)
    assert found.found_inf is not None
    assert found.found_inf.tolist() == [0.0 if all(map(isfinite, squares)) else 1.0]
    assert {found.factor.dtype, found.found_inf.dtype} == {torch.float64}
    free = device_scale(given, gradient_scale=gradient_scale, max_norm=0.0, skips_non_finite=False)
    assert free.factor.tolist() == [1.0 / gradient_scale]
    assert free.found_inf is None


@pytest.mark.parametrize("max_norm", [0.0, 0.5])
def test_nothing_waits_for_the_device(max_norm: float) -> None:
    """Tensors without memory raise where a value of theirs would come to the host."""
    squares = torch.empty(8, dtype=torch.float64, device="meta")
    found = device_scale(squares, gradient_scale=3.0, max_norm=max_norm, skips_non_finite=True)
    assert found.found_inf is not None
    assert (found.factor.shape, found.found_inf.shape) == ((1,), (1,))

"""The kernels' host build in place of a GPU's, right or with one wrong bit. Used by tests of the engine's GPU
path."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from zerotrain.runtime._native import Kernels, host_kernels
from zerotrain.runtime.kernels import device

CPU = torch.device("cpu")


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, kernels: Kernels | None = None) -> Kernels:
    """Make the engine use kernels for CPU tensors as it does on a GPU; without an argument the host build."""
    found = host_kernels() if kernels is None else kernels
    monkeypatch.setitem(device._found, CPU, device.DeviceKernels(found))
    return found


class WrongKernels:
    """The host build, of which one function changes the last bit of one byte of its result."""

    def __init__(self, wrong: str, place: Callable[[dict[str, Any]], int]) -> None:
        """`place` returns the address of the byte for the arguments of a call, 0 for none."""
        self._host, self._wrong, self._place = host_kernels(), wrong, place

    def __getattr__(self, name: str) -> Callable[..., None]:
        function = getattr(self._host, name)

        def call(*given: Any, **named: Any) -> None:
            function(*given, **named)
            address = self._place({**named, "given": given}) if name == self._wrong else 0
            if address:
                ctypes.c_uint8.from_address(address).value ^= 1

        return call


def wrong_kernels(wrong: str, place: Callable[[dict[str, Any]], int]) -> Kernels:
    """Return kernels of which the function `wrong` is wrong in one bit."""
    return cast("Kernels", WrongKernels(wrong, place))

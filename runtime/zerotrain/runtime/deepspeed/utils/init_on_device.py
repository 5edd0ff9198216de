"""`deepspeed.utils.init_on_device`: build a model on a device and in a dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zerotrain.runtime.construct.context import init_context
from zerotrain.runtime.deepspeed.absent import attributes_of

__all__ = ["OnDevice"]

__getattr__ = attributes_of(__name__)


@contextmanager
def OnDevice(dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> Iterator[None]:
    """Make constructors within create floating-point tensors of the dtype on the device.

    On "meta" it is `zerotrain.runtime.init_context`, so that `initialize` can give every rank its part of the
    values; the dtype is then the configured one.
    """
    if not enabled:
        yield
    elif torch.device(device).type == "meta":
        with init_context():
            yield
    else:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                yield
        finally:
            torch.set_default_dtype(before)

"""Updates of a unit on a device that the machine may lack."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zerotrain.runtime.optim.groups import Hyper
from zerotrain.runtime.optim.update import Segment, UnitUpdate

HYPER = Hyper(lr=1e-3, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-8, momentum=0.0)


def update_on(device: str) -> UnitUpdate:
    """Return an update of four elements; on other devices than the CPU its tensors have no memory."""
    everything = [Segment(start=0, stop=4, hyper=HYPER, step=1)]
    if device == "cpu":
        grads, weights = torch.zeros(2, 4)
    else:
        with FakeTensorMode():
            grads, weights = torch.empty(4, device=device), torch.empty(4, device=device)
    return UnitUpdate(segments=everything, grads=grads, grad_scale=1.0, weights=weights)

"""Whole values of pending parameters for a block of a script, before an engine takes the model over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from zerotrain.runtime.comm.group import pick_device
from zerotrain.runtime.construct.pending import is_pending, is_unchanged, postpone, settle, was_pending
from zerotrain.runtime.zero.placeholder import owner_of


@contextmanager
def whole_values(parameters: Iterable[nn.Parameter], modifier_rank: int | None = None) -> Iterator[None]:
    """Read pending parameters for a block; afterwards those that have the values of their files are pending
    again. Others are left alone.

    With `modifier_rank`, where any of the parameters came from files, all ranks then take the values of that
    rank, those of ordinary parameters included. Collective in that case.
    """
    given = [each for each in {id(each): each for each in parameters}.values() if owner_of(each) is None]
    read = [each for each in given if is_pending(each)]
    for parameter in read:
        settle(parameter)
    yield
    if modifier_rank is not None and any(map(was_pending, given)) and _has_peers():
        _take_values(given, read, modifier_rank)
        return
    for parameter in read:
        if not is_pending(parameter) and is_unchanged(parameter):
            postpone(parameter)


def _has_peers() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


@torch.no_grad()
def _take_values(given: Sequence[nn.Parameter], read: Sequence[nn.Parameter], rank: int) -> None:
    device = pick_device()
    is_kept = [was_pending(each) and (is_pending(each) or is_unchanged(each)) for each in given]
    flags = torch.tensor(is_kept, dtype=torch.uint8, device=device)
    dist.broadcast(flags, src=rank)
    for parameter, is_of_file in zip(given, flags.tolist(), strict=True):
        if is_of_file:
            if any(parameter is each for each in read):
                postpone(parameter)
            continue
        settle(parameter)
        values = parameter.detach().to(device).contiguous()
        dist.broadcast(values, src=rank)
        parameter.copy_(values)

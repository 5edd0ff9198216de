"""Whole values of pending parameters for a block of a script, before an engine takes the model over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from zerotrain.runtime.comm.group import pick_device
from zerotrain.runtime.construct.context import is_recording, origin_of
from zerotrain.runtime.construct.log import ConstructionLog
from zerotrain.runtime.construct.pending import (
    is_pending,
    is_unchanged,
    make_pending,
    postpone,
    settle,
    was_pending,
)
from zerotrain.runtime.construct.values import swap
from zerotrain.runtime.zero.placeholder import nan_of, owner_of


@contextmanager
def whole_values(parameters: Iterable[nn.Parameter], modifier_rank: int | None = None) -> Iterator[None]:
    """Read pending parameters for a block; afterwards those that have the values of their files, or of their
    constructor in `init_context`, are pending again. Others are left alone.

    With `modifier_rank`, where any of the parameters was pending, all ranks then take the values of that
    rank, those of ordinary parameters included. Collective in that case, and for parameters of
    `init_context`.
    """
    given = [each for each in {id(each): each for each in parameters}.values() if owner_of(each) is None]
    if not is_recording():
        _postpone_deferred(given)
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


def _postpone_deferred(parameters: Iterable[nn.Parameter]) -> None:
    """Make those on the meta device pending that `init_context` made, with the seed of rank 0."""
    for parameter in parameters:
        origin = origin_of(parameter) if parameter.is_meta and not is_pending(parameter) else None
        if origin is not None:
            _agree_on_seed(origin.log)
            place = nan_of(parameter.dtype, torch.device("cpu"))
            swap(parameter, "a parameter of GatheredParameters", place.expand(parameter.shape))
            make_pending(parameter, origin)


def _agree_on_seed(log: ConstructionLog) -> None:
    if not log.has_common_seed and log.seed is not None and _has_peers():
        seed = torch.tensor([log.seed % (1 << 63)], dtype=torch.int64, device=pick_device())
        dist.broadcast(seed, src=0)
        log.seed = int(seed)
        log.has_common_seed = True


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

"""Weights of stage 3 outside of the device: in host memory, or in the spill file. Made by `setup`, called by
units.

A shard is copied straight to its place in the unit's whole weights, from where the gather sends it on, so a
tier needs no memory on the device. Spilled shards are read and written through a few buffers
(`param_ring.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from zerotrain.contract.config import EngineConfig
from zerotrain.contract.memory.inputs import PARAM_CHUNK_BYTES, fitting
from zerotrain.contract.memory.moved import offload_tiers
from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.comm.timing import Pending
from zerotrain.runtime.offload.pages import HostPages
from zerotrain.runtime.offload.param_ring import ParamRing
from zerotrain.runtime.offload.transfer import Uploads
from zerotrain.runtime.zero.dtypes import TORCH_DTYPES
from zerotrain.runtime.zero.layout import ModelLayout, UnitLayout, round_up
from zerotrain.runtime.zero.ledger import MemoryKind, MemoryLedger
from zerotrain.runtime.zero.shards import CopiedBack, StartGather, StoredShard

if TYPE_CHECKING:
    from zerotrain.runtime.spill.chunks import Record
    from zerotrain.runtime.spill.store import SpillStore

PAGE_BYTES = 4096


class OffloadedParams:
    """The tier of one engine's shards: each in the spill file, in host memory or, where that is the
    device's memory, resident."""

    kind = MemoryKind.HOST_PARAMS

    def __init__(
        self,
        device: torch.device,
        *,
        spill_store: SpillStore | None = None,
        host_numel: int = 0,
        pins: bool = False,
    ) -> None:
        """Create the tier. `spill_store` None = host memory. With a spill store, shards of `host_numel`
        elements of this rank stay in host memory: whole units, in layout order, as far as they fit. `pins`:
        host memory is page-locked."""
        self._device = device
        self._spill_store = spill_store
        self._host_numel = host_numel
        self._pins = pins
        self._uploads = Uploads(device)
        self._in_host: dict[UnitLayout, int] = {}
        """Number of elements of each shard that stays in host memory."""
        self._records: dict[UnitLayout, Record] = {}
        self._tag_bytes: dict[Record, int] = {}
        self._ring: ParamRing | None = None
        self._ledger: MemoryLedger

    def prepare(self, plan: ModelLayout, ledger: MemoryLedger) -> None:
        """Take the units of `plan` as the complete set from now on, and allocate records for those that are
        spilled. Called before the units are made."""
        self._ledger = ledger
        if self._spill_store is None:
            return
        numel = {each: plan.shard_numel(each) for each in plan.units if not each.stays_whole}
        self._in_host = {layout: size for layout, size in self._in_host.items() if layout in numel}
        new = [layout for layout in numel if layout not in self._in_host and layout not in self._records]
        free_numel = self._host_numel - sum(self._in_host.values())
        kept = fitting([numel[layout] for layout in new], free_numel)
        for index, layout in enumerate(new):
            if index in kept:
                self._in_host[layout] = numel[layout]
                continue
            sizes = _chunks(_num_bytes(layout, numel[layout]))
            tag_bytes = self._spill_store.memory.tags
            record = self._records[layout] = self._spill_store.add(
                f"{layout.name} (weights)", sizes, layout=layout.dtype, swept=False
            )
            self._tag_bytes[record] = self._spill_store.memory.tags - tag_bytes
        if self._records:
            self._spill_store.allocate()
            self._make_ring(self._spill_store)

    @property
    def may_spill(self) -> bool:
        """Whether shards may go to the spill file."""
        return self._spill_store is not None

    def is_resident(self, layout: UnitLayout) -> bool:
        """Return whether a unit's shard is in device memory all the same, as the device is the CPU."""
        return layout not in self._records and self._device.type == "cpu"

    def keep(self, layout: UnitLayout, values: torch.Tensor) -> StoredShard:
        """Take over this rank's shard of a unit that `prepare` knows and that is not resident."""
        dtype = TORCH_DTYPES[layout.dtype]
        if layout not in self._records:
            pages = HostPages(values.numel() * dtype.itemsize, pinned=self._pins)
            return HostShard(pages, values, dtype, uploads=self._uploads, ledger=self._ledger)
        assert self._ring is not None  # prepare() made it
        record = self._records[layout]
        self._count(record, 1)
        shard = SpilledShard(self, self._ring, record, numel=values.numel(), dtype=dtype)
        shard.write(0, values)
        return shard

    def forget(self, record: Record) -> None:
        """Give the record of a unit that is gone back to the spill store."""
        assert self._spill_store is not None
        for layout in [layout for layout, kept in self._records.items() if kept is record]:
            del self._records[layout]
        self._spill_store.forget(record)
        self._count(record, -1)
        del self._tag_bytes[record]

    def next_to_update(self, record: Record) -> Record | None:
        """Return the record that an update in layout order reads after this one; None after the last."""
        trained = [kept for layout, kept in self._records.items() if layout.trainable]
        following = trained[trained.index(record) + 1 :][:1] if record in trained else []
        return following[0] if following else None

    def send(self, source: torch.Tensor, part: torch.Tensor, start: StartGather) -> Pending:
        """Copy a shard and start its gather, as `StoredShard.send`."""
        return self._uploads.send(source, part, start)

    def _make_ring(self, spill_store: SpillStore) -> None:
        sizes = {layout: record.num_bytes for layout, record in self._records.items()}
        largest = max(sizes.values())
        trained = max((size for layout, size in sizes.items() if layout.trainable), default=0)
        if self._ring is None:
            self._ring = ParamRing(spill_store, self._uploads, self._ledger, pins=self._pins)
        self._ring.fit(largest, trained)

    def _count(self, record: Record, sign: int) -> None:
        self._ledger.add(MemoryKind.SPILL, sign * record.num_bytes)
        self._ledger.add(MemoryKind.TAGS, sign * self._tag_bytes[record])


class HostShard:
    """A shard in host memory, beside an accelerator."""

    tensor = None
    is_spilled = False

    def __init__(
        self,
        pages: HostPages,
        values: torch.Tensor,
        dtype: torch.dtype,
        *,
        uploads: Uploads,
        ledger: MemoryLedger,
    ) -> None:
        self._pages = pages
        self._uploads = uploads
        self._ledger = ledger
        self._sent: Any = None
        """Event behind the shard's last copy to the device."""
        self._host = ledger.count(MemoryKind.HOST_PARAMS, pages.data.view(dtype)).copy_(values)

    def send(self, part: torch.Tensor, start: StartGather) -> Pending:
        pending = self._uploads.send(self._host, part, start)
        self._sent = self._uploads.mark()
        return pending

    def read_ahead(self) -> bool:
        return True

    def to_update(self, *, reads: bool, device: torch.device) -> AbstractContextManager[torch.Tensor]:
        if self._sent is not None:  # other shards' copies wait for the device's computation
            self._sent.synchronize()
        if device.type == "cpu":
            return nullcontext(self._host)
        return CopiedBack(self._host, reads=reads, device=device)

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self._host[start:stop]

    @torch.no_grad()
    def write(self, start: int, values: torch.Tensor) -> None:
        self._uploads.finish()
        self._host[start : start + values.numel()].copy_(values)

    def drop(self) -> None:
        self._uploads.finish()
        self._ledger.add(MemoryKind.HOST_PARAMS, -self._host.nbytes)
        self._pages.release()


class SpilledShard:
    """A shard in the spill file."""

    tensor = None
    is_spilled = True

    def __init__(
        self, tier: OffloadedParams, ring: ParamRing, record: Record, *, numel: int, dtype: torch.dtype
    ) -> None:
        self._tier = tier
        self._ring = ring
        self._record = record
        self._numel = numel
        self._dtype = dtype

    def send(self, part: torch.Tensor, start: StartGather) -> Pending:
        with self._ring.gathers.contents(self._record) as data:
            return self._tier.send(self._view(data), part, start)

    def read_ahead(self) -> bool:
        return self._ring.gathers.read_ahead(self._record)

    @contextmanager
    def to_update(self, *, reads: bool, device: torch.device) -> Iterator[torch.Tensor]:
        following = self._tier.next_to_update(self._record) if reads else None
        with self._ring.updating(self._record, reads=reads, following=following) as data:
            weights = self._view(data)
            if device.type == "cpu":
                yield weights
                return
            with CopiedBack(weights, reads=reads, device=device) as copy:
                yield copy

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return a copy of these elements."""
        with self._ring.gathers.window(self._record) as data:
            return self._view(data)[start:stop].clone()

    @torch.no_grad()
    def write(self, start: int, values: torch.Tensor) -> None:
        is_whole = values.numel() == self._numel
        with self._ring.gathers.window(self._record, writes=True, loads=not is_whole) as data:
            self._view(data)[start : start + values.numel()].copy_(values)

    def drop(self) -> None:
        self._ring.forget(self._record)
        self._tier.forget(self._record)

    def _view(self, data: torch.Tensor) -> torch.Tensor:
        return data[: self._numel * self._dtype.itemsize].view(self._dtype)


def make_param_tier(
    config: EngineConfig, comm: Comm, spill_store: SpillStore | None
) -> OffloadedParams | None:
    """Return the tier of the weights; None where they stay on the device."""
    block = config.zero.offload_param
    where = offload_tiers(config, on_host=comm.device.type == "cpu").params
    if block is None or where == "gpu":
        return None
    return OffloadedParams(
        comm.device,
        spill_store=spill_store if where == "nvme" else None,
        host_numel=block.max_in_cpu,
        pins=block.pin_memory and comm.device.type == "cuda",
    )


def _num_bytes(layout: UnitLayout, numel: int) -> int:
    return round_up(numel * TORCH_DTYPES[layout.dtype].itemsize, PAGE_BYTES)


def _chunks(num_bytes: int) -> Sequence[int]:
    """Return the sizes of a record's chunks in bytes."""
    return [min(PARAM_CHUNK_BYTES, num_bytes - start) for start in range(0, num_bytes, PARAM_CHUNK_BYTES)]

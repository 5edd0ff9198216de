"""The data-parallel process groups and the collectives that the engine runs on them.

Every collective goes through `Comm`, which times it, counts its bytes and folds it into a rolling hash. The
hash is part of the step record, so ranks that issued different sequences get a named error instead of wrong
numbers.

There are two groups: gathers of parameters and exchanges of gradients interleave differently with compute,
and one group would force one order on both. At world size 1 nothing uses torch.distributed. Ranks of one host
communicate through shared memory (`shared.py`) if that works and is faster.
"""

from __future__ import annotations

import atexit
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from zerotrain.contract.worker_environment import CommEnv, LaunchError
from zerotrain.runtime.comm.accounts import Accounts, NodeMap
from zerotrain.runtime.comm.affinity import bind_to_node_of
from zerotrain.runtime.comm.memory import Memory, PrivateMemory, unfilled
from zerotrain.runtime.comm.mismatch import CALL, CommError
from zerotrain.runtime.comm.model_parallel import ModelParallel
from zerotrain.runtime.comm.shared import SharedGroup
from zerotrain.runtime.comm.sharing import share_memory
from zerotrain.runtime.comm.timing import Exchange, Pending
from zerotrain.runtime.comm.watchdog import Watchdog, own_store
from zerotrain.runtime.comm.whole_calls import Meetings
from zerotrain.runtime.comm.work import FLAT_ALL_GATHER, Delays, gather_by_broadcasts, sendable

__all__ = ["DEFAULT_TIMEOUT", "Comm", "CommError", "is_device", "nccl_options", "pick_device", "timeout_of"]

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""Timeout of a group if the operator does not set one, see `timeout_of`."""

STORE = "zerotrain"
"""Prefix of all our keys in the store of the default group."""

BROADCAST_BYTES = 1 << 16
"""Size in bytes from which a gather on gloo is made of broadcasts; below it latency dominates."""


class Comm(Accounts):
    """Rank, world size and the collectives of one engine; all ranks call every method in the same order."""

    def __init__(
        self,
        *,
        device: torch.device,
        options: CommEnv | None = None,
        group: Any = None,
    ) -> None:
        """Join the group: the program's default group if there is one, else `env://`. Collective.

        `options` None reads them from the environment. `group` is a process group of the program that holds
        the data-parallel ranks; None = all ranks.
        """
        options = options or CommEnv.from_env(os.environ)
        self.timeout = timeout = timeout_of(options)
        """Time that the ranks wait for each other in any group of the engine."""
        super().__init__(device)
        self._serial = next(_ENGINES)
        self._is_closed = False
        _join(device, timeout)
        joined = dist.is_initialized()
        self.rank = dist.get_rank(group) if joined else 0
        self.world_size = dist.get_world_size(group) if joined else 1
        self.model_parallel: ModelParallel | None = None
        """Group from an mpu object, whose ranks hold the parts of one replica of the model."""
        self._members = dist.get_process_group_ranks(group) if group is not None else None
        """Global ranks of the group if it is not all ranks."""
        self.global_ranks = tuple(self._members or range(self.world_size))
        self.group = (group or dist.group.WORLD) if joined else None
        """The torch.distributed process group of the ranks; None for one rank without a group."""
        self._exchanges: Any = None
        self._gathers: Any = None
        self.hosts: Any = self.group
        """The process group of the ranks that takes tensors of the host, where waits block and can fail."""
        self._hosts: Any = None
        """Group beside NCCL's; None = `group` takes tensors of the host itself."""
        self.subgroups: list[Any] = []
        """Process groups of some of the ranks. `SubGroup` adds its group here, so that a failure aborts its
        collectives too, and removes it before leaving the group."""
        self._delays = Delays(options.delay_seconds, seed=self.rank)
        self.meet = Meetings(
            self,
            timeout=timeout,
            store_name=f"{STORE}/{self._serial}/{self.global_ranks[0]}/meetings",
        )
        """`meet(name, flag=False)`: wait until every rank has called the engine's method of that name; return
        whether any passed the flag."""
        self._watchdog = self._make_watchdog(options.watchdog_seconds)
        with _closed_by_errors(self._watchdog):
            local_world_size, is_first = self._agree(options)
        self.nodes = NodeMap.of(self.global_ranks, local_world_size=local_world_size)
        if self.world_size > 1:
            self._make_groups(timeout, is_first=is_first)
        self._shared, self.transport_reason = self._share(options.transport, timeout)
        self.memory: Memory = PrivateMemory(device) if self._shared is None else self._shared.memory
        """Allocator of the buffers for collectives."""
        _OPEN.add(self._serial)

    @property
    def transport(self) -> str:
        """Name of the transport: `shared`, `nccl`, `gloo`, or `none` for one rank; `transport_reason`
        explains it."""
        if self.world_size == 1:
            return "none"
        if self._shared is not None:
            return "shared"
        return "gloo" if self.device.type == "cpu" else "nccl"

    @property
    def shares_memory(self) -> bool:
        """Whether the ranks read each other's buffers instead of sending them."""
        return self._shared is not None

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, *, label: str) -> Pending:
        """Start to fill `full` (1-D, world_size * shard elements) with every rank's `shard`, in rank order.

        `shard` may be this rank's part of `full` itself. Both must stay alive until `wait()`. A shard from
        `memory` must stay unchanged until all ranks have entered a later collective.
        """
        if self.world_size == 1:
            if full.data_ptr() != shard.data_ptr():
                full.copy_(shard)
            return Pending.done()
        if self._shared is not None:
            name = self._name("all_gather", label)
            work: Any = self.issue(self._shared.all_gather, full, shard, name)
        elif self.device.type == "cpu" and full.nbytes >= BROADCAST_BYTES:
            work = self.issue(gather_by_broadcasts, full, shard, rank=self.rank, group=self.group)
        else:
            whole, part = sendable(full), sendable(shard)
            work = self.issue(FLAT_ALL_GATHER, whole, part, group=self.group, async_op=True)
        return self.account("all_gather", label, shard.nbytes, work)

    def start_exchange(self, sent: torch.Tensor, *, label: str) -> Exchange:
        """Start the all-to-all of equal parts of a 1-D tensor: part i goes to rank i.

        Followed by a local sum this is a reduce-scatter. Its order of additions, and so its bits, do not
        depend on timing; on gloo it is also the faster one. `sent` (preferably from `memory.borrow`) must not
        change until `Exchange.finish`.
        """
        if self.world_size == 1:
            self._delays.pause()
            return Exchange(Pending.done(), parts=lambda: [sent])
        num_bytes = sent.numel() // self.world_size * sent.element_size()
        if self._shared is not None:
            shared = self.issue(self._shared.exchange, sent, self._name("reduce_scatter", label))
            pending = self.account("reduce_scatter", label, num_bytes, shared)
            return Exchange(pending, parts=shared.parts, finish=shared.finish)
        received = unfilled(sent.numel(), sent.dtype, self.device)
        work = self.issue(dist.all_to_all_single, received, sent, group=self._exchanges, async_op=True)
        pending = self.account("reduce_scatter", label, num_bytes, work, crossing=self.nodes.outside)
        parts = list(received.view(self.world_size, -1))
        return Exchange(pending, parts=lambda: parts, finish=parts.clear, extra_bytes=received.nbytes)

    def exchange(self, received: torch.Tensor, sent: torch.Tensor, *, label: str) -> Pending:
        """Run `start_exchange` into a buffer of the caller: `received` gets the parts in rank order."""
        exchange = self.start_exchange(sent, label=label)

        def wait() -> None:
            exchange.wait()
            for into, part in zip(received.view(self.world_size, -1), exchange.parts(), strict=True):
                into.copy_(part)
            exchange.finish()

        return Pending(wait)

    def gather_record(self, record: Sequence[float], *, label: str = "step record") -> list[list[float]]:
        """All-gather one short record of float64 per rank; return the records in rank order, equal on every
        rank. The hosts exchange it among themselves: no one waits for a device."""
        if self.world_size == 1:
            return [list(record)]
        mine = torch.tensor(record, dtype=torch.float64, device="cpu")  # not the program's default device
        full = torch.empty(self.world_size * mine.numel(), dtype=torch.float64, device="cpu")
        if self.device.type == "cpu":
            self.all_gather(full, mine, label=label).wait()
        else:
            work = self.issue(FLAT_ALL_GATHER, full, mine, group=self.hosts, async_op=True)
            self.account("all_gather", label, mine.nbytes, work, on_host=True).wait()
        rows: list[list[float]] = full.view(self.world_size, -1).tolist()
        return rows

    def broadcast(self, tensor: torch.Tensor, *, label: str, source: int = 0) -> None:
        """Overwrite `tensor` with the values of rank `source`; blocks."""
        if self.world_size == 1:
            return
        values = sendable(tensor)
        work = self.issue(dist.broadcast, values, group_src=source, group=self.group, async_op=True)
        # Counted as if it went to one rank: the backend decides which hops it takes.
        self.account("broadcast", label, tensor.nbytes, work, receivers=1).wait()

    def close(self) -> None:
        """Leave the groups that this object made, except the default one. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._watchdog is not None:
            self._watchdog.close()
        if self._shared is not None:
            self._shared.close()
        for made in (self._exchanges, self._gathers, self._hosts):
            if made is not None and self._members is None and dist.is_initialized():
                dist.destroy_process_group(made)
        self._exchanges = self._gathers = self._hosts = None
        _OPEN.discard(self._serial)

    def _name(self, op: str, label: str) -> str:
        return f"{op} for {label!r} on rank {self.rank}"

    def _agree(self, options: CommEnv) -> tuple[int, bool]:
        """Return the number of ranks per node, or 0 if it differs between ranks, and whether no rank has
        another open engine.

        What follows is collective, so no rank may decide alone. Raises CommError, on every rank, if they are
        configured for different transports, and where a rank does not come.
        """
        if self.world_size == 1:
            return options.local_world_size, True
        mine = torch.tensor([options.local_world_size, _TRANSPORTS.index(options.transport), len(_OPEN)])
        rows = [torch.empty_like(mine, device=self.device) for _ in range(self.world_size)]
        # In the store first: ranks that train another engine would read the gather below as their own
        # collective. Not for long, as only the gather notices at once that a process has gone. Where the
        # watchdog is switched off, no rank looks for others.
        if self._watchdog is not None:
            self.meet("initialize", patience=_FIRST_PATIENCE)
        work = dist.all_gather(rows, mine.to(self.device), group=self.group, async_op=True)
        self.watch(work, f"{CALL}initialize").wait()
        sizes, transports, opened = zip(*(row.tolist() for row in rows), strict=True)
        self.check()  # on a GPU the values of an aborted collective have no meaning
        if len(set(transports)) > 1:
            found = "; ".join(
                f"{name} on ranks {[rank for rank, asked in enumerate(transports) if asked == index]}"
                for index, name in enumerate(_TRANSPORTS)
                if index in transports
            )
            raise CommError(f"ZEROTRAIN_TRANSPORT must be the same on every rank; got {found}")
        return options.local_world_size if len(set(sizes)) == 1 else 0, not any(opened)

    def _make_groups(self, timeout: timedelta, *, is_first: bool) -> None:
        """Make the groups of this engine: a second one of the same ranks, for exchanges of gradients, one for
        gathers if another engine is open, and one for records where NCCL takes no tensors of the host."""
        backend = dist.get_backend()
        options = nccl_options(backend, timeout)
        if self._members is None:
            self._exchanges = dist.new_group(timeout=timeout, pg_options=options)
            if backend == "nccl":
                self.hosts = self._hosts = dist.new_group(timeout=timeout, backend="gloo")
            if not is_first and self.device.type == "cpu":
                # In one group with another engine, a rank that uses the engines in another order would
                # receive that one's values. On a GPU, a communicator would take too much memory for that.
                self.group = self.hosts = self._gathers = dist.new_group(timeout=timeout)
            return
        key = tuple(self._members)
        if key not in _SECOND_GROUPS:
            # Only the members call this. torch derives the name of such a group from the groups that exist,
            # so a group made after another was destroyed would find the old one's addresses. The group is
            # therefore kept.
            make = partial(dist.new_group, self._members, timeout=timeout, use_local_synchronization=True)
            with without_other_ranks():
                hosts = make(backend="gloo") if backend == "nccl" else None
                _SECOND_GROUPS[key] = make(pg_options=options), hosts
        self._exchanges, self._hosts = _SECOND_GROUPS[key]
        self.hosts = self._hosts or self.group

    def _make_watchdog(self, bound_seconds: float) -> Watchdog | None:
        if self.world_size == 1 or bound_seconds == 0:
            return None
        first = self._members[0] if self._members else 0
        shared = own_store(STORE)
        store = PrefixStore(f"{self._serial}/{first}", shared)
        abort = self._abort if self.device.type == "cuda" else None
        return Watchdog(
            store,
            rank=self.rank,
            world_size=self.world_size,
            bound_seconds=bound_seconds,
            ranks=self.global_ranks,
            processes=shared,
            device=self.device,
            on_failure=abort,
        )

    def _share(self, transport: str, timeout: timedelta) -> tuple[SharedGroup | None, str]:
        if self.world_size == 1:
            return None, "there is one rank"
        if self._members is not None:
            return None, "the data-parallel group has only some of the ranks"
        if self.device.type != "cpu" or transport == "gloo":
            return None, "NCCL" if self.device.type != "cpu" else "gloo was requested"
        if self.nodes.num_nodes > 1:
            return None, f"the ranks are on {self.nodes.num_nodes} nodes"
        shared, reason = share_memory(
            rank=self.rank,
            world_size=self.world_size,
            timeout_seconds=timeout.total_seconds(),
            probe=transport == "auto",
        )
        if shared is not None and self._watchdog is not None:
            shared.counters.on_long_wait = self._watchdog.check
        return shared, reason

    def _abort(self, failure: str) -> None:
        """Abort the NCCL groups, because NCCL waits on the device, where no exception reaches it."""
        for group in (self.group, self._exchanges, *self.subgroups):
            backend: Any = dist.distributed_c10d._get_default_group() if group is None else group
            if hasattr(backend, "abort"):
                backend.abort()


_TRANSPORTS = ("auto", "shared", "gloo")

_FIRST_PATIENCE = timedelta(seconds=4)
"""Time that a rank waits in the store for the others to call `initialize`, before it waits for them in a
collective: enough for the watchdog to find ranks that wait elsewhere."""

_OPEN: set[int] = set()
"""Serial numbers of the objects that are not closed."""

_SECOND_GROUPS: dict[tuple[int, ...], tuple[Any, Any]] = {}
"""Groups for exchanges and for records by their global ranks; they live as long as the process."""

_ENGINES = itertools.count()
"""Counter of engines. Every rank makes its engines in the same order, so their watchdogs find each other by
number."""


def timeout_of(options: CommEnv) -> timedelta:
    """Return how long a rank waits for the others in a collective, and when groups are made."""
    if options.hang_backstop_seconds is None:
        return DEFAULT_TIMEOUT
    return timedelta(seconds=options.hang_backstop_seconds)


def pick_device() -> torch.device:
    """Return the CUDA device of LOCAL_RANK if there is CUDA, else the CPU, and make it current; the process's
    threads then run near it.

    Raises LaunchError if there are fewer GPUs than ranks, and if the worker requests GPUs of which torch sees
    none.
    """
    if not torch.cuda.is_available():
        _check_for_gpus(CommEnv.from_env(os.environ).num_gpus)
        return torch.device("cpu")
    index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= count:
        raise LaunchError(
            f"LOCAL_RANK is {index}, so this rank needs GPU {index}, but the process sees {count}; start as "
            "many ranks per worker as it has GPUs, or set CUDA_VISIBLE_DEVICES to nothing to train on CPUs"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    bind_to_node_of(device)
    return device


def is_device(named: torch.device, device: torch.device) -> bool:
    """Return whether a script that names a device means this rank's; without an index it means the current
    one, which `pick_device` chose."""
    return named.type == device.type and named.index in (None, device.index or 0)


def _check_for_gpus(num_requested: int) -> None:
    if not num_requested or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return
    if torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        cause = "the container has no device or driver; set podTemplate.runtimeClassName, often nvidia"
    else:
        cause = "it is built for CPUs; take an image whose torch is built for CUDA"
    raise LaunchError(
        f"the worker requests {num_requested} GPUs, of which torch {torch.__version__} sees none: {cause}. "
        "To train on CPUs leave resources.gpus out, or set CUDA_VISIBLE_DEVICES to nothing"
    )


def nccl_options(backend: str, timeout: timedelta) -> Any:
    """Return the options of a process group, None for other backends: on NCCL its stream has a high priority,
    so that a collective which is issued starts although kernels of the computation wait for the GPU."""
    if backend != "nccl":
        return None
    options: Any = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    options._timeout = timeout  # torch warns of another one than the group's
    return options


@contextmanager
def without_other_ranks() -> Iterator[None]:
    """Let only its members make a process group in the block. If the default group is bound to a GPU, torch
    splits NCCL's communicator of that, which waits for all ranks of the job."""
    whole: Any = dist.group.WORLD
    bound, whole.bound_device_id = whole.bound_device_id, None
    try:
        yield
    finally:
        whole.bound_device_id = bound


@contextmanager
def _closed_by_errors(watchdog: Watchdog | None) -> Iterator[None]:
    """Close the watchdog where the block raises."""
    try:
        yield
    except BaseException as error:
        if watchdog is not None:
            watchdog.note_error(error)
            watchdog.close()
        raise


def _join(device: torch.device, timeout: timedelta) -> None:
    """Make the default group unless it exists or there is one rank.

    The group stays until the process ends. Other engines use it, and a new one would find the addresses that
    the old one left in the launcher's store.
    """
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise CommError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, so {', '.join(missing)} must be set too; "
            "start the ranks with `python -m zerotrain.runtime.launch` or torchrun"
        )
    bound: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timeout, pg_options=nccl_options(backend, timeout), **bound)
    atexit.register(_leave, dist.group.WORLD)


def _leave(made: Any) -> None:
    """Destroy the default group `made` by `_join`, at the end of the process.

    It stays if an engine is still open, as after an error: destroying it would wait for peers that hang in a
    collective.
    """
    if not _OPEN and dist.is_initialized() and dist.group.WORLD is made:
        dist.destroy_process_group()

"""A log of the operations that constructors run on the meta device, replayed for one tensor at a time.

Every operation is kept with the storages that it reads and writes. To give one tensor its values, the
operations that lead to it are found backwards and run on the host in their order, each random one with its
own seed. So a tensor's values depend only on the constructor and the seed: not on which other tensors are
replayed, nor on units, ranks, stage or device. The idea is torchdistX's deferred initialisation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only


class NoValues(ValueError):
    """A tensor was never given values by the constructor that made it."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorRef:
    """Reference to a tensor of the construction: its position inside a storage, which the reference keeps
    alive.

    It is not the tensor itself, because `torch.utils.swap_tensors` later needs the only reference to that.
    """

    storage: torch.UntypedStorage
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_conj: bool = False
    is_neg: bool = False
    """Mark of a lazy view: the storage holds the negative (with `is_conj`: the conjugate)."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorRef:
        return cls(
            tensor.untyped_storage(),
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    @property
    def key(self) -> int:
        """Identity of the storage."""
        return int(self.storage._cdata)


@dataclass(frozen=True, slots=True)
class _Operation:
    function: Any
    args: Any
    kwargs: Any
    outputs: tuple[TensorRef, ...]
    reads: tuple[int, ...]
    seed_index: int | None
    """Index of the operation among the random ones; None if it is not random."""
    gives_values: bool
    """Whether the operation writes values, which `torch.empty` does not."""
    state: torch.Tensor | None = None
    """State of the generator before the operation, in a log that keeps them."""


class ConstructionLog:
    """All operations inside one `init_context`."""

    def __init__(self, seed: int | None) -> None:
        """Make a log. A seed of None keeps the states of torch's generator instead, so that the values are
        those that the constructor gives without a log."""
        self.seed = seed
        self.has_common_seed = False
        """Whether the seed is known to be that of rank 0."""
        self._operations: list[_Operation] = []
        self._writers: dict[int, list[int]] = {}
        self._num_random = 0

    def record(
        self,
        function: Any,
        args: Any,
        kwargs: dict[str, Any],
        outputs: Any,
        state: torch.Tensor | None = None,
    ) -> None:
        """Record one operation. `outputs` are its results on the meta device."""
        args, kwargs = tree_map_only(torch.Tensor, _frozen, (args, kwargs))
        inputs = {leaf.key for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, TensorRef)}
        found = tuple(
            TensorRef.of(leaf) for leaf in tree_flatten(outputs)[0] if isinstance(leaf, torch.Tensor)
        )
        name = function.overloadpacket.__name__
        operation = _Operation(
            function=function,
            args=args,
            kwargs=kwargs,
            outputs=found,
            reads=tuple(inputs),
            seed_index=self._num_random if is_random(function) else None,
            gives_values=not name.startswith(("empty", "new_empty")),
            state=state,
        )
        self._num_random += is_random(function)
        mutated = {
            leaf.key
            for leaf in tree_flatten(list(written(function, args, kwargs)))[0]
            if isinstance(leaf, TensorRef)
        }
        for key in {output.key for output in found} - inputs | mutated:
            self._writers.setdefault(key, []).append(len(self._operations))
        self._operations.append(operation)

    @property
    def states(self) -> list[torch.Tensor]:
        """States of the generator before each random operation; empty in a log with a seed."""
        return [each.state for each in self._operations if each.state is not None]

    def knows(self, tensor: TensorRef) -> bool:
        """Return whether the tensor's memory was allocated in this construction."""
        return tensor.key in self._writers

    def has_values(self, tensor: TensorRef) -> bool:
        """Return whether any operation gave values to the tensor's memory."""
        writers = self._writers.get(tensor.key, ())
        return any(self._operations[index].gives_values for index in writers)

    def num_operations(self, tensor: TensorRef) -> int:
        """Return how many operations the tensor's values depend on."""
        return len(self._needed(tensor.key))

    @torch.no_grad()
    def materialise(self, tensor: torch.Tensor | TensorRef) -> torch.Tensor:
        """Compute the tensor's values from its construction, as a host tensor; nothing is kept.

        While it runs it takes the memory of the tensors that the values are computed from. Raises NoValues.
        """
        ref = tensor if isinstance(tensor, TensorRef) else TensorRef.of(tensor)
        memory: dict[int, torch.UntypedStorage] = {}
        for index in sorted(self._needed(ref.key)):
            self._replay(self._operations[index], memory)
        if ref.key not in memory:
            raise NoValues("no operation of the construction gave this tensor its values")
        return _view(ref, memory)

    def _needed(self, key: int) -> set[int]:
        """Return the indices of the operations that the final contents of a storage depend on."""
        found: set[int] = set()
        waiting: list[tuple[int, int]] = [(key, len(self._operations))]
        done: dict[int, int] = {}
        while waiting:
            storage, before = waiting.pop()
            if done.get(storage, -1) >= before:
                continue
            done[storage] = before
            for index in self._writers.get(storage, ()):
                if index < before and index not in found:
                    found.add(index)
                    waiting.extend((read, index) for read in self._operations[index].reads)
        return found

    def _replay(self, operation: _Operation, memory: dict[int, torch.UntypedStorage]) -> None:
        args, kwargs = tree_map_only(
            TensorRef, lambda ref: _view(ref, memory), (operation.args, operation.kwargs)
        )
        if operation.seed_index is None:
            results = operation.function(*args, **kwargs)
        else:
            results = self._with_seed(operation, args, kwargs)
        leaves = [leaf for leaf in tree_flatten(results)[0] if isinstance(leaf, torch.Tensor)]
        for ref, real in zip(operation.outputs, leaves, strict=True):
            if ref.key not in memory:
                memory[ref.key] = _storage_like(ref, real)

    def _with_seed(self, operation: _Operation, args: Any, kwargs: dict[str, Any]) -> Any:
        # Use the operation's own seed: a generator passed by the constructor would make the order matter.
        text = f"{self.seed} {operation.seed_index}".encode()
        generator = torch.default_generator
        before = generator.get_state()
        if operation.state is None:
            generator.manual_seed(int.from_bytes(sha256(text).digest()[:7], "little"))
        else:
            generator.set_state(operation.state)
        if "generator" in kwargs:
            kwargs = {**kwargs, "generator": None}
        try:
            return operation.function(*args, **kwargs)
        finally:
            generator.set_state(before)


def is_random(function: Any) -> bool:
    """Return whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in function.tags


def _frozen(tensor: torch.Tensor) -> Any:
    """Return a reference to a deferred tensor, or a copy of a real one (`torch.tensor([...])`), which may
    change."""
    return TensorRef.of(tensor) if tensor.is_meta else tensor.detach().clone()


def written(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield the arguments that an operation writes."""
    for index, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[index] if index < len(args) else kwargs.get(argument.name)


def _view(ref: TensorRef, memory: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    if ref.key not in memory:
        raise NoValues("a tensor that was made outside of init_context has no values")
    values = torch.empty(0, dtype=ref.dtype).set_(memory[ref.key], ref.offset, ref.size, ref.stride)
    values = values.conj() if ref.is_conj else values
    return torch._neg_view(values) if ref.is_neg else values


def _storage_like(ref: TensorRef, real: torch.Tensor) -> torch.UntypedStorage:
    """Return the storage of `real`, laid out like the deferred tensor."""
    if real.stride() == ref.stride and real.storage_offset() == ref.offset:
        return real.untyped_storage()
    storage = torch.UntypedStorage(ref.storage.nbytes())  # type: ignore[no-untyped-call]
    torch.empty(0, dtype=ref.dtype).set_(storage, ref.offset, ref.size, ref.stride).copy_(real)
    return storage

"""Initial values of a model, given to its units one by one: made by `setup`, read by `zero.unit`.

Models come in three kinds, which may be mixed: built normally (rank 0's values are used), built within
`init_context` (values are replayed), and with weights from files (each rank reads what it owns).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256

import torch
from torch import nn

from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.construct.buffers import BufferRules, take_buffers
from zerotrain.runtime.construct.context import (
    Origin,
    Replayed,
    bound_origins,
    forget,
    logs_of,
    replayed_origin,
)
from zerotrain.runtime.construct.log import NoValues
from zerotrain.runtime.construct.pending import (
    expression_of,
    forget_expression,
    is_pending,
    postpone,
    release,
    settle,
)
from zerotrain.runtime.zero.buffer import flat_zeros, return_free_memory
from zerotrain.runtime.zero.dtypes import TORCH_DTYPES
from zerotrain.runtime.zero.layout import LayoutError, UnitLayout
from zerotrain.runtime.zero.names import all_modules, joined, named_buffers, named_parameters
from zerotrain.runtime.zero.placeholder import nan_of
from zerotrain.runtime.zero.strided import converted

_NAMED = 5
_TRIM_BYTES = 1 << 22


def origins_of(model: nn.Module) -> dict[str, Origin]:
    """Return the origin of every parameter and buffer without values of its own, by name; tied ones by each
    name.

    Raises LayoutError naming parameters on the meta device that have no source of values.
    """
    bound, logs = bound_origins(model), logs_of(model)
    tensors: list[tuple[str, torch.Tensor]] = [*named_parameters(model, remove_duplicate=False)]
    tensors += named_buffers(model, remove_duplicate=False)
    by_tensor: dict[int, Origin] = {id(tensor): bound[name] for name, tensor in tensors if name in bound}
    found: dict[str, Origin] = {}
    lost: list[str] = []
    empty: list[str] = []
    for name, tensor in tensors:
        origin = by_tensor.get(id(tensor))
        if origin is None and is_pending(tensor):
            origin = expression_of(tensor)
        if origin is None and tensor.is_meta:
            try:
                origin = replayed_origin(model, name, tensor, logs)
            except NoValues:
                empty.append(name)
                continue
            if origin is None:
                lost.append(name)
                continue
            by_tensor[id(tensor)] = origin
        if origin is not None:
            found[name] = origin
    _refuse(lost, empty)
    return found


def _refuse(lost: Sequence[str], empty: Sequence[str]) -> None:
    def listed(names: Sequence[str]) -> str:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return ", ".join(repr(name) for name in names[:_NAMED]) + more

    if lost:
        raise LayoutError(
            f"{listed(lost)}: on the meta device, without values; build the whole model within "
            "zerotrain.runtime.init_context(...) (and change it only there), or give it weights with "
            "zerotrain.runtime.load_weights(model, folder)"
        )
    if empty:
        raise LayoutError(
            f"{listed(empty)}: made by torch.empty within init_context and never filled; initialise "
            "them in the constructor (torch.nn.init, reset_parameters), or load weights that hold them"
        )


class ModelValues:
    """Source of the units' values; it lives while `initialize` runs."""

    def __init__(
        self, comm: Comm, origins: Mapping[str, Origin], given_dtypes: Mapping[str, torch.dtype]
    ) -> None:
        self.given_dtypes = given_dtypes
        """Original dtypes of the buffers that were cast, by each name."""
        self._comm = comm
        self._origins = origins
        self._untrimmed = 0

    @torch.no_grad()
    def interval(
        self, layout: UnitLayout, parameters: Sequence[nn.Parameter], own: tuple[int, int], *, whole: bool
    ) -> torch.Tensor:
        """Return elements `own` of the unit, or all of them; trainable ones in fp32. Collective.

        `own` is this rank's shard. Takes the memory of the result and of one parameter.
        """
        dtype = torch.float32 if layout.trainable else TORCH_DTYPES[layout.dtype]
        start, stop = (0, layout.padded_numel) if whole else own
        flat = flat_zeros(stop - start, dtype=dtype, device=self._comm.device)
        is_local = True
        for segment, parameter in zip(layout.segments, parameters, strict=True):
            origin = self._origins.get(segment.fqn)
            low, high = own
            if origin is None:
                is_local = False
                values = self._of_rank_0(parameter, dtype, segment.fqn)
                low, high = start, stop
            low, high = max(low, segment.start), min(high, segment.stop)
            if low >= high:
                continue
            target = flat[low - start : high - start]
            if origin is None:
                target.copy_(values[low - segment.start : high - segment.start])
            else:
                origin.read(low - segment.start, target)
                self._trim(segment.numel * dtype.itemsize)
        if whole and not (is_local and self._comm.world_size == 1):
            self._comm.all_gather(flat, flat[own[0] : own[1]], label=layout.name).wait()
        return flat

    def _of_rank_0(self, parameter: nn.Parameter, dtype: torch.dtype, name: str) -> torch.Tensor:
        values = parameter.detach().to(device=self._comm.device, dtype=dtype).reshape(-1).contiguous()
        if values.data_ptr() == parameter.data_ptr() and self._comm.rank:
            values = values.clone()  # the model's own memory must stay as it is
        self._comm.broadcast(values, label=name)
        return values

    def _trim(self, num_bytes: int) -> None:
        # malloc keeps the memory of replayed parameters, which a rank that is short of memory needs now.
        self._untrimmed += num_bytes
        if self._untrimmed >= _TRIM_BYTES:
            self._untrimmed = 0
            return_free_memory()


def take_values(model: nn.Module, comm: Comm, rules: BufferRules) -> ModelValues:
    """Put the model's buffers on this rank's device, and deferred parameters there without memory.
    Collective, after `check_buffers`.

    Other parameters follow unit by unit (`zero/build.py`), because all together they may exceed a GPU's
    memory. Deferred buffers get their values; then all buffers get rank 0's values, in the dtypes of `rules`.
    Every parameter stays the same object. Raises LayoutError as `origins_of`.
    """
    _agree_on_pending(model, comm)
    origins = origins_of(model)
    _agree_on_seeds(model, comm)
    for name, parameter in named_parameters(model):
        if is_pending(parameter):
            release(parameter, comm.device)
        elif parameter.is_meta:
            swap(parameter, name, nan_of(parameter.dtype, comm.device).expand(parameter.shape))
        forget_expression(parameter)
    _fill_buffers(model, origins, comm.device)
    _move_buffers(model, comm.device)
    given = take_buffers(model, comm, rules)
    forget(model)
    return ModelValues(comm, origins, given)


def materialize(model: nn.Module, device: torch.device | str = "cpu") -> nn.Module:
    """Give a deferred model all its values on one device, in place and without an engine; return the model.

    For inference or inspection of models that fit into memory. Raises LayoutError as `initialize` does.
    """
    origins = origins_of(model)
    for name, parameter in named_parameters(model):
        origin = origins.get(name)
        if origin is None or is_pending(parameter):
            settle(parameter)
            continue
        values = torch.empty(parameter.shape, dtype=parameter.dtype)
        origin.read(0, values.view(-1))
        if parameter.is_meta:
            swap(parameter, name, values.to(device))
        else:
            parameter.data.copy_(values)
    _fill_buffers(model, origins, torch.device(device))
    forget(model)
    return model.to(device)


def _agree_on_seeds(model: nn.Module, comm: Comm) -> None:
    logs = {id(log): log for log in logs_of(model)}
    for parameter in model.parameters():
        expression = expression_of(parameter) if is_pending(parameter) else None
        if isinstance(expression, Replayed):
            logs[id(expression.log)] = expression.log
    for log in logs.values():
        if log.seed is not None:
            seed = torch.tensor([log.seed % (1 << 63)], dtype=torch.int64, device=comm.device)
            comm.broadcast(seed, label="seed")
            log.seed = int(seed)
        elif log.states:
            states = torch.stack(log.states).to(comm.device)
            comm.broadcast(states, label="states of the random generator")
            for own, common in zip(log.states, states.cpu(), strict=True):
                own.copy_(common)


def _agree_on_pending(model: nn.Module, comm: Comm) -> None:
    """Make a parameter pending on every rank if it is on rank 0, else on none: a script may have used or
    built it on one rank alone, and rank 0's values count."""
    parameters = [parameter for _, parameter in named_parameters(model)]
    own = [_construction(each) for each in parameters]
    digest = float(int(sha256(repr(own).encode()).hexdigest()[:13], 16))  # 52 bits, exact in float64
    rows = comm.gather_record([digest])
    if all(row == rows[0] for row in rows):
        return
    rows = comm.gather_record(own)
    for place, parameter in enumerate(parameters):
        first, *others = (row[place] for row in rows)
        if first and all(other in (0, first) for other in others):
            if not is_pending(parameter):
                postpone(parameter)
        elif is_pending(parameter):
            settle(parameter) if comm.rank == 0 else release(parameter, torch.device("cpu"))


def _construction(parameter: nn.Parameter) -> float:
    """Return 0 for values in memory, else a number that is the same on ranks with the same operations."""
    if not is_pending(parameter):
        return 0.0
    expression = expression_of(parameter)
    return 1.0 + (expression.num_operations if isinstance(expression, Replayed) else 0)


def swap(parameter: nn.Parameter, name: str, values: torch.Tensor) -> None:
    """Give a deferred parameter values; it stays the same object, with its attributes."""
    # `.data =` cannot leave the meta device, and parameter groups would not know a new object.
    try:
        holder = nn.Parameter(values, requires_grad=parameter.requires_grad)
        vars(holder).update(vars(parameter))
        torch.utils.swap_tensors(parameter, holder)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise LayoutError(
            f"{name!r} is deferred, and it has a hook or a weak reference ({error}); "
            "hand the model to zerotrain.runtime.initialize first"
        ) from error


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                # A buffer that several modules share stays one tensor.
                if id(buffer) not in moved:
                    moved[id(buffer)] = converted(buffer, buffer.dtype, device)
                module._buffers[name] = moved[id(buffer)]


@torch.no_grad()
def _fill_buffers(model: nn.Module, origins: Mapping[str, Origin], device: torch.device) -> None:
    filled: dict[int, torch.Tensor] = {}
    for prefix, module in all_modules(model):
        for name, buffer in module._buffers.items():
            origin = origins.get(joined(prefix, name))
            if buffer is None or origin is None:
                continue
            if id(buffer) not in filled:
                values = torch.empty(buffer.shape, dtype=buffer.dtype)
                origin.read(0, values.view(-1))
                filled[id(buffer)] = values.to(device)
            module._buffers[name] = filled[id(buffer)]

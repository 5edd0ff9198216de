"""Weights of an engine for other programs; `zerotrain.runtime.weights` does the work."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotrain.runtime.optim.optimizer import ZeroOptimizer
from zerotrain.runtime.zero.dtypes import TORCH_DTYPES
from zerotrain.runtime.zero.sharded_model import ShardedModel
from zerotrain.runtime.zero.state import MASTER

if TYPE_CHECKING:
    import torch

    from zerotrain.runtime.zero.layout import UnitLayout
    from zerotrain.runtime.zero.state import StateStream


class Exports:
    """State dicts, and folders that transformers and PEFT load."""

    def __init__(self, core: ShardedModel, optimizer: ZeroOptimizer, *, compute_dtype: str) -> None:
        self._core, self._comm, self._module = core, core.comm, core.model
        self._optimizer = optimizer
        self._compute_dtype = compute_dtype

    def module_state_dict(
        self, *, exclude_frozen_parameters: bool = False, keeps_values: bool = True
    ) -> dict[str, Any]:
        """Return the state dict, or its names and shapes; see `Engine.module_state_dict`. Collective."""
        from zerotrain.runtime.weights.adapters import warn_of_wrapped_adapters
        from zerotrain.runtime.weights.whole import whole_state

        self._core.check_open("module_state_dict()")
        self._core.check_idle("a whole state dict")
        self._core.meet_and_settle("module_state_dict")
        if not exclude_frozen_parameters:
            return whole_state(self._core, keeps_values=keeps_values)
        warn_of_wrapped_adapters(self._module)
        return whole_state(self._core, without=self._base_parameters(), keeps_values=keeps_values)

    def _base_parameters(self) -> set[int]:
        """Return the ids of parameters that are neither trained nor a part of an adapter."""
        from zerotrain.runtime.weights.adapters import adapter_parameters
        from zerotrain.runtime.weights.whole import frozen_parameters

        return frozen_parameters(self._module, but=adapter_parameters(self._module))

    def save_16bit_model(
        self,
        save_dir: Path | str,
        save_filename: str | None = None,
        exclude_frozen_parameters: bool = False,
        *,
        dtype: str | None = None,
        max_shard_size: int | str = "5GB",
    ) -> Path:
        """Write the weights as safetensors; see `Engine.save_16bit_model`. Collective."""
        from zerotrain.runtime.checkpoint.group import ranks_of
        from zerotrain.runtime.weights.export import ExportOptions, Source, export
        from zerotrain.runtime.weights.files import SINGLE
        from zerotrain.runtime.weights.plan import parse_size

        self._core.check_open("save_16bit_model()")
        folder = Path(save_dir).absolute()
        self._core.meet_and_settle("save_16bit_model")
        wanted = dtype or self._own_dtype()
        if wanted not in ("bf16", "fp16", "fp32"):
            raise ValueError(f'dtype must be "bf16", "fp16" or "fp32"; got {dtype!r}')
        if save_filename is not None and Path(save_filename).name != save_filename:
            raise ValueError(f"save_filename must be a file's name inside the folder; got {save_filename!r}")
        is_named = save_filename is not None and save_filename.endswith(".safetensors")
        options = ExportOptions(
            dtype=TORCH_DTYPES[wanted],
            max_bytes=parse_size(max_shard_size),
            single=save_filename if is_named and save_filename is not None else SINGLE,
            exclude_frozen=exclude_frozen_parameters,
            keeps_frozen=dtype is None,
        )
        source = Source(
            module=self._module,
            layout=self._core.layout,
            rank=self._comm.rank,
            stream_of=lambda unit: self._values_of(unit, options.dtype),
        )
        export(source, folder, options, ranks_of(self._comm))
        if exclude_frozen_parameters:
            self._save_adapters(folder, options.dtype)
        return folder

    def _save_adapters(self, directory: Path, dtype: torch.dtype) -> None:
        """Write the adapters, if it is a PEFT model."""
        from zerotrain.runtime.checkpoint.group import ranks_of
        from zerotrain.runtime.weights.adapters import adapted, save_adapters
        from zerotrain.runtime.weights.whole import whole_state

        model = adapted(self._module)
        if model is None:
            return
        state = whole_state(self._core, without=self._base_parameters(), dtype=dtype)
        save_adapters(model, state, directory, ranks_of(self._comm))

    def _own_dtype(self) -> str:
        """Return the compute precision; where nothing is trained, the precision of most weights."""
        units = self._core.layout.units
        numel: Counter[str] = Counter()
        for unit in units:
            if unit.dtype in ("bf16", "fp16", "fp32"):
                numel[unit.dtype] += unit.numel
        trains = any(unit.trainable for unit in units)
        return self._compute_dtype if trains or not numel else numel.most_common(1)[0][0]

    def _values_of(self, layout: UnitLayout, dtype: torch.dtype) -> StateStream:
        """Return this rank's interval: the weights of the computation, or their masters where the export has
        another dtype."""
        unit = next(unit for unit in self._core.units if unit.name == layout.name)
        states = self._optimizer.states.get(unit.name)
        if states is None or unit.dtype == dtype:
            return unit.weight_stream
        return states.stream(MASTER)

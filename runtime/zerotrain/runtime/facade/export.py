"""Weights for other programs, as methods of the engine; `zerotrain.runtime.weights` does the work."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotrain.runtime.facade.parts import EngineParts
from zerotrain.runtime.zero.dtypes import TORCH_DTYPES
from zerotrain.runtime.zero.state import MASTER

if TYPE_CHECKING:
    import torch

    from zerotrain.runtime.weights.export import Source
    from zerotrain.runtime.zero.layout import UnitLayout
    from zerotrain.runtime.zero.state import StateStream


class Exports(EngineParts):
    """State dicts, and folders that transformers and PEFT load."""

    def module_state_dict(self, *, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return the model's state dict as copies in host memory, on every rank, with the plain model's names
        (without the parts that torch.compile and checkpoint_wrapper add). Collective.

        Values are in the compute precision, and tied weights are one tensor under several names. Units are
        gathered one after the other. `get_full_fp32` reads masters, `save_16bit_model` writes files without
        holding the whole model.

        Args:
            exclude_frozen_parameters: leave out parameters that are not trained, and gather none of them;
                those of PEFT adapters are kept, trained or not, so that
                `model.save_pretrained(folder, state_dict=...)` has all of the adapter.

        Raises RuntimeError in forward and backward and after `close`, OutsideWrite, on every rank, when ranks
        wrote different values.
        """
        from zerotrain.runtime.weights.adapters import warn_of_wrapped_adapters
        from zerotrain.runtime.weights.whole import whole_state

        self.check_open("module_state_dict()")
        self.core.check_idle("a whole state dict")
        self.meet_and_settle("module_state_dict")
        if not exclude_frozen_parameters:
            return whole_state(self.core)
        warn_of_wrapped_adapters(self.module)
        return whole_state(self.core, without=self._base_parameters())

    def _base_parameters(self) -> set[int]:
        """Return the ids of parameters that are neither trained nor a part of an adapter."""
        from zerotrain.runtime.weights.adapters import adapter_parameters
        from zerotrain.runtime.weights.whole import frozen_parameters

        return frozen_parameters(self.module, but=adapter_parameters(self.module))

    def save_16bit_model(
        self,
        save_dir: Path | str,
        save_filename: str | None = None,
        exclude_frozen_parameters: bool = False,
        *,
        dtype: str | None = None,
        max_shard_size: int | str = "5GB",
    ) -> Path:
        """Write the weights as safetensors, with `config.json` where it is known; return the folder.
        Collective.

        Every rank writes the part that it owns, tile by tile: nothing is gathered, at any stage. Tied
        parameters are stored once. The new weights replace older ones in the folder atomically; other files
        are kept.

        Args:
            save_dir: folder, made if need be; all ranks must see it.
            save_filename: name of the file when there is one; only `*.safetensors` is used, since others
                (DeepSpeed's `pytorch_model.bin`) would be pickles.
            exclude_frozen_parameters: store only trained parameters; of a PEFT model also all adapters, as
                `PeftModel.from_pretrained` reads them: they are gathered for it, the base is not.
            dtype: "bf16", "fp16" or "fp32", of all floating-point parameters; None = the compute precision,
                and frozen ones as they are stored.
            max_shard_size: bytes of tensors in one file, as a number or a text such as "5GB".

        Raises ValueError for a wrong argument, CheckpointNoSpace or CheckpointNotWritable when the folder
        cannot be written, and OutsideWrite when ranks wrote different values, the same on every rank.
        """
        from zerotrain.runtime.checkpoint.group import ranks_of
        from zerotrain.runtime.weights.export import ExportOptions, export
        from zerotrain.runtime.weights.files import SINGLE
        from zerotrain.runtime.weights.plan import parse_size

        self.check_open("save_16bit_model()")
        folder = Path(save_dir).absolute()
        self.meet_and_settle("save_16bit_model")
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
        export(self._source(options.dtype), folder, options, ranks_of(self.comm))
        if exclude_frozen_parameters:
            self._save_adapters(folder, options.dtype)
        return folder

    def _source(self, dtype: torch.dtype) -> Source:
        """Return the source of an export in that precision."""
        from zerotrain.runtime.weights.export import Source

        return Source(
            module=self.module,
            layout=self.core.layout,
            rank=self.rank,
            stream_of=lambda unit: self._values_of(unit, dtype),
        )

    def _save_adapters(self, directory: Path, dtype: torch.dtype) -> None:
        """Write the adapters, if it is a PEFT model."""
        from zerotrain.runtime.checkpoint.group import ranks_of
        from zerotrain.runtime.weights.adapters import adapted, save_adapters
        from zerotrain.runtime.weights.whole import whole_state

        model = adapted(self.module)
        if model is None:
            return
        state = whole_state(self.core, without=self._base_parameters(), dtype=dtype)
        save_adapters(model, state, directory, ranks_of(self.comm))

    def _own_dtype(self) -> str:
        """Return the compute precision; where nothing is trained, the precision of most weights."""
        units = self.core.layout.units
        numel: Counter[str] = Counter()
        for unit in units:
            if unit.dtype in ("bf16", "fp16", "fp32"):
                numel[unit.dtype] += unit.numel
        trains = any(unit.trainable for unit in units)
        return self.config.precision.compute_dtype if trains or not numel else numel.most_common(1)[0][0]

    def _values_of(self, layout: UnitLayout, dtype: torch.dtype) -> StateStream:
        """Return this rank's interval: the weights of the computation, or their masters where the export has
        another dtype."""
        unit = next(unit for unit in self.core.units if unit.name == layout.name)
        states = self.zero_optimizer.states.get(unit.name)
        if states is None or unit.dtype == dtype:
            return unit.weight_stream
        return states.stream(MASTER)

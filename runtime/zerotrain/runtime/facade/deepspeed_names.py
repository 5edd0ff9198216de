"""Further names of DeepSpeed's engine that scripts and libraries call, and the error for names that do not
exist."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.utils.data import Dataset

from zerotrain.runtime.data.epochs import EpochLoader
from zerotrain.runtime.facade.instruments import Monitor, Timers
from zerotrain.runtime.facade.parts import EngineParts
from zerotrain.runtime.setup import build_loader

DOCUMENT = "docs/deepspeed.md"
TORCH_LOADER = (
    "leave it out for a shuffled loader of one process, or iterate over a torch.utils.data.DataLoader with a "
    "DistributedSampler(dataset, engine.world_size, engine.rank) and num_workers"
)
OWN_SCHEDULE = "leave it out: the schedule's step takes no arguments; set the groups' values between steps"
OWN_LOSS = "leave it out: the loss belongs to the caller; del loss frees it"


class DeepSpeedNames(EngineParts):
    """Names that belong neither to the configuration nor to the state."""

    @property
    def data_parallel_group(self) -> Any:
        """torch's process group of the data-parallel ranks; None for one rank that joined none."""
        return self.comm.group

    @cached_property
    def timers(self) -> Timers:
        """Stop watches for the script; the engine's own times are in `last_step.seconds`."""
        return Timers()

    @cached_property
    def monitor(self) -> Monitor:
        """A monitor that is off."""
        return Monitor()

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        *,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> EpochLoader:
        """Return a loader of micro-batches as `initialize(training_data=...)` makes it; `batch_size` None =
        the micro batch size.

        `pin_memory` changes nothing. Raises ValueError for another `route` than "train", a sampler or
        workers: a DataLoader of torch has those.
        """
        refuse_unless_default("deepspeed_io()", "route", route, "train", TORCH_LOADER)
        refuse_unless_default("deepspeed_io()", "data_sampler", data_sampler, None, TORCH_LOADER)
        refuse_unless_default(
            "deepspeed_io()", "num_local_io_workers", num_local_io_workers or None, None, TORCH_LOADER
        )
        batch = self.config.batch
        size = batch.micro_batch_size if batch_size is None else batch_size
        config = replace(self.config, batch=replace(batch, micro_batch_size=size))
        loader = build_loader(dataset, config, self.comm, collate_fn)
        assert loader is not None  # a data set always yields a loader
        loader.steps_taken = lambda: self.step_calls  # a new iteration after a step begins a new epoch
        return loader

    def save_fp16_model(self, save_dir: Path | str, save_filename: str | None = None) -> Path:
        """Call `save_16bit_model`, whose older name this is."""
        save = self.save_16bit_model  # type: ignore[attr-defined]  # Engine has it
        folder: Path = save(save_dir, save_filename)
        return folder

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Return `module_state_dict` on rank 0, None elsewhere. Collective."""
        gather = self.module_state_dict  # type: ignore[attr-defined]  # Engine has it
        state: dict[str, torch.Tensor] = gather(exclude_frozen_parameters=exclude_frozen_parameters)
        return state if self.rank == 0 else None

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise for copies and pickles: the engine holds process groups and memory that ranks share."""
        raise TypeError(
            "an engine must not be copied or pickled, as it holds process groups and memory of all ranks; "
            "call save_checkpoint, or copy what module_state_dict() returns"
        )

    def compile(self, *_: Any, **__: Any) -> NoReturn:
        """Raise: the model's hooks are in place, and torch.compile cannot trace them."""
        raise RuntimeError(
            "engine.compile() is not possible: initialize() has put hooks into the model that torch.compile "
            "cannot trace; call torch.compile, or compile() of the model or its blocks, before initialize()"
        )


def refuse_unless_default(call: str, argument: str, value: object, default: object, way_out: str) -> None:
    """Raise ValueError where an argument of DeepSpeed has another value than the one that this engine can
    have."""
    if value != default:
        raise ValueError(
            f"{argument} of {call} must be {default!r}; got {value!r}: {way_out}. See {DOCUMENT}"
        )


def unknown_attribute(engine: object, name: str) -> AttributeError:
    """Return the error for a name that neither the engine nor its model has."""
    text = f"neither the engine nor its model has an attribute {name!r}"
    if name.startswith("_"):
        return AttributeError(text)
    near = difflib.get_close_matches(name, [each for each in dir(engine) if each[0] != "_"], n=1)
    nearest = f"; the nearest of the engine's is {near[0]!r}" if near else ""
    return AttributeError(f"{text}{nearest}. {DOCUMENT} lists the engine's names")

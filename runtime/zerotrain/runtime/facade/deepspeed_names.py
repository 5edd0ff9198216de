"""DeepSpeed's names of an engine, so that scripts and libraries written for it run unchanged.

docs/deepspeed.md has the table; a test compares it with these classes. `configured` makes the accessors of
configured values; anything that needs more than a look-up is a method.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from zerotrain.runtime.compiling.check import check_compilation
from zerotrain.runtime.data.epochs import EpochLoader
from zerotrain.runtime.facade.arguments import TORCH_LOADER, refuse_unless_default
from zerotrain.runtime.facade.export import Exports
from zerotrain.runtime.facade.instruments import Throughput, Timers
from zerotrain.runtime.facade.state import EngineState
from zerotrain.runtime.optim.optimizer import ZeroOptimizer
from zerotrain.runtime.setup import build_loader, compile_units, read_config
from zerotrain.runtime.step import StepPipeline
from zerotrain.runtime.trackers.monitor import Monitor
from zerotrain.runtime.zero.sharded_model import ShardedModel

Getter = Callable[[Any], Any]


def reads(path: str, doc: str) -> Getter:
    """Return a method without arguments that returns the attribute at a dotted path of the engine."""
    read = attrgetter(path)

    def get(self: Any) -> Any:
        return read(self)

    get.__doc__ = doc
    return get


def configured(path: str, doc: str) -> Getter:
    """Return a method without arguments that returns a value of the resolved configuration."""
    return reads(f"_state.config.{path}", doc)


def from_stage(stage: int, doc: str) -> Getter:
    """Return a method without arguments that returns whether the ZeRO stage is at least `stage`."""

    def get(self: DeepSpeedNames) -> bool:
        return self._state.config.zero.stage >= stage

    get.__doc__ = doc
    return get


class DeepSpeedNames:
    """Names of DeepSpeed's engine that this one does not need itself; `Engine.__getattr__` finds them."""

    def __init__(
        self,
        state: EngineState,
        core: ShardedModel,
        *,
        optimizer: ZeroOptimizer,
        pipeline: StepPipeline,
        exports: Exports,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> None:
        """`collate_fn` is the argument of `initialize`."""
        self._state, self._core = state, core
        self._optimizer, self._pipeline, self._exports = optimizer, pipeline, exports
        self._collate_fn = collate_fn

    train_batch_size = configured("batch.train_batch_size", "Samples of one step over all ranks.")
    train_micro_batch_size_per_gpu = configured(
        "batch.micro_batch_size", "Samples of one forward pass on one rank."
    )
    gradient_accumulation_steps = configured(
        "batch.gradient_accumulation_steps", "Forward and backward passes per step."
    )
    gradient_clipping = configured("gradient_clipping", "Largest norm of the gradient; 0.0 = off.")
    steps_per_print = configured("steps_per_print", "Steps between log lines; None = none.")
    wall_clock_breakdown = configured("wall_clock_breakdown", "Whether phase times are logged.")
    memory_breakdown = configured("memory_breakdown", "Whether memory by phase is logged.")
    dataloader_drop_last = configured("dataloader_drop_last", "Whether the loader drops a part batch.")
    zero_allow_untested_optimizer = configured("zero_allow_untested_optimizer", "As configured.")
    zero_optimization_stage = configured("zero.stage", "0 to 3.")
    zero_contiguous_gradients = configured("zero.contiguous_gradients", "As configured.")
    zero_reduce_scatter = configured("zero.reduce_scatter", "As configured.")
    zero_reduce_bucket_size = configured("zero.reduce_bucket_size", "Elements, as configured.")
    zero_allgather_partitions = configured("zero.allgather_partitions", "As configured.")
    zero_allgather_bucket_size = configured("zero.allgather_bucket_size", "Elements, as configured.")
    zero_overlap_comm = configured("zero.overlap_comm", "Whether reduction overlaps with backward.")
    zero_offload_optimizer = configured("zero.offload_optimizer", "The block, or None.")
    zero_offload_param = configured("zero.offload_param", "The block, or None.")
    zero_sub_group_size = configured("zero.sub_group_size", "Elements, as configured.")
    zero_prefetch_bucket_size = configured("zero.prefetch_bucket_size", "Elements gathered ahead of use.")
    zero_param_persistence_threshold = configured(
        "zero.param_persistence_threshold", "Units with fewer elements stay whole."
    )
    zero_model_persistence_threshold = configured(
        "zero.model_persistence_threshold", "Cap on all units that stay whole, elements."
    )
    zero_max_live_parameters = configured("zero.max_live_parameters", "Elements gathered at once.")
    zero_max_reuse_distance = configured("zero.max_reuse_distance", "Elements, as configured.")
    zero_module_granularity_threshold = configured(
        "zero.module_granularity_threshold", "Elements, as configured."
    )
    zero_gather_16bit_weights_on_model_save = configured(
        "zero.gather_16bit_weights_on_model_save", "As configured."
    )
    zero_ignore_unused_parameters = configured("zero.ignore_unused_parameters", "As configured.")
    zero_round_robin_gradients = configured("zero.round_robin_gradients", "As configured.")
    zero_hpz_partition_size = configured("zero.zero_hpz_partition_size", "Ranks of a secondary group.")
    zero_quantized_weights = configured("zero.zero_quantized_weights", "Whether gathers are int8.")
    zero_quantized_gradients = configured("zero.zero_quantized_gradients", "Whether reductions are int4.")
    loss_scale = reads(
        "_pipeline.scaler.scale", "The factor on the loss as it is now; 1 unless fp16 computes."
    )
    dynamic_loss_scale = reads("_pipeline.scaler.is_dynamic", "Whether the loss scale follows overflows.")

    zero_optimization = from_stage(1, "Return whether anything is sharded.")
    zero_optimization_partition_gradients = from_stage(2, "Return whether gradients are sharded.")
    zero_optimization_partition_weights = from_stage(3, "Return whether parameters are sharded.")

    def fp16_enabled(self) -> bool:
        """Return whether the model computes in fp16."""
        return self._state.config.precision.compute_dtype == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Return whether the model computes in bf16."""
        return self._state.config.precision.compute_dtype == "bf16"

    def optimizer_name(self) -> str | None:
        """Return the type of the optimizer that runs: the caller's, else the configured one; None where
        neither names any."""
        return None if self._optimizer.is_default else self._optimizer.configured.type

    def optimizer_params(self) -> dict[str, Any] | None:
        """Return the configured optimizer's resolved parameters."""
        found = self._state.config.optimizer
        if found is None:
            return None
        known = ("lr", "betas", "eps", "weight_decay", "momentum")
        return {**{name: getattr(found, name) for name in known}, **found.params}

    def scheduler_name(self) -> str | None:
        """Return the configured schedule's type."""
        return self._state.config.scheduler.type if self._state.config.scheduler else None

    def scheduler_params(self) -> Mapping[str, Any] | None:
        """Return the configured schedule's resolved parameters."""
        return self._state.config.scheduler.params if self._state.config.scheduler else None

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return (train batch, micro batch per rank, accumulation steps)."""
        batch = self._state.config.batch
        return batch.train_batch_size, batch.micro_batch_size, batch.gradient_accumulation_steps

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's gradient before clipping; None before the first step."""
        return self._state.last_step.grad_norm if self._state.last_step else None

    def was_step_applied(self) -> bool:
        """Return whether the last `step()` changed the weights."""
        last = self._state.last_step
        return self._state.is_at_boundary and last is not None and not last.skipped

    def get_lr(self) -> list[float]:
        """Return the learning rate of every parameter group; empty where nothing is trained."""
        return [float(group["lr"]) for group in self._optimizer.param_groups] if self._core.gradients else []

    def get_mom(self) -> list[Any]:
        """Return momentum (SGD, RMSprop) or betas of every parameter group; empty without training."""
        key = "momentum" if self.optimizer_name() in ("SGD", "RMSprop") else "betas"
        return [group[key] for group in self._optimizer.param_groups] if self._core.gradients else []

    def get_data_parallel_rank(self) -> int:
        """Return this rank's number among the data-parallel ranks."""
        return self._core.comm.rank

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Do nothing: `backward` and `step` reduce. It exists for scripts that call it between them."""

    def empty_partition_cache(self) -> None:
        """Do nothing: gathered weights are freed when a pass ends."""

    global_rank = property(reads("_core.comm.rank", "This rank."))
    dp_world_size = property(reads("_core.comm.world_size", "Data-parallel ranks."))

    @property
    def data_parallel_group(self) -> Any:
        """torch's process group of the data-parallel ranks; None for one rank that joined none."""
        return self._core.comm.group

    @cached_property
    def timers(self) -> Timers:
        """Stop watches for the script; the engine's own times are in `last_step.seconds`."""
        return Timers()

    @cached_property
    def tput_timer(self) -> Throughput:
        """Count of epochs; `steps_per_print` and the monitor report samples per second."""
        return Throughput()

    @property
    def monitor(self) -> Monitor:
        """Trackers of the configuration; `write_events` of rank 0 adds a script's own numbers."""
        return self._state.monitor

    @property
    def local_rank(self) -> int:
        """Number of this rank on its host, from the launcher's environment."""
        return int(os.environ.get("LOCAL_RANK", "0"))

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
        the micro batch size, `collate_fn` None = that of `initialize`.

        `pin_memory` changes nothing. Raises ValueError for another `route` than "train", a sampler or
        workers: a DataLoader of torch has those.
        """
        refuse_unless_default("deepspeed_io()", "route", route, "train", TORCH_LOADER)
        refuse_unless_default("deepspeed_io()", "data_sampler", data_sampler, None, TORCH_LOADER)
        refuse_unless_default(
            "deepspeed_io()", "num_local_io_workers", num_local_io_workers or None, None, TORCH_LOADER
        )
        batch = self._state.config.batch
        size = batch.micro_batch_size if batch_size is None else batch_size
        config = replace(self._state.config, batch=replace(batch, micro_batch_size=size))
        loader = build_loader(dataset, config, self._core.comm, collate_fn or self._collate_fn)
        assert loader is not None  # a data set always yields a loader
        loader.steps_taken = lambda: self._state.step_calls  # a new iteration after a step begins a new epoch
        return loader

    def save_fp16_model(self, save_dir: Path | str, save_filename: str | None = None) -> Path:
        """Call `save_16bit_model`, whose older name this is."""
        return self._exports.save_16bit_model(save_dir, save_filename)

    def compile(
        self,
        backend: str = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: object = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the forward of each unit's module from now on, as `compile` of the configuration does.

        `compile_kwargs` are further arguments of torch.compile. Does nothing where units are compiled already
        and with `disable`. Raises ConfigError for what `compile` of the configuration refuses, ValueError for
        a schedule of DeepCompile and for compiled autograd.
        """
        way_out = "leave it out, and each unit's forward is compiled"
        refuse_unless_default("compile()", "schedule", schedule, None, way_out)
        refuse_unless_default(
            "compile()", "compiled_autograd_enabled", compiled_autograd_enabled, False, way_out
        )
        block = {"enabled": True, "backend": backend, **(compile_kwargs or {})}
        if self.is_compiled or block.pop("disable", False):
            return
        config = read_config({"train_micro_batch_size_per_gpu": 1, "compile": block}, world_size=1)
        check_compilation(self._core.model, config.compile, self._core.comm.device)
        compile_units(self._core, config.compile)

    @property
    def is_compiled(self) -> bool:
        """Whether units are compiled."""
        return bool(self._core.compiled)


def public_names(kind: type) -> list[str]:
    """Return the names that a class offers to others."""
    return [name for name in vars(kind) if not name.startswith("_")]

"""DeepSpeed's names for values of an engine, so that scripts written for it run unchanged.

docs/deepspeed.md has the table; a test compares it with these classes. `reads` makes the accessors of
configured values; anything that needs more than a look-up is a method.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from zerotrain.runtime.facade.deepspeed_names import unknown_attribute
from zerotrain.runtime.facade.parts import EngineParts
from zerotrain.runtime.optim.schedule import Schedule, is_constant

Getter = Callable[[Any], Any]


def reads(path: str, doc: str) -> Getter:
    """Return a method without arguments that returns the attribute at a dotted path of the engine."""
    read = attrgetter(path)

    def get(self: Any) -> Any:
        return read(self)

    get.__doc__ = doc
    return get


class ConfigNames(EngineParts):
    """Values of the resolved configuration, each as a method."""

    train_batch_size = reads("config.batch.train_batch_size", "Samples of one step over all ranks.")
    train_micro_batch_size_per_gpu = reads(
        "config.batch.micro_batch_size", "Samples of one forward pass on one rank."
    )
    gradient_accumulation_steps = reads(
        "config.batch.gradient_accumulation_steps", "Forward and backward passes per step."
    )
    gradient_clipping = reads("config.gradient_clipping", "Largest norm of the gradient; 0.0 = off.")
    steps_per_print = reads("config.steps_per_print", "Steps between log lines; None = none.")
    wall_clock_breakdown = reads("config.wall_clock_breakdown", "Whether phase times are logged.")
    memory_breakdown = reads("config.memory_breakdown", "Whether memory by phase is logged.")
    dataloader_drop_last = reads("config.dataloader_drop_last", "Whether the loader drops a part batch.")
    zero_allow_untested_optimizer = reads("config.zero_allow_untested_optimizer", "As configured.")
    zero_optimization_stage = reads("config.zero.stage", "0 to 3.")
    zero_contiguous_gradients = reads("config.zero.contiguous_gradients", "As configured.")
    zero_reduce_scatter = reads("config.zero.reduce_scatter", "As configured.")
    zero_reduce_bucket_size = reads("config.zero.reduce_bucket_size", "Elements, as configured.")
    zero_allgather_partitions = reads("config.zero.allgather_partitions", "As configured.")
    zero_allgather_bucket_size = reads("config.zero.allgather_bucket_size", "Elements, as configured.")
    zero_overlap_comm = reads("config.zero.overlap_comm", "Whether reduction overlaps with backward.")
    zero_offload_optimizer = reads("config.zero.offload_optimizer", "The block, or None.")
    zero_offload_param = reads("config.zero.offload_param", "The block, or None.")
    zero_sub_group_size = reads("config.zero.sub_group_size", "Elements, as configured.")
    zero_prefetch_bucket_size = reads("config.zero.prefetch_bucket_size", "Elements gathered ahead of use.")
    zero_param_persistence_threshold = reads(
        "config.zero.param_persistence_threshold", "Units with fewer elements stay whole."
    )
    zero_model_persistence_threshold = reads(
        "config.zero.model_persistence_threshold", "Cap on all units that stay whole, elements."
    )
    zero_max_live_parameters = reads("config.zero.max_live_parameters", "Elements gathered at once.")
    zero_max_reuse_distance = reads("config.zero.max_reuse_distance", "Elements, as configured.")
    zero_module_granularity_threshold = reads(
        "config.zero.module_granularity_threshold", "Elements, as configured."
    )
    zero_gather_16bit_weights_on_model_save = reads(
        "config.zero.gather_16bit_weights_on_model_save", "As configured."
    )
    zero_ignore_unused_parameters = reads("config.zero.ignore_unused_parameters", "As configured.")
    zero_round_robin_gradients = reads("config.zero.round_robin_gradients", "As configured.")
    zero_hpz_partition_size = reads("config.zero.zero_hpz_partition_size", "Ranks of a secondary group.")
    zero_quantized_weights = reads("config.zero.zero_quantized_weights", "Whether gathers are int8.")
    zero_quantized_gradients = reads("config.zero.zero_quantized_gradients", "Whether reductions are int4.")
    loss_scale = reads(
        "pipeline.scaler.scale", "The factor on the loss as it is now; 1 unless fp16 computes."
    )
    dynamic_loss_scale = reads("pipeline.scaler.is_dynamic", "Whether the loss scale follows overflows.")

    def zero_optimization(self) -> bool:
        """Return whether anything is sharded."""
        return self.config.zero.stage > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Return whether gradients are sharded."""
        return self.config.zero.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Return whether parameters are sharded."""
        return self.config.zero.stage >= 3

    def fp16_enabled(self) -> bool:
        """Return whether the model computes in fp16."""
        return self.config.precision.compute_dtype == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Return whether the model computes in bf16."""
        return self.config.precision.compute_dtype == "bf16"

    def optimizer_name(self) -> str | None:
        """Return the configured optimizer's type; None when the configuration names none."""
        return self.config.optimizer.type if self.config.optimizer else None

    def optimizer_params(self) -> dict[str, Any] | None:
        """Return the configured optimizer's resolved parameters."""
        found = self.config.optimizer
        if found is None:
            return None
        known = ("lr", "betas", "eps", "weight_decay", "momentum")
        return {**{name: getattr(found, name) for name in known}, **found.params}

    def scheduler_name(self) -> str | None:
        """Return the configured schedule's type."""
        return self.config.scheduler.type if self.config.scheduler else None

    def scheduler_params(self) -> Mapping[str, Any] | None:
        """Return the configured schedule's resolved parameters."""
        return self.config.scheduler.params if self.config.scheduler else None

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return (train batch, micro batch per rank, accumulation steps)."""
        batch = self.config.batch
        return batch.train_batch_size, batch.micro_batch_size, batch.gradient_accumulation_steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples of a step by changing the accumulation steps, from the next step on.

        Raises ValueError unless it is a multiple of micro batch size times ranks, RuntimeError between the
        micro-batches of a step.
        """
        one_pass = self.config.batch.micro_batch_size * self.world_size
        if train_batch_size < one_pass or train_batch_size % one_pass:
            raise ValueError(
                f"train_batch_size must be a multiple of {one_pass} (micro batch "
                f"{self.config.batch.micro_batch_size} times {self.world_size} ranks); got {train_batch_size}"
            )
        self._set_batch(accumulation=train_batch_size // one_pass, micro=self.config.batch.micro_batch_size)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Declare another number of samples per forward pass; the accumulation steps stay.

        A loader that `initialize` made keeps its size. Raises ValueError below 1, RuntimeError between the
        micro-batches of a step.
        """
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size must be at least 1; got {micro_batch_size}")
        self._set_batch(accumulation=self.config.batch.gradient_accumulation_steps, micro=micro_batch_size)

    def _set_batch(self, *, accumulation: int, micro: int) -> None:
        steps = self.config.batch.gradient_accumulation_steps
        if self.micro_steps % steps or self.core.has_gradients:
            raise RuntimeError(
                "the batch size cannot change between the micro-batches of a step; change it after step() "
                "returned at_boundary"
            )
        batch = replace(
            self.config.batch,
            gradient_accumulation_steps=accumulation,
            micro_batch_size=micro,
            train_batch_size=micro * accumulation * self.world_size,
        )
        self.config = replace(self.config, batch=batch)
        self.micro_steps = self.global_steps * accumulation  # boundaries are counted in micro-batches


class StateNames(EngineParts):
    """State that changes during training, and the model's own attributes."""

    global_samples = property(
        reads("_global_samples", "Samples of all steps of this process so far, over all ranks.")
    )
    global_rank = property(reads("rank", "This rank."))
    dp_world_size = property(reads("world_size", "Data-parallel ranks."))

    @property
    def local_rank(self) -> int:
        """Number of this rank on its host, from the launcher's environment."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def scheduler(self) -> Schedule | None:
        """The scheduler that `initialize` returned: None where neither configuration nor caller named one."""
        return None if is_constant(self.schedule) else self.schedule

    @property
    def lr_scheduler(self) -> Schedule | None:
        """The same as `scheduler`."""
        return self.scheduler

    if not TYPE_CHECKING:  # a type checker would accept every attribute

        def __getattr__(self, name: str) -> Any:
            """Return the model's attribute, where the engine has none of that name."""
            module = self.__dict__.get("module")
            if module is not None and not name.startswith("_") and hasattr(module, name):
                return getattr(module, name)
            raise unknown_attribute(self, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass, as a call of the engine does."""
        return self(*args, **kwargs)  # type: ignore[operator]  # Engine is callable

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's gradient before clipping; None before the first step."""
        return self.last_step.grad_norm if self.last_step else None

    def was_step_applied(self) -> bool:
        """Return whether the last `step()` changed the weights."""
        last = self.last_step
        ended = self.micro_steps % self.config.batch.gradient_accumulation_steps == 0
        return ended and last is not None and not last.skipped

    def get_lr(self) -> list[float]:
        """Return the learning rate of every parameter group; empty where nothing is trained."""
        return [float(group["lr"]) for group in self._groups]

    def get_mom(self) -> list[Any]:
        """Return momentum (SGD) or betas of every parameter group; empty where nothing is trained."""
        key = "momentum" if self.optimizer_name() == "SGD" else "betas"  # type: ignore[attr-defined]
        return [group[key] for group in self._groups]

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.zero_optimizer.param_groups if self.core.gradients else []

    def get_data_parallel_rank(self) -> int:
        """Return this rank's number among the data-parallel ranks."""
        return self.rank

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Do nothing: `backward` and `step` reduce. It exists for scripts that call it between them."""

    def destroy(self) -> None:
        """Close the engine, as `close` does."""
        self.close()  # type: ignore[attr-defined]  # Engine has it

"""The last step of resolving: the frozen configuration from the draft's values."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from .draft import ConfigDraft
from .encoding import BF16_MASTERS, BF16_STATES, REMAINDERS
from .schema import (
    ActivationCheckpointingConfig,
    AioConfig,
    BatchConfig,
    CheckpointConfig,
    CompileConfig,
    Dtype,
    EngineConfig,
    Fp8Config,
    KeyReport,
    LeafModuleConfig,
    OffloadConfig,
    OptimizerConfig,
    PrecisionConfig,
    SchedulerConfig,
    SpillConfig,
    ZeroConfig,
)
from .table.trackers import TRACKERS

_Z = "zero_optimization"
_ACTIVATIONS = "activation_checkpointing"
_TOP_LEVEL = (
    "gradient_clipping",
    "managed_gradient_accumulation",
    "zero_allow_untested_optimizer",
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dataloader_drop_last",
    "uneven_inputs",
    "peak_tflops",
)
_OPTIMIZER_FIELDS = ("lr", "betas", "eps", "weight_decay", "bias_correction", "momentum")
_NATIVE = ("DeepSpeedCPUAdam", "CPUAdam")
_COUPLED_DECAY = ("SGD", "MuSGD", "Adagrad")
"""Optimizers whose weight decay is added to the gradient."""


def build(draft: ConfigDraft, report: tuple[KeyReport, ...], written: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration, with notices and refusals in the order in which they were found.

    `written` is the user's JSON object.
    """
    leaf_module = _values(draft, f"{_Z}.leaf_module", LeafModuleConfig)
    spill = _values(draft, f"{_Z}.spill", SpillConfig)
    zero = ZeroConfig(
        **_values(draft, _Z, ZeroConfig),
        offload_optimizer=_offload(draft, "offload_optimizer"),
        offload_param=_offload(draft, "offload_param"),
        leaf_module=LeafModuleConfig(**{name: tuple(value or ()) for name, value in leaf_module.items()}),
        spill=SpillConfig(**{**spill, "paths": tuple(spill["paths"] or ())}),
    )
    return EngineConfig(
        world_size=draft.world_size,
        batch=BatchConfig(
            train_batch_size=draft.value("train_batch_size"),
            micro_batch_size=draft.value("train_micro_batch_size_per_gpu"),
            gradient_accumulation_steps=draft.value("gradient_accumulation_steps"),
        ),
        zero=zero,
        precision=_precision(draft),
        fp8=_fp8(draft),
        compile=_compile(draft),
        optimizer=_optimizer(draft),
        scheduler=_scheduler(draft),
        activation_checkpointing=ActivationCheckpointingConfig(
            configured=_ACTIVATIONS in draft.flat.present,
            **_values(draft, _ACTIVATIONS, ActivationCheckpointingConfig),
        ),
        checkpoint=CheckpointConfig(asynchronous=draft.value("checkpoint.writer.decoupled")),
        aio=AioConfig(**_values(draft, "aio", AioConfig)),
        **{name: draft.value(name) for name in _TOP_LEVEL},
        trackers={name: _tracker(draft, name) for name in TRACKERS if draft.value(f"{name}.enabled")},
        notices=tuple(dict.fromkeys(draft.notices)),
        unsupported=tuple(dict.fromkeys(draft.unsupported)),
        report=report,
        source=_without_auto(written, draft),
    )


def _values(draft: ConfigDraft, block: str, cls: type) -> dict[str, Any]:
    """Return the values of the fields of `cls` that are keys of the block, by their names."""
    paths = {item.name: f"{block}.{item.name}" for item in fields(cls)}
    return {name: draft.value(path) for name, path in paths.items() if path in draft.keys}


def _tracker(draft: ConfigDraft, block: str) -> dict[str, Any]:
    """Return the settings of a tracker, without its switch."""
    prefix = f"{block}."
    own = [path for path in draft.keys if path.startswith(prefix) and path != f"{block}.enabled"]
    paths = [path for path in own if not draft.keys[path].is_secret]
    return {path.removeprefix(prefix): draft.value(path) for path in paths}


def _without_auto(written: Mapping[str, Any], draft: ConfigDraft) -> dict[str, Any]:
    """Return a copy of the user's object in which computed values replace each "auto"."""
    source: dict[str, Any] = copy.deepcopy(dict(written))
    for path, given in draft.flat.given.items():
        if isinstance(given.value, str) and given.value.casefold() == "auto" and path in draft.settled:
            *blocks, name = given.written.split(".")
            block = source
            for part in blocks:
                block = block[part]
            block[name] = draft.settled[path].value
    return source


def _offload(draft: ConfigDraft, block: str) -> OffloadConfig | None:
    if not draft.is_on(f"{_Z}.{block}.device"):
        return None
    return OffloadConfig(**_values(draft, f"{_Z}.{block}", OffloadConfig))


def _fp8(draft: ConfigDraft) -> Fp8Config:
    values = _values(draft, "fp8", Fp8Config)
    return Fp8Config(**{**values, "exclude": tuple(values["exclude"])})


def _compile(draft: ConfigDraft) -> CompileConfig:
    values = _values(draft, "compile", CompileConfig)
    return CompileConfig(**{**values, "options": values["options"] or None})


def _precision(draft: ConfigDraft) -> PrecisionConfig:
    compute: Dtype = "fp32"
    if draft.value("bf16.enabled"):
        compute = "bf16"
    elif draft.value("fp16.enabled"):
        compute = "fp16"
    bf16_masters = compute == "bf16" and bool(draft.value(BF16_MASTERS))
    return PrecisionConfig(
        compute_dtype=compute,
        grad_accum_dtype="bf16" if bf16_masters else draft.value("data_types.grad_accum_dtype"),
        reduce_dtype=draft.value("communication_data_type"),
        gradient_reduce_op=draft.value("gradient_allreduce_op"),
        store_param_remainders=compute == "bf16" and bool(draft.value(REMAINDERS)),
        bf16_masters=bf16_masters,
        bf16_states=bf16_masters and bool(draft.value(BF16_STATES)),
        check_grad_overflow=draft.value("bf16.check_grad_overflow"),
        **_values(draft, "fp16", PrecisionConfig),
        cast_inputs=compute != "fp32" and bool(draft.value(f"{compute}.auto_cast")),
        autocast_dtype=draft.value("torch_autocast.dtype") if draft.value("torch_autocast.enabled") else None,
        buffer_dtype=draft.value("data_types.buffer_dtype"),
        keep_in_fp32_modules=tuple(draft.value("data_types.keep_in_fp32_modules") or ()),
        gradient_predivision=_predivision(draft),
    )


def _predivision(draft: ConfigDraft) -> float:
    """Return the divisor that is applied to gradients before they are summed over the ranks."""
    if draft.value("prescale_gradients"):
        return float(draft.world_size)
    return float(draft.value("gradient_predivide_factor"))


def _params(draft: ConfigDraft, block: str) -> dict[str, Any]:
    """Return the settled parameters of an optimizer or scheduler by their short names."""
    prefix = f"{block}.params."
    return {
        path.removeprefix(prefix): settled.value
        for path, settled in draft.settled.items()
        if path.startswith(prefix)
    }


def _given_params(draft: ConfigDraft) -> dict[str, Any]:
    """Return only the parameters in the file, for an optimizer whose parameters the table does not know."""
    known = _params(draft, "optimizer")
    given = {name: known[name] for name in known if draft.given(f"optimizer.params.{name}")}
    return given | draft.flat.unknown_params["optimizer.params"]


def _optimizer(draft: ConfigDraft) -> OptimizerConfig | None:
    kind = draft.value("optimizer.type")
    if kind is None:
        return None
    if draft.keys["optimizer.type"].choice(kind) is None:
        given = _given_params(draft)
        return OptimizerConfig(type=kind, lr=given.get("lr", 1e-3), is_untested=True, params=given)
    params = _params(draft, "optimizer")
    known = {name: params.pop(name) for name in _OPTIMIZER_FIELDS if name in params}
    if "betas" in known:
        known["betas"] = tuple(known["betas"])
    decoupled = kind not in _COUPLED_DECAY and (kind != "Adam" or params["adam_w_mode"])
    return OptimizerConfig(
        type=kind,
        decoupled_weight_decay=decoupled,
        native=draft.flat.given["optimizer.type"].value in _NATIVE and not params.get("torch_adam"),
        params=params,
        **known,
    )


def _scheduler(draft: ConfigDraft) -> SchedulerConfig | None:
    kind = draft.value("scheduler.type")
    return None if kind is None else SchedulerConfig(type=kind, params=_params(draft, "scheduler"))

"""The planner's view of a job: workload, limits and rates, and the changes that it may propose.

A proposal ends in no refusal: the API's own rules and admission judge the spec with its changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from zerotrain.contract.config import ConfigError, EngineConfig
from zerotrain.contract.config.edit import edited
from zerotrain.contract.planner import (
    Accelerator,
    Adapters,
    Edits,
    Limit,
    ModelShape,
    Rates,
    Reader,
    ShapeError,
    Terms,
    Tier,
    Workload,
    accelerator,
    gpt_shape,
    guessed_shape,
    rates_of,
)
from zerotrain.contract.planner.changes import MAX_WORKER_FACTOR
from zerotrain.contract.presets import PRESETS
from zerotrain.contract.train_spec import GptSpec
from zerotrain.operator.constants import MAX_WORKERS

from .configuration import engine_config, resolved_at
from .finetune import Lora, Method
from .quantity import Quantity
from .spec import ZeroTrainingJobSpec
from .storage import Encryption, Nvme
from .validation import refusals, spill_limit

LABEL_PRODUCT = "nvidia.com/gpu.product"
LABEL_MEMORY = "nvidia.com/gpu.memory"
"""Labels of NVIDIA's GPU feature discovery; the second one is in MiB."""


def workload_of(
    spec: ZeroTrainingJobSpec,
    *,
    workers: int | None = None,
    base_workers: int | None = None,
    shape: ModelShape | None = None,
    device: Accelerator | None = None,
) -> Workload:
    """Return the planner's view of a job. `shape` and `device` replace what the spec says of model and GPU.

    Raises ShapeError when the model or the configuration cannot be read from the spec.
    """
    count = workers or spec.workers
    try:
        if base_workers is not None:
            config: EngineConfig | None = resolved_at(spec, base_workers, count)
        else:
            config = engine_config(spec, world_size=count * spec.num_ranks_per_worker)
    except ConfigError as error:
        raise ShapeError(f"the configuration does not resolve for {count} workers: {error}") from error
    if config is None:
        raise ShapeError(_by_reference(spec))
    known = _trained(spec, shape if shape is not None else shape_of(spec))
    asked, volume = config.zero.spill.encryption, spec.nvme.encryption if spec.nvme is not None else None
    return Workload(
        shape=known,
        config=config,
        ranks_per_worker=spec.num_ranks_per_worker,
        on_host=spec.num_gpus == 0,
        is_encrypted="None" not in (asked, None if volume is None else Encryption(volume).value),
        limits=limits_of(spec, spill_bytes=config.zero.spill.max_bytes, device=device),
    )


def _trained(spec: ZeroTrainingJobSpec, shape: ModelShape) -> ModelShape:
    """Return the shape with the adapters of a fine-tuning, which are then all that is trained."""
    asked = spec.finetune
    if asked is None or asked.method is not Method.LORA:
        return shape
    lora = asked.lora or Lora()
    return replace(shape, adapters=Adapters(rank=lora.rank, targets=lora.targets))


def _by_reference(spec: ZeroTrainingJobSpec) -> str:
    name = spec.config_from.config_map_key_ref.name if spec.config_from is not None else "?"
    return (
        f"the configuration is in ConfigMap {name} (spec.configFrom), which only the workers read. "
        "`zerotrain plan JOB.YAML` plans it: from the ConfigMap in the same file, or with --config FILE"
    )


def shape_of(spec: ZeroTrainingJobSpec) -> ModelShape:
    """Return the model's sizes, as far as the spec has them. Raises ShapeError."""
    model = spec.model
    if spec.finetune is not None:
        if spec.finetune.parameters is None:
            raise ShapeError(
                f"only the workers see {spec.finetune.model}; give its size as spec.finetune.parameters"
            )
        return guessed_shape(spec.finetune.parameters, context=spec.finetune.max_length)
    if model is None:
        raise ShapeError("the program is the user's own and spec.model is not given")
    if model.gpt is not None:
        return gpt_shape(GptSpec(**model.gpt.model_dump()), source="spec.model.gpt")
    if model.preset is not None:
        if model.preset not in PRESETS:
            raise ShapeError(f"spec.model.preset {model.preset!r} is unknown")
        return gpt_shape(PRESETS[model.preset], source=f"preset {model.preset}")
    if model.parameters is not None:
        return guessed_shape(model.parameters, context=model.factory.context if model.factory else None)
    where = f"only the workers see {model.path}" if model.path else "a factory's model is not built here"
    raise ShapeError(f"{where}; give its size as spec.model.parameters")


def limits_of(
    spec: ZeroTrainingJobSpec, *, spill_bytes: int | None = None, device: Accelerator | None = None
) -> dict[Tier, Limit]:
    """Return the memory limits: of one GPU for the GPU, of one worker for all other kinds of memory."""
    limits: dict[Tier, Limit] = {}
    resources, nvme = spec.resources, spec.nvme
    if spec.num_gpus:
        found = _device_limit(spec, device)
        limits |= {Tier.GPU: found} if found is not None else {}
    if resources is not None and resources.memory is not None:
        limits[Tier.HOST] = Limit(num_bytes=resources.memory.num_bytes, source="spec.resources.memory")
    if resources is not None and resources.pinned_memory is not None:
        limits[Tier.PINNED] = Limit(
            num_bytes=resources.pinned_memory.num_bytes, source="spec.resources.pinnedMemory"
        )
    if nvme is not None:
        limits[Tier.NVME] = Limit(num_bytes=nvme.size.num_bytes, source="spec.nvme.size")
        allowed = None if spill_bytes is None else spill_limit(spill_bytes, spec.num_ranks_per_worker)
        if allowed is not None and allowed.num_bytes < nvme.size.num_bytes:
            limits[Tier.NVME] = allowed
    return limits


def _device_limit(spec: ZeroTrainingJobSpec, device: Accelerator | None) -> Limit | None:
    """Return the limit of one GPU: from the caller, else the spec, else the labels of the nodes that the spec
    asks for."""
    if device is not None:
        return Limit(num_bytes=device.memory_bytes, source=device.name)
    gpus = spec.resources.gpus if spec.resources is not None else None
    if gpus is not None and gpus.memory is not None:
        return Limit(num_bytes=gpus.memory.num_bytes, source="spec.resources.gpus.memory")
    return _by_labels((spec.scheduling.node_selector if spec.scheduling else None) or {})


def _by_labels(labels: Mapping[str, str]) -> Limit | None:
    where = "spec.scheduling.nodeSelector"
    memory, product = labels.get(LABEL_MEMORY, ""), labels.get(LABEL_PRODUCT)
    if memory.isascii() and memory.isdigit() and 0 < int(memory) < 1 << 40:
        return Limit(num_bytes=int(memory) << 20, source=f"{where}[{LABEL_MEMORY}]")
    known = accelerator(product) if product else None
    return None if known is None else Limit(num_bytes=known.memory_bytes, source=f"{known.name}, {where}")


def sheet_rates(spec: ZeroTrainingJobSpec, workload: Workload, device: Accelerator | None = None) -> Rates:
    """Return rates by the data sheet of `device`, else of the GPU that the spec names; no rates on CPUs."""
    found = (device or device_of(spec)) if spec.num_gpus else None
    return rates_of(found, workload.config.precision.product_dtype)


def device_of(spec: ZeroTrainingJobSpec) -> Accelerator | None:
    """Return the GPU that the labels of the requested nodes name, for its speed."""
    labels = (spec.scheduling.node_selector if spec.scheduling else None) or {}
    product = labels.get(LABEL_PRODUCT)
    return accelerator(product) if product else None


_ROOMY = Nvme(size=Quantity("1Ei"))
"""Stand-in for the volume that the user must add for a proposal that spills."""


def most_workers(spec: ZeroTrainingJobSpec, workers: int) -> int:
    """Return the largest number of workers, up to 16 times `workers`, that the API's rules allow; else
    `workers` itself."""
    factor = MAX_WORKER_FACTOR
    while factor > 1:
        if _is_valid(spec.model_copy(update={"workers": workers * factor})):
            return workers * factor
        factor //= 2
    return workers


def terms_of(spec: ZeroTrainingJobSpec, workload: Workload, *, base_workers: int | None, most: int) -> Terms:
    """Return the terms of a proposal for this job. `base_workers`: for an elastic job, the size whose global
    batch it keeps. `most`: maximum number of workers."""
    config, base_ranks = workload.config, None
    if base_workers is not None:
        base_ranks = base_workers * spec.num_ranks_per_worker
        # The configuration as in the file, not as rendered for the size of an attempt.
        config = engine_config(spec, world_size=base_ranks) or config
    return Terms.of(
        config,
        base_ranks=base_ranks,
        has_volume=spec.nvme is not None,
        most_workers=most,
        reader=_reader(spec, workload, base_workers),
    )


def _reader(spec: ZeroTrainingJobSpec, workload: Workload, base: int | None) -> Reader:
    def read(edits: Edits, workers: int) -> Workload | None:
        try:
            changed = spec.model_copy(update={"config": edited(spec.config or {}, edits), "workers": workers})
            if spec.nvme is None and "nvme" in edits.values():
                changed = changed.model_copy(update={"nvme": _ROOMY})
            config = _admitted(changed, workload, base)
        except ConfigError:
            return None
        return None if config is None else _on(workload, spec, config)

    return read


def _admitted(changed: ZeroTrainingJobSpec, workload: Workload, base: int | None) -> EngineConfig | None:
    """Return the configuration that the ranks would run; None if the job would be refused. Raises
    ConfigError."""
    if changed.workers != workload.workers and not _is_valid(changed):
        return None
    if base is None:
        return None if refusals(changed) else engine_config(changed)
    # Admission judges an elastic job by the size whose batch it keeps, which is spec.workers until it starts.
    sizes = {base, changed.workers} if workload.workers == base else {base}
    if any(refusals(changed.model_copy(update={"workers": size})) for size in sizes):
        return None
    config = resolved_at(changed, base, changed.workers)
    return None if config.unsupported else config


def _is_valid(spec: ZeroTrainingJobSpec) -> bool:
    """Return whether the API server would accept the number of workers."""
    rules = [rule.holds for rule in spec.RULES if rule.holds is not None]
    return spec.workers <= MAX_WORKERS and all(holds(spec) for holds in rules)


def _on(workload: Workload, spec: ZeroTrainingJobSpec, config: EngineConfig) -> Workload:
    """Return the workload with another configuration. A volume that is yet to be added is as large as the
    spill may get."""
    limits, most = dict(workload.limits), config.zero.spill.max_bytes
    if spec.nvme is None and most is not None:
        limits[Tier.NVME] = spill_limit(most, spec.num_ranks_per_worker)
    return replace(workload, config=config, limits=limits)

"""Rules between keys, and values that follow from other keys. `resolve.py` calls `RULES` in their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .batch import ACCUMULATION, MICRO, TRAIN, resolve_batch
from .draft import ConfigDraft
from .encoding import (
    BF16_MASTERS,
    BF16_STATES,
    REMAINDERS,
    can_offload,
    can_split_master,
    can_update_bf16,
    highest_stage,
)
from .errors import ConfigError
from .groups import can_group

Z = "zero_optimization"


def batch(draft: ConfigDraft) -> None:
    """Derive the missing batch sizes; any two of the three give the third."""
    sizes = resolve_batch(
        train=draft.value(TRAIN),
        micro=draft.value(MICRO),
        accumulation=draft.value(ACCUMULATION),
        world_size=draft.world_size,
    )
    if not draft.given(TRAIN) and not draft.given(MICRO):
        draft.notice(MICRO, "No batch size is given: 1 sample per rank (DeepSpeed refuses such a file).")
    for path, size in (
        (TRAIN, sizes.train_batch_size),
        (MICRO, sizes.micro_batch_size),
        (ACCUMULATION, sizes.gradient_accumulation_steps),
    ):
        if not draft.given(path):
            draft.derive(path, size)


def overlap(draft: ConfigDraft) -> None:
    """Enable overlap at stage 3 unless the file sets it."""
    if draft.value(f"{Z}.overlap_comm") is None:
        draft.derive(f"{Z}.overlap_comm", draft.value(f"{Z}.stage") == 3)


def precision(draft: ConfigDraft) -> None:
    """Check that one compute dtype is chosen. Gradients are reduced in fp32 unless the file names a dtype."""
    if draft.value("bf16.enabled") and draft.value("fp16.enabled"):
        raise draft.error(
            "fp16.enabled", "must not be on together with bf16", "Keep one of the two, best bf16."
        )
    for block in ("bf16", "fp16"):
        if draft.value("torch_autocast.enabled") and draft.value(f"{block}.enabled"):
            raise draft.error(
                "torch_autocast.enabled",
                f"must not be on together with {block}, which casts the parameters themselves",
                "Keep one of the two.",
            )
    if draft.value("communication_data_type") is None:
        draft.derive("communication_data_type", "fp32")


def secondary(draft: ConfigDraft) -> None:
    """Check that all hpZ groups have the same size, for the given number of ranks."""
    path = f"{Z}.zero_hpz_partition_size"
    size, ranks = draft.value(path), draft.world_size
    if not can_group(stage=draft.value(f"{Z}.stage"), world_size=ranks, group_size=size):
        way_out = "Set it to the number of ranks of a node, or to 1 for none."
        raise draft.error(path, f"must divide the {ranks} ranks of the job", way_out)


def offload(draft: ConfigDraft) -> None:
    """Drop offload of unsharded parameters, and refuse that of states whose update is not element-wise."""
    stage = draft.value(f"{Z}.stage")
    path = f"{Z}.offload_param.device"
    if draft.is_on(path) and stage < 3:
        draft.drop(path, f"No effect at stage {stage}, as in DeepSpeed: parameters are offloaded at stage 3.")
    path = f"{Z}.offload_optimizer.device"
    kind = draft.value("optimizer.type")
    if draft.is_on(path) and not can_offload(kind):
        draft.refuse_to_run(
            path,
            f"{kind} needs whole parameters or all ranks for its update, which offloaded states have not.",
            'Set offload_optimizer.device to "none", or optimizer.type to "AdamW".',
        )


def spill(draft: ConfigDraft) -> None:
    """Check that the spill has one list of folders, and add notices if there is no spill."""
    given = [
        draft.value(f"{Z}.{block}.nvme_path")
        for block in ("offload_optimizer", "offload_param")
        if draft.value(f"{Z}.{block}.device") == "nvme" and draft.value(f"{Z}.{block}.nvme_path")
    ]
    paths = f"{Z}.spill.paths"
    folders = draft.value(paths) or []
    if draft.given(paths) and (not folders or len(set(folders)) < len(folders)):
        raise draft.error(paths, "must name at least one folder, and each once", "Name one folder per drive.")
    if folders and any(path not in folders for path in given):
        rule = f"must hold nvme_path, which is {given[0]!r}"
        raise draft.error(paths, rule, "Remove nvme_path, or name that folder in spill.paths too.")
    if len(set(given)) > 1:
        draft.notice(
            f"{Z}.offload_param.nvme_path",
            "States and parameters share one spill, which is striped over both folders.",
        )
    devices = [draft.value(f"{Z}.{block}.device") for block in ("offload_optimizer", "offload_param")]
    if "nvme" in devices:
        return
    for name in ("encryption", "max_bytes", "paths"):
        if draft.given(f"{Z}.spill.{name}"):
            draft.notice(f"{Z}.spill.{name}", 'No effect: nothing is offloaded to "nvme".')


def bf16_masters(draft: ConfigDraft) -> None:
    """Check what bf16 masters, gradients and states exclude. States in bf16 need masters in bf16."""
    if not draft.value("bf16.enabled"):
        return
    if not draft.value(BF16_MASTERS):
        if draft.value(BF16_STATES):
            raise draft.error(
                BF16_STATES,
                f"needs {BF16_MASTERS}: states in bf16 beside fp32 masters are not kept",
                f"Set {BF16_MASTERS} to true too, or remove the key.",
            )
        return
    given = draft.flat.given.get("data_types.grad_accum_dtype")
    if given is not None and str(given.value).casefold() not in ("auto", "bf16", "bfloat16"):
        raise ConfigError(
            given.written,
            f"must be bf16 with {BF16_MASTERS}, which sums gradients in bf16",
            given.value,
            f"Remove it, or {BF16_MASTERS}.",
        )
    if draft.value(REMAINDERS):
        raise draft.error(
            REMAINDERS,
            f"must be false with {BF16_MASTERS}: a bf16 master has no lower half",
            "Remove one of the two; with remainders alone, masters are fp32.",
        )
    kind = draft.value("optimizer.type")
    if not can_update_bf16(kind):
        draft.refuse_to_run(
            BF16_MASTERS,
            f"{kind} needs fp32 masters, gradients and states.",
            f'Remove {BF16_MASTERS} and {BF16_STATES}, or set optimizer.type to "AdamW".',
        )


def fp8(draft: ConfigDraft) -> None:
    """Check that FP8 products have bf16 operands."""
    if draft.value("fp8.enabled") and not draft.value("bf16.enabled"):
        raise draft.error(
            "fp8.enabled",
            "needs bf16.enabled, as products in FP8 take bf16 weights and activations",
            "Set bf16.enabled to true, or remove the fp8 block.",
        )


def compilation(draft: ConfigDraft) -> None:
    """Check that the options of a backend stand alone and capture no CUDA graphs."""
    options = draft.value("compile.options")
    if not draft.value("compile.enabled") or not options:
        return
    if draft.value("compile.mode") != "default":
        raise draft.error(
            "compile.options",
            "cannot be combined with compile.mode, which stands for options of its own",
            "Remove one of the two.",
        )
    if options.get("triton.cudagraphs"):
        raise draft.error(
            "compile.options",
            "must not set triton.cudagraphs: CUDA graphs read weights at fixed addresses, and gathered "
            "weights have others at each use",
            "Remove that option.",
        )


def remainders(draft: ConfigDraft) -> None:
    """Derive or check master weights in two halves, which need bf16 and a native update."""
    kind = draft.value("optimizer.type")
    params = {name: draft.value(f"optimizer.params.{name}") for name in ("amsgrad", "torch_adam")}
    is_possible = draft.value("bf16.enabled") and can_split_master(kind, params)
    is_possible = is_possible and not draft.value(BF16_MASTERS)
    if draft.value(REMAINDERS) is None:
        draft.derive(REMAINDERS, is_possible and draft.is_on(f"{Z}.offload_optimizer.device"))
    elif draft.value(REMAINDERS) and draft.value("bf16.enabled") and not is_possible:
        raise draft.error(
            REMAINDERS,
            f"needs a native update, which {_described(kind, params)} has not",
            f"Set it to false, or optimizer.type to AdamW without {' and '.join(params)}.",
        )
    elif draft.value(REMAINDERS) and not draft.value("bf16.enabled"):
        raise draft.error(
            REMAINDERS,
            "needs bf16.enabled, as only a bf16 weight is the upper half of its fp32 master",
            "Enable bf16, or remove the key.",
        )


def _described(kind: str | None, params: Mapping[str, Any]) -> str:
    asked = [name for name, value in params.items() if value]
    return f"{kind} with {' and '.join(asked)}" if asked else str(kind)


def optimizer(draft: ConfigDraft) -> None:
    """Check that betas are two numbers below 1, and that AdamW decouples its weight decay."""
    betas = "optimizer.params.betas"
    values = draft.value(betas)
    if len(values) != 2 or max(values) >= 1.0:
        raise draft.error(
            betas, "must be two numbers of at least 0 and below 1", "Write for example [0.9, 0.999]."
        )
    if draft.value("optimizer.type") == "OneBitAdam":
        _one_bit(draft)
    coefficients = "optimizer.params.ns_coefficients"
    if len(draft.value(coefficients)) != 3:
        raise draft.error(
            coefficients, "must be three numbers", "Write for example [3.4445, -4.775, 2.0315]."
        )
    mode = "optimizer.params.adam_w_mode"
    if draft.value("optimizer.type") == "AdamW" and draft.value(mode) is False:
        draft.notice(mode, 'AdamW always decouples weight decay; set optimizer.type to "Adam" for L2.')


def _one_bit(draft: ConfigDraft) -> None:
    """Check OneBitAdam's requirements.

    Each rank compresses a momentum of its own, so it needs unreduced gradients.
    """
    stage = f"{Z}.stage"
    if draft.value(stage) > highest_stage("OneBitAdam"):
        draft.refuse_to_run(
            stage,
            "OneBitAdam needs each rank's own whole gradient, which stages 2 and 3 reduce at once.",
            f'Set {stage} to 1, or optimizer.type to "AdamW".',
        )
    if draft.value("gradient_allreduce_op") == "sum":
        draft.refuse_to_run(
            "gradient_allreduce_op",
            "OneBitAdam averages the ranks' momenta.",
            'Set gradient_allreduce_op to "mean".',
        )
    if draft.value("gradient_clipping"):
        draft.notice(
            "gradient_clipping",
            "OneBitAdam clips until freeze_step; after it nobody has the averaged gradient.",
        )


def scheduler(draft: ConfigDraft) -> None:
    """Check the schedule.

    A schedule with an end needs its number of steps. The warm-up must lie before the end, and it rises to the
    optimizer's rate.
    """
    highest = "scheduler.params.warmup_max_lr"
    if (
        highest in draft.settled
        and draft.value(highest) is None
        and draft.value("optimizer.type") is not None
    ):
        draft.derive(highest, draft.value("optimizer.params.lr"))
    for path in ("scheduler.params.cycle_min_lr", "scheduler.params.cycle_max_lr"):
        if path in draft.settled and draft.value(path) is None:
            raise draft.error(path, "must be given for OneCycle", "Write the rate, for example 1e-4.")
    total, warmup = "scheduler.params.total_num_steps", "scheduler.params.warmup_num_steps"
    if total not in draft.settled:
        return
    steps = draft.value(total)
    if steps is None:
        reason = f"{draft.value('scheduler.type')} ends at {total}, which neither the file nor the job gives."
        draft.refuse_to_run(total, reason, f"Set {total} to the number of optimizer steps.")
    elif steps < draft.value(warmup):
        message = f"The training ends at step {steps}, within the warm-up of {draft.value(warmup)} steps."
        draft.notice(total, message)


RULES: tuple[Callable[[ConfigDraft], None], ...] = (
    batch,
    overlap,
    precision,
    secondary,
    offload,
    spill,
    bf16_masters,
    fp8,
    compilation,
    remainders,
    optimizer,
    scheduler,
)

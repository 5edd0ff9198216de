"""Rows of the table: `zero_optimization` without its offload blocks."""

from __future__ import annotations

import sys

from zerotrain.contract.config.keys import Choice, Key, KeyKind, Status

_Z = "zero_optimization"
_NO_COPY = "A unit's gathered buffer is its weights: nothing is copied into buckets."


def _accepted(name: str, kind: KeyKind, default: object, note: str, effect: str, **more: object) -> Key:
    return Key(
        path=f"{_Z}.{name}",
        kind=kind,
        default=default,
        status=Status.ACCEPTED,
        note=note,
        effect=effect,
        **more,  # type: ignore[arg-type]
    )


STAGE: tuple[Key, ...] = (
    Key(
        path=f"{_Z}.stage",
        kind=KeyKind.INT,
        default=0,
        effect="What is sharded over the ranks.",
        choices=(
            Choice(value=0, note="Nothing is sharded."),
            Choice(value=1, note="Optimizer states are sharded."),
            Choice(value=2, note="Optimizer states and gradients are sharded."),
            Choice(value=3, note="Optimizer states, gradients and parameters are sharded."),
        ),
    ),
    _accepted(
        "contiguous_gradients",
        KeyKind.BOOL,
        True,
        "Gradients always live in one buffer per unit.",
        "Gradients live in one buffer per unit; always so here.",
    ),
    _accepted(
        "reduce_scatter",
        KeyKind.BOOL,
        True,
        "Sharded gradients are always reduced by reduce-scatter.",
        "Reduce sharded gradients by reduce-scatter; always so here.",
    ),
    Key(
        path=f"{_Z}.reduce_bucket_size",
        kind=KeyKind.INT,
        default=500_000_000,
        minimum=0,
        auto="reduce_bucket_size",
        effect="With overlap_comm: elements of finished units that may be on the wire while backward goes "
        "on; at least one unit, at most as many as the largest unit has.",
    ),
    _accepted(
        "use_multi_rank_bucket_allreduce",
        KeyKind.BOOL,
        True,
        _NO_COPY,
        "DeepSpeed: merge the buckets of several ranks.",
    ),
    _accepted(
        "allgather_partitions",
        KeyKind.BOOL,
        True,
        "Updated parameters are gathered by all-gather.",
        "Gather updated parameters by all-gather; always so here.",
    ),
    Key(
        path=f"{_Z}.allgather_bucket_size",
        kind=KeyKind.INT,
        default=500_000_000,
        minimum=0,
        effect="Stages 1 and 2: elements of updated units that are gathered at once, where a step waits for "
        "them (on CPUs without overlap_comm, or with shared memory); at least one unit.",
    ),
    Key(
        path=f"{_Z}.overlap_comm",
        kind=KeyKind.BOOL,
        default=None,
        effect="Reduce gradients while backward goes on (stages 0 and 1: in the last micro-batch of a step); "
        "on CPUs also: end steps of stages 1 and 2 while updated weights are gathered, as on GPUs always; "
        "absent = true at stage 3, false below.",
    ),
    _accepted(
        "load_from_fp32_weights",
        KeyKind.BOOL,
        True,
        "Master weights always come from the checkpoint's fp32.",
        "Restore master weights from fp32; always so here.",
    ),
    _accepted(
        "elastic_checkpoint",
        KeyKind.BOOL,
        False,
        "Every checkpoint loads with any number of ranks.",
        "DeepSpeed: an older form of that.",
    ),
    _accepted(
        "sub_group_size",
        KeyKind.INT,
        1_000_000_000,
        "The step updates one unit's shard at a time.",
        "DeepSpeed, stage 3: elements updated at once.",
        minimum=0,
    ),
)

STAGE3: tuple[Key, ...] = (
    Key(
        path=f"{_Z}.prefetch_bucket_size",
        kind=KeyKind.INT,
        default=50_000_000,
        minimum=0,
        aliases=("stage3_prefetch_bucket_size",),
        auto="prefetch_bucket_size",
        effect="Stage 3: elements gathered ahead of use, in the order of the step before: whole units, at "
        "least one; 0 = none.",
    ),
    Key(
        path=f"{_Z}.param_persistence_threshold",
        kind=KeyKind.INT,
        default=100_000,
        minimum=0,
        aliases=("stage3_param_persistence_threshold",),
        auto="param_persistence_threshold",
        effect="Stage 3: parameters with at most this many elements stay whole on every rank; their "
        "gradients and optimizer states are sharded.",
    ),
    Key(
        path=f"{_Z}.model_persistence_threshold",
        kind=KeyKind.INT,
        default=sys.maxsize,
        minimum=0,
        aliases=("stage3_model_persistence_threshold",),
        effect="Stage 3: cap on the elements of all parameters that are kept whole, in the model's order.",
    ),
    Key(
        path=f"{_Z}.max_live_parameters",
        kind=KeyKind.INT,
        default=1_000_000_000,
        minimum=0,
        aliases=("stage3_max_live_parameters",),
        effect="Stage 3: elements gathered at once; above it nothing is gathered ahead or kept for backward.",
    ),
    Key(
        path=f"{_Z}.max_reuse_distance",
        kind=KeyKind.INT,
        default=1_000_000_000,
        minimum=0,
        aliases=("stage3_max_reuse_distance",),
        effect="Stage 3: a unit stays whole from forward to backward if the units in between, counted twice, "
        "have at most this many elements (0 = none does).",
    ),
    Key(
        path=f"{_Z}.gather_16bit_weights_on_model_save",
        kind=KeyKind.BOOL,
        default=False,
        aliases=("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"),
        status=Status.ACCEPTED,
        note="save_16bit_model always works: every rank writes its own part, nothing is gathered.",
        effect="DeepSpeed, stage 3: let save_16bit_model gather the weights.",
    ),
    Key(
        path=f"{_Z}.module_granularity_threshold",
        kind=KeyKind.INT,
        default=0,
        minimum=0,
        aliases=("stage3_module_granularity_threshold",),
        effect="Modules with fewer elements are not units of their own; 0 = 1024, and on a GPU small modules "
        "outside of lists share a unit.",
    ),
    Key(
        path=f"{_Z}.use_all_reduce_for_fetch_params",
        kind=KeyKind.BOOL,
        default=False,
        aliases=("stage3_use_all_reduce_for_fetch_params",),
        status=Status.ACCEPTED,
        note=_NO_COPY,
        effect="DeepSpeed, stage 3: fetch by all-reduce.",
    ),
    Key(
        path=f"{_Z}.allgather_sequential",
        kind=KeyKind.BOOL,
        default=False,
        aliases=("stage3_allgather_sequential",),
        status=Status.ACCEPTED,
        note=_NO_COPY,
        effect="DeepSpeed, stage 3: gather without bucket copies.",
    ),
    Key(
        path=f"{_Z}.partition_stream_chunk_size",
        kind=KeyKind.INT,
        default=0,
        minimum=0,
        aliases=("stage3_partition_stream_chunk_size",),
        status=Status.ACCEPTED,
        note="Parameters are sharded as their unit is laid out.",
        effect="DeepSpeed, stage 3: shard huge parameters in chunks.",
    ),
)

REST: tuple[Key, ...] = (
    _accepted(
        "ignore_unused_parameters",
        KeyKind.BOOL,
        True,
        "Parameters without a gradient are always allowed; their gradient counts as zero.",
        "Allow parameters without a gradient; always so here.",
    ),
    _accepted(
        "compute_grad_norm",
        KeyKind.BOOL,
        True,
        "The norm comes with the test for finite gradients, in one pass, and is always computed.",
        "DeepSpeed, stages 1 and 2: compute the norm where nothing is clipped.",
    ),
    _accepted(
        "parameter_alignment",
        KeyKind.BOOL,
        False,
        "Parameters always start on 16 bytes within their unit.",
        "DeepSpeed, stages 1 and 2: align parameters to 16 bytes.",
    ),
    _accepted("legacy_stage1", KeyKind.BOOL, False, "There is one stage 1.", "No effect."),
    _accepted(
        "round_robin_gradients",
        KeyKind.BOOL,
        False,
        "Every rank owns an equal part of every unit already.",
        "DeepSpeed: spread copies to the host over the ranks.",
    ),
    Key(
        path=f"{_Z}.zero_hpz_partition_size",
        kind=KeyKind.INT,
        default=1,
        minimum=0,
        off=(0,),
        note="Neighbouring ranks (a node) keep a second copy of the shards from the first gather of a step "
        "to the update, so that later gathers stay among them; the same bits. Must divide the number of "
        "ranks; no effect below stage 3.",
        effect="ZeRO++ hpZ: ranks of a secondary shard group.",
    ),
    Key(
        path=f"{_Z}.zero_quantized_weights",
        kind=KeyKind.BOOL,
        default=False,
        note="Blocks of 256 elements, an fp32 scale each. Masters, checkpoints and exports stay exact. No "
        "effect below stage 3.",
        effect="ZeRO++ qwZ: gather parameters as int8.",
    ),
    Key(
        path=f"{_Z}.zero_quantized_nontrainable_weights",
        kind=KeyKind.BOOL,
        default=False,
        status=Status.NOT_RUN,
        note="Frozen parameters are stored in compute precision; zero_quantized_weights gathers them as "
        "int8.",
        way_out="Set zero_quantized_nontrainable_weights to false.",
        effect="Store frozen parameters as int8.",
    ),
    Key(
        path=f"{_Z}.zero_quantized_gradients",
        kind=KeyKind.BOOL,
        default=False,
        note="Two hops, within nodes and then between them, with fp32 sums in between; blocks of 256 "
        "elements, an fp32 scale each. No effect below stage 2.",
        effect="ZeRO++ qgZ: reduce gradients as int4.",
    ),
    Key(
        path=f"{_Z}.zeropp_loco_param",
        kind=KeyKind.OBJECT,
        default=None,
        status=Status.NOT_RUN,
        note="Error feedback of quantised gradients (LoCo) changes what is trained, and is not built in.",
        way_out="Remove zeropp_loco_param; zero_quantized_gradients rounds every hop by itself.",
        effect="LoCo: error feedback of quantised gradients {err_beta, reset_T}.",
    ),
    Key(
        path=f"{_Z}.mics_shard_size",
        kind=KeyKind.INT,
        default=-1,
        minimum=-1,
        off=(0,),
        status=Status.NOT_RUN,
        postponed="MiCS",
        note="MiCS is postponed.",
        way_out="Remove mics_shard_size; zero_hpz_partition_size keeps gathers within a node.",
        effect="MiCS: ranks of a sub-cluster.",
    ),
    Key(
        path=f"{_Z}.mics_hierarchical_params_gather",
        kind=KeyKind.BOOL,
        default=False,
        needs=f"{_Z}.mics_shard_size",
        effect="Part of MiCS.",
    ),
    _accepted(
        "memory_efficient_linear",
        KeyKind.BOOL,
        True,
        "Linear layers keep no gathered weights in any case.",
        "DeepSpeed, stage 3: its own linear function.",
    ),
    _accepted(
        "pipeline_loading_checkpoint",
        KeyKind.BOOL,
        False,
        "Every rank reads only its own intervals.",
        "DeepSpeed, stage 3: load tensor by tensor.",
    ),
    _accepted(
        "override_module_apply",
        KeyKind.BOOL,
        True,
        "Nothing of torch is patched.",
        "DeepSpeed: patch Module.apply.",
        off=(False,),
    ),
    _accepted(
        "log_trace_cache_warnings", KeyKind.BOOL, False, "There is no trace to invalidate.", "No effect."
    ),
    _accepted("enable_sanity_checks", KeyKind.BOOL, False, "Its checks are always on.", "No effect."),
    _accepted(
        "save_muon_momentum_buffer_in_memory",
        KeyKind.BOOL,
        False,
        "Momenta are where offload_optimizer puts the states.",
        "No effect.",
    ),
    *(
        Key(
            path=f"{_Z}.leaf_module.{name}",
            kind=KeyKind.TEXTS,
            default=None,
            effect=f"Modules, by {what}, that are one unit with all that is in them. Without it a block of a "
            "ModuleList is one.",
        )
        for name, what in (
            ("classes", "class name"),
            ("names", "name"),
            ("name_suffixes", "the end of their name"),
        )
    ),
)

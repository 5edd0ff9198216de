"""Rows of the table: checkpoint, elasticity, profilers, and DeepSpeed's other blocks."""

from __future__ import annotations

from zerotrain.contract.config.keys import Choice, Key, KeyKind, Status


def _not_run_block(path: str, what: str, way_out: str = "", *, postponed: bool = False) -> Key:
    return Key(
        path=path,
        kind=KeyKind.OBJECT,
        default=None,
        off=({},),
        status=Status.NOT_RUN,
        postponed=what if postponed else "",
        note=f"{what} is {'postponed' if postponed else 'not part of this version'}.",
        way_out=way_out or f"Remove the {path} block or set its enabled to false.",
        effect=f"{what}.",
    )


def _part(path: str, kind: KeyKind, default: object, needs: str, effect: str) -> Key:
    return Key(path=path, kind=kind, default=default, needs=needs, effect=effect)


_WRITER = "Files are written by every rank at once, synced, and become visible by one rename."

CHECKPOINT: tuple[Key, ...] = (
    Key(
        path="checkpoint.tag_validation",
        kind=KeyKind.TEXT,
        default="Warn",
        choices=(Choice(value="Ignore"), Choice(value="Warn"), Choice(value="Fail")),
        status=Status.ACCEPTED,
        note="Rank 0 alone names a checkpoint, so tags cannot differ.",
        effect="DeepSpeed: what happens when ranks name different tags.",
    ),
    Key(
        path="checkpoint.load_universal",
        kind=KeyKind.BOOL,
        default=False,
        status=Status.ACCEPTED,
        note="Every checkpoint loads with any number of ranks.",
        effect="DeepSpeed: read its converted format.",
    ),
    Key(
        path="checkpoint.use_node_local_storage",
        kind=KeyKind.BOOL,
        default=False,
        status=Status.NOT_RUN,
        note="A checkpoint must be readable by all ranks, so that a job can come back on other nodes.",
        way_out="Use a shared checkpoint folder and set use_node_local_storage to false.",
        effect="Every node keeps its own part.",
    ),
    Key(
        path="checkpoint.writer.decoupled",
        kind=KeyKind.BOOL,
        default=False,
        effect="A save returns when the state is copied to host memory; a thread writes the copy while "
        "training goes on.",
    ),
    *(
        Key(
            path=f"checkpoint.{name}",
            kind=kind,
            default=default,
            status=Status.ACCEPTED,
            note=_WRITER,
            effect="How DeepSpeed writes files.",
        )
        for name, kind, default in (
            ("parallel_write.pipeline_stage", KeyKind.BOOL, False),
            ("checkpoint_serialization", KeyKind.BOOL, True),
            ("writer.type", KeyKind.TEXT, None),
            ("writer.io_buffer_size", KeyKind.INT, 67_108_864),
            ("writer.io_buffer_double", KeyKind.BOOL, True),
            ("writer.show_statistics", KeyKind.BOOL, False),
            ("writer.data_parallel", KeyKind.TEXT, None),
            ("writer.io_multiplier", KeyKind.INT, 1),
        )
    ),
    _not_run_block(
        "datastates_ckpt", "The DataStates checkpoint engine", "Remove the datastates_ckpt block."
    ),
    _not_run_block("nebula", "The Nebula checkpoint service"),
)

_RESIZE = "The batch of a step is fixed; a job is resized by changing its number of workers."

ELASTICITY: tuple[Key, ...] = (
    Key(
        path="elasticity.enabled",
        kind=KeyKind.BOOL,
        default=False,
        status=Status.NOT_RUN,
        note=_RESIZE,
        way_out="Set elasticity.enabled to false and give the batch sizes.",
        effect="Choose the batch from the number of ranks.",
    ),
    *(
        _part(f"elasticity.{name}", kind, default, "elasticity.enabled", "Part of elasticity.")
        for name, kind, default in (
            ("max_train_batch_size", KeyKind.INT, 2000),
            ("micro_batch_sizes", KeyKind.INTS, [2, 4, 6]),
            ("min_gpus", KeyKind.INT, 1),
            ("max_gpus", KeyKind.INT, 10_000),
            ("min_time", KeyKind.INT, 0),
            ("version", KeyKind.FLOAT, 0.2),
            ("prefer_larger_batch", KeyKind.BOOL, True),
            ("ignore_non_elastic_batch_info", KeyKind.BOOL, False),
            ("num_gpus_per_node", KeyKind.INT, 1),
            ("model_parallel_size", KeyKind.INT, 1),
        )
    ),
)

_TIMES = "Seconds and bytes of every collective and phase are always measured: see /metrics."

PROFILERS: tuple[Key, ...] = (
    Key(
        path="comms_logger.enabled",
        kind=KeyKind.BOOL,
        default=False,
        status=Status.ACCEPTED,
        note=_TIMES,
        effect="DeepSpeed: log collectives.",
    ),
    *(
        _part(f"comms_logger.{name}", kind, default, "comms_logger.enabled", "No effect.")
        for name, kind, default in (
            ("verbose", KeyKind.BOOL, False),
            ("prof_all", KeyKind.BOOL, True),
            ("debug", KeyKind.BOOL, False),
            ("prof_ops", KeyKind.TEXTS, None),
        )
    ),
    Key(
        path="flops_profiler.enabled",
        kind=KeyKind.BOOL,
        default=False,
        status=Status.ACCEPTED,
        note="FLOPs of a step are counted by formula (zerotrain_step_flops in /metrics), not by module.",
        effect="DeepSpeed: count FLOPs.",
    ),
    *(
        _part(f"flops_profiler.{name}", kind, default, "flops_profiler.enabled", "No effect.")
        for name, kind, default in (
            ("profile_step", KeyKind.INT, 1),
            ("module_depth", KeyKind.INT, -1),
            ("top_modules", KeyKind.INT, 1),
            ("detailed", KeyKind.BOOL, True),
            ("output_file", KeyKind.TEXT, None),
            ("recompute_fwd_factor", KeyKind.FLOAT, 0.0),
        )
    ),
    Key(
        path="peak_tflops",
        kind=KeyKind.FLOAT,
        default=None,
        minimum=0.0,
        effect="TFLOP/s that a rank's device could reach in the dtype of its matrix products, for the MFU; "
        "absent = that of the device's data sheet, and no MFU where the device is not known.",
    ),
    Key(
        path="timers",
        kind=KeyKind.OBJECT,
        default=None,
        status=Status.ACCEPTED,
        note=_TIMES,
        effect="DeepSpeed: its timers.",
    ),
    _not_run_block("autotuning", "Autotuning", postponed=True),
)

_MOVING_WEIGHTS = "CUDA graphs read weights at fixed addresses, and gathered weights have others at each use."

COMPILE: tuple[Key, ...] = (
    Key(
        path="compile.enabled",
        kind=KeyKind.BOOL,
        default=False,
        effect="Compile the forward of each unit's module with torch.compile; gathers and reductions stay "
        "outside of the graphs. A model of which the caller compiled a part is refused.",
    ),
    Key(
        path="compile.backend",
        kind=KeyKind.TEXT,
        default="inductor",
        needs="compile.enabled",
        effect="Backend of torch.compile. `inductor` needs a C++ compiler on CPUs and a C compiler on GPUs; "
        "initialize compiles a small function first and refuses to start where that fails.",
    ),
    Key(
        path="compile.mode",
        kind=KeyKind.TEXT,
        default="default",
        needs="compile.enabled",
        choices=(
            Choice(value="default"),
            Choice(value="max-autotune-no-cudagraphs"),
            *(
                Choice(
                    value=value,
                    status=Status.NOT_RUN,
                    note=_MOVING_WEIGHTS,
                    way_out=f'Set compile.mode to "{instead}".',
                )
                for value, instead in (
                    ("reduce-overhead", "default"),
                    ("max-autotune", "max-autotune-no-cudagraphs"),
                )
            ),
        ),
        effect="torch.compile's `mode`.",
    ),
    Key(
        path="compile.options",
        kind=KeyKind.OBJECT,
        default=None,
        off=({},),
        needs="compile.enabled",
        effect="torch.compile's `options`, such as `epilogue_fusion`; not together with a mode.",
    ),
    Key(
        path="compile.dynamic",
        kind=KeyKind.BOOL,
        default=None,
        needs="compile.enabled",
        effect="torch.compile's `dynamic`: compile for sizes that change from the start (true), compile each "
        "size anew (false); absent = sizes that have changed once count as changing.",
    ),
    Key(
        path="compile.fullgraph",
        kind=KeyKind.BOOL,
        default=False,
        needs="compile.enabled",
        effect="torch.compile's `fullgraph`: an error where a unit's forward is not one graph.",
    ),
    Key(
        path="compile.deepcompile",
        kind=KeyKind.BOOL,
        default=False,
        status=Status.NOT_RUN,
        note="DeepCompile is not part of this version.",
        way_out="Set compile.deepcompile to false; compile.enabled compiles each unit.",
        effect="DeepSpeed's compiler passes.",
    ),
    *(
        _part(f"compile.{name}", kind, default, "compile.deepcompile", "Part of DeepCompile.")
        for name, kind, default in (
            ("free_activation", KeyKind.BOOL, False),
            ("free_activation_threshold", KeyKind.INT, 10_485_760),
            ("offload_activation", KeyKind.BOOL, False),
            ("offload_activation_pin_memory", KeyKind.BOOL, True),
            ("autoep_non_moe", KeyKind.BOOL, False),
            ("offload_opt_states", KeyKind.BOOL, False),
            ("offload_parameters", KeyKind.BOOL, False),
            ("double_buffer", KeyKind.BOOL, True),
            ("symmetric_memory", KeyKind.BOOL, False),
            ("debug_log", KeyKind.BOOL, False),
            ("sync_before_reduce", KeyKind.BOOL, False),
            ("sync_after_reduce", KeyKind.BOOL, False),
            ("sync_before_allgather", KeyKind.BOOL, False),
            ("sync_after_allgather", KeyKind.BOOL, False),
            ("keep_int_input_tensors", KeyKind.BOOL, True),
            ("keep_all_input_tensors", KeyKind.BOOL, False),
            ("passes", KeyKind.TEXTS, None),
        )
    ),
    Key(
        path="graph_harvesting",
        kind=KeyKind.BOOL,
        default=False,
        status=Status.ACCEPTED,
        note="No CUDA graphs are captured.",
        effect="DeepSpeed: capture CUDA graphs.",
    ),
)

BLOCKS: tuple[Key, ...] = (
    *(
        _not_run_block(path, what)
        for path, what in (
            ("compression_training", "Compression during training"),
            ("data_efficiency", "DeepSpeed's data efficiency library"),
            ("curriculum_learning", "Curriculum learning"),
            ("progressive_layer_drop", "Progressive layer drop"),
            ("eigenvalue", "Eigenvalue estimation"),
            ("quantize_training", "Quantised training"),
            ("weight_quantization", "Weight quantisation"),
            ("sparse_attention", "Sparse attention"),
            ("hybrid_engine", "The hybrid engine"),
        )
    ),
)

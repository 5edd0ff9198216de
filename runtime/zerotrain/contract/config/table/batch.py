"""Rows of the table: batch, gradient clipping, activation checkpointing, logging."""

from __future__ import annotations

from zerotrain.contract.config.keys import Choice, Key, KeyKind, Status

BATCH: tuple[Key, ...] = (
    Key(
        path="train_batch_size",
        kind=KeyKind.INT,
        default=None,
        minimum=1,
        exact=True,
        auto="train_batch_size",
        effect="Samples of one optimizer step over all ranks.",
    ),
    Key(
        path="train_micro_batch_size_per_gpu",
        kind=KeyKind.INT,
        default=None,
        minimum=1,
        exact=True,
        auto="micro_batch_size",
        effect="Samples of one forward pass on one rank.",
    ),
    Key(
        path="gradient_accumulation_steps",
        kind=KeyKind.INT,
        default=None,
        minimum=1,
        exact=True,
        auto="gradient_accumulation_steps",
        effect="Forward and backward passes per optimizer step.",
    ),
    Key(
        path="managed_gradient_accumulation",
        kind=KeyKind.BOOL,
        default=True,
        effect="true: engine.step() after every backward, and the engine counts micro-batches; false: every "
        "engine.step() updates, after as many backwards as the caller likes. Losses are divided by "
        "gradient_accumulation_steps in any case.",
    ),
    Key(
        path="gradient_clipping",
        kind=KeyKind.FLOAT,
        default=0.0,
        minimum=0.0,
        auto="max_grad_norm",
        effect="Largest global 2-norm of the gradient; 0 or absent = no clipping, also where DeepSpeed clips "
        "at 1.0 unless told otherwise.",
    ),
    Key(
        path="dataloader_drop_last",
        kind=KeyKind.BOOL,
        default=False,
        effect="Drop the last incomplete batch of an epoch when the engine builds the loader.",
    ),
    Key(
        path="uneven_inputs",
        kind=KeyKind.TEXT,
        default="error",
        choices=(
            Choice(value="error", note="The ranks that wait end with an error that names the others."),
            Choice(
                value="join",
                note="A rank without data repeats its last batch at weight zero, and every batch counts by "
                "its samples: the gradient is the mean over all samples of a step. For the engine's loader "
                "and `engine.join(loader)`; costs one small collective per step.",
            ),
        ),
        effect="Not in DeepSpeed. When ranks have unequal numbers of batches or samples:",
    ),
)

_NO_GROUP = (
    "Needs a model-parallel group, initialize(mpu=...) or configure_checkpointing(mpu_=...); without one "
    "every rank keeps its checkpoints whole."
)

ACTIVATIONS: tuple[Key, ...] = (
    Key(
        path="activation_checkpointing.partition_activations",
        kind=KeyKind.BOOL,
        default=False,
        status=Status.ACCEPTED,
        note=_NO_GROUP,
        effect="The block itself makes the trainer recompute every transformer block; this also spreads the "
        "kept inputs over a model-parallel group.",
    ),
    Key(
        path="activation_checkpointing.contiguous_memory_optimization",
        kind=KeyKind.BOOL,
        default=False,
        effect="Copy kept inputs into one buffer per size.",
    ),
    Key(
        path="activation_checkpointing.number_checkpoints",
        kind=KeyKind.INT,
        default=None,
        minimum=1,
        effect="Inputs that such a buffer holds; another one follows when it is full. Absent = it doubles.",
    ),
    Key(
        path="activation_checkpointing.cpu_checkpointing",
        kind=KeyKind.BOOL,
        default=False,
        effect="Keep inputs in host memory, pinned where there is CUDA.",
    ),
    Key(
        path="activation_checkpointing.synchronize_checkpoint_boundary",
        kind=KeyKind.BOOL,
        default=False,
        effect="Wait for the device before and after each checkpointed part.",
    ),
    Key(
        path="activation_checkpointing.profile",
        kind=KeyKind.BOOL,
        default=False,
        effect="Print the forward and the recomputation time of each part on rank 0.",
    ),
)

LOGGING: tuple[Key, ...] = (
    Key(
        path="steps_per_print",
        kind=KeyKind.INT,
        default=None,
        minimum=0,
        effect="Steps between the engine's log lines on rank 0: step, skipped steps, rate, norm, loss scale, "
        "time; 0, Infinity or absent = none, also where DeepSpeed prints every 10 steps.",
    ),
    Key(
        path="wall_clock_breakdown",
        kind=KeyKind.BOOL,
        default=False,
        effect="A further line with the mean time of each phase: forward, backward, reduce, optimizer, "
        "gather, and the wait for collectives. Every 10 steps where steps_per_print is absent.",
    ),
    Key(
        path="memory_breakdown",
        kind=KeyKind.BOOL,
        default=False,
        effect="A further line with the peak of the engine's buffers in each phase. Every 10 steps where "
        "steps_per_print is absent.",
    ),
    *(
        Key(
            path=name,
            kind=kind,
            default=default,
            status=Status.ACCEPTED,
            note=note,
            effect="No effect.",
        )
        for name, kind, default, note in (
            ("dump_state", KeyKind.BOOL, False, "Use `zerotrain config show`."),
            ("log_level", KeyKind.TEXT, None, "The level is the program's."),
            ("vocabulary_size", KeyKind.INT, None, "The model knows its vocabulary."),
            ("disable_allgather", KeyKind.BOOL, False, "Updated parameters are always gathered."),
            ("disable_python_gc", KeyKind.BOOL, False, "Python's collector is the program's: gc.disable()."),
        )
    ),
)

"""Rows of the table: the learning-rate schedule and its parameters."""

from __future__ import annotations

from zerotrain.contract.config.keys import Choice, Key, KeyKind, Status

_WARMUP = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")

SCHEDULER: tuple[Key, ...] = (
    Key(
        path="scheduler.type",
        kind=KeyKind.TEXT,
        default=None,
        effect="Learning-rate schedule; absent = constant.",
        choices=(
            Choice(value="WarmupLR", note="Rise to warmup_max_lr, then constant."),
            Choice(value="WarmupDecayLR", note="Rise, then fall linearly to 0 at total_num_steps."),
            Choice(value="WarmupCosineLR", note="Rise to the optimizer's lr, then fall along a cosine."),
            Choice(
                value="Cosine",
                means="WarmupCosineLR",
                status=Status.ACCEPTED,
                note="Read as WarmupCosineLR.",
            ),
            Choice(value="OneCycle", note="One cycle of the rate, momentum the other way, then decay."),
            Choice(value="LRRangeTest", note="An ever rising rate, to find where training breaks."),
        ),
    ),
    Key(
        path="scheduler.params.warmup_min_lr",
        kind=KeyKind.FLOAT_OR_FLOATS,
        default=0.0,
        minimum=0.0,
        only=("WarmupLR", "WarmupDecayLR"),
        auto="warmup_min_lr",
        effect="Learning rate at the start.",
    ),
    Key(
        path="scheduler.params.warmup_max_lr",
        kind=KeyKind.FLOAT_OR_FLOATS,
        default=None,
        minimum=0.0,
        only=("WarmupLR", "WarmupDecayLR"),
        default_by_type={"WarmupDecayLR": 1e-3},
        auto="learning_rate",
        effect="Learning rate after warm-up; WarmupLR without it: the optimizer's lr.",
    ),
    Key(
        path="scheduler.params.warmup_num_steps",
        kind=KeyKind.INT,
        default=1000,
        minimum=0,
        only=_WARMUP,
        auto="warmup_steps",
        effect="Steps of the rise; fewer than 2 count as 2. The rise starts with the second update, as in "
        "DeepSpeed.",
    ),
    Key(
        path="scheduler.params.warmup_type",
        kind=KeyKind.TEXT,
        default="log",
        only=_WARMUP,
        choices=(Choice(value="log"), Choice(value="linear")),
        effect="Shape of the rise.",
    ),
    Key(
        path="scheduler.params.total_num_steps",
        kind=KeyKind.INT,
        default=None,
        minimum=1,
        only=("WarmupDecayLR", "WarmupCosineLR"),
        auto="total_steps",
        fill=True,
        effect="Step at which the fall ends; absent = the steps of the job, where they are known.",
    ),
    Key(
        path="scheduler.params.warmup_min_ratio",
        kind=KeyKind.FLOAT,
        default=0.0,
        minimum=0.0,
        maximum=1.0,
        only=("WarmupCosineLR",),
        effect="Fraction of the lr at the start.",
    ),
    Key(
        path="scheduler.params.cos_min_ratio",
        kind=KeyKind.FLOAT,
        default=1e-4,
        minimum=0.0,
        maximum=1.0,
        only=("WarmupCosineLR",),
        effect="Fraction of the lr at the end.",
    ),
    *(
        Key(
            path=f"scheduler.params.{name}",
            kind=kind,
            default=default,
            minimum=minimum,
            only=("OneCycle",),
            effect=effect,
        )
        for name, kind, default, minimum, effect in (
            ("cycle_min_lr", KeyKind.FLOAT_OR_FLOATS, None, 0.0, "Rate at both ends of the cycle; needed."),
            ("cycle_max_lr", KeyKind.FLOAT_OR_FLOATS, None, 0.0, "Rate at its top; needed."),
            ("decay_lr_rate", KeyKind.FLOAT, 0.0, 0.0, "After the cycle: rate / (1 + this per decay step)."),
            ("cycle_first_step_size", KeyKind.INT, 2000, 1, "Updates of the rise."),
            ("cycle_second_step_size", KeyKind.INT, None, 0, "Updates of the fall; absent = as the rise."),
            ("cycle_first_stair_count", KeyKind.INT, 0, 0, "Stairs of the rise; 0 = smooth."),
            ("cycle_second_stair_count", KeyKind.INT, None, 0, "Stairs of the fall; absent = as the rise."),
            ("decay_step_size", KeyKind.INT, 0, 0, "Updates of one decay step; 0 = no decay."),
            (
                "cycle_momentum",
                KeyKind.BOOL,
                True,
                None,
                "Cycle the first beta too; the second is 0.99 then.",
            ),
            ("cycle_min_mom", KeyKind.FLOAT_OR_FLOATS, 0.8, 0.0, "First beta at the top of the cycle."),
            ("cycle_max_mom", KeyKind.FLOAT_OR_FLOATS, 0.9, 0.0, "First beta at its ends."),
            (
                "decay_mom_rate",
                KeyKind.FLOAT,
                0.0,
                None,
                "After the cycle: beta * (1 + this per decay step).",
            ),
        )
    ),
    *(
        Key(
            path=f"scheduler.params.{name}",
            kind=kind,
            default=default,
            minimum=minimum,
            only=("LRRangeTest",),
            effect=effect,
        )
        for name, kind, default, minimum, effect in (
            ("lr_range_test_min_lr", KeyKind.FLOAT_OR_FLOATS, 1e-3, 0.0, "Rate at the start."),
            ("lr_range_test_step_size", KeyKind.INT, 2000, 1, "Updates of one step of the test."),
            (
                "lr_range_test_step_rate",
                KeyKind.FLOAT,
                1.0,
                None,
                "Rise per step, as a part of the first rate.",
            ),
            ("lr_range_test_staircase", KeyKind.BOOL, False, None, "Rise at whole steps alone."),
        )
    ),
    Key(
        path="scheduler.params.last_batch_iteration",
        kind=KeyKind.INT,
        default=-1,
        minimum=-1,
        status=Status.ACCEPTED,
        note="The step comes from the checkpoint.",
        effect="DeepSpeed: step to start from.",
    ),
)

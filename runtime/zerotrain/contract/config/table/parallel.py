"""Rows of the table: parallelism beyond data."""

from __future__ import annotations

from zerotrain.contract.config.keys import Key, Kind, Status

_POSTPONED = "Tensor, pipeline, expert and sequence parallelism are postponed."


def _degree(path: str, what: str, default: int = 1) -> Key:
    return Key(
        path=path,
        kind=Kind.INT,
        default=default,
        off=(0, 1),
        minimum=0,
        status=Status.NOT_RUN,
        note=_POSTPONED,
        way_out=f"Set {path} to 1 and let ZeRO stage 3 shard the model instead.",
        effect=f"Ranks of a {what} group.",
    )


PARALLEL: tuple[Key, ...] = (
    _degree("tensor_parallel.tp_size", "tensor-parallel"),
    _degree("tensor_parallel.autotp_size", "tensor-parallel", default=0),
    _degree("tensor_parallel.tp.tp_size", "tensor-parallel"),
    *(
        Key(
            path=f"tensor_parallel.{name}",
            kind=kind,
            default=default,
            status=Status.ACCEPTED,
            note="Without a tensor-parallel group it has no effect.",
            effect="Part of tensor parallelism.",
        )
        for name, kind, default in (
            ("tp.tp_grain_size", Kind.INT, 1),
            ("tp_overlap_comm", Kind.BOOL, False),
            ("dtype", Kind.TEXT, None),
            ("partition_config", Kind.OBJECT, None),
            ("preset_model", Kind.TEXT, None),
            ("injection_policy_tuple", Kind.TEXTS, None),
            ("keep_module_on_host", Kind.BOOL, False),
            ("kernel_inject", Kind.BOOL, False),
        )
    ),
    _degree("pipeline_parallel.pp_size", "pipeline"),
    Key(
        path="pipeline",
        kind=Kind.OBJECT,
        default=None,
        status=Status.ACCEPTED,
        note="Only a pipeline module would read it.",
        effect="Settings of a pipeline module.",
    ),
    Key(
        path="expert_parallel",
        kind=Kind.OBJECT,
        default=None,
        off=({}, {"enabled": False}),
        status=Status.NOT_RUN,
        note=_POSTPONED,
        way_out="Remove the expert_parallel block; experts are sharded with their block.",
        effect="Automatic expert parallelism.",
    ),
    _degree("sequence_parallel_size", "sequence-parallel"),
    Key(
        path="use_data_before_expert_parallelism",
        kind=Kind.BOOL,
        default=False,
        status=Status.ACCEPTED,
        note="There is no expert parallelism here.",
        effect="No effect.",
    ),
)

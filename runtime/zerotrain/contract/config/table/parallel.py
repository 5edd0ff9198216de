"""Rows of the table: parallelism beyond data."""

from __future__ import annotations

from zerotrain.contract.config.keys import Key, KeyKind, Status

_SHARD_INSTEAD = "let ZeRO stage 3 shard the model instead"


def _degree(path: str, feature: str, *, default: int = 1, postponed: bool = True, mpu: bool = False) -> Key:
    """Return the row of a key for the ranks of a group that the engine itself would have to create."""
    own = ", or pass initialize(mpu=...), an object that supplies the groups" if mpu else ""
    return Key(
        path=path,
        kind=KeyKind.INT,
        default=default,
        off=(0, 1),
        minimum=0,
        status=Status.NOT_RUN,
        postponed=feature if postponed else "",
        lifted_by="mpu" if mpu else "",
        note=f"{feature} is {'postponed' if postponed else 'not part of this version'}.",
        way_out=f"Set {path} to 1 and {_SHARD_INSTEAD}{own}.",
        effect=f"{feature}: ranks of a group.",
    )


_TENSOR = "Tensor parallelism"

PARALLEL: tuple[Key, ...] = (
    _degree("tensor_parallel.tp_size", _TENSOR, mpu=True),
    _degree("tensor_parallel.autotp_size", _TENSOR, default=0, mpu=True),
    _degree("tensor_parallel.tp.tp_size", _TENSOR, mpu=True),
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
            ("tp.tp_grain_size", KeyKind.INT, 1),
            ("tp_overlap_comm", KeyKind.BOOL, False),
            ("dtype", KeyKind.TEXT, None),
            ("partition_config", KeyKind.OBJECT, None),
            ("preset_model", KeyKind.TEXT, None),
            ("injection_policy_tuple", KeyKind.TEXTS, None),
            ("keep_module_on_host", KeyKind.BOOL, False),
            ("kernel_inject", KeyKind.BOOL, False),
            ("replace_with_kernel_inject", KeyKind.BOOL, False),
            ("vocab_parallel_lm_head", KeyKind.BOOL, None),
            ("vocab_parallel_ce_backend", KeyKind.TEXT, "torch"),
        )
    ),
    _degree("pipeline_parallel.pp_size", "Pipeline parallelism"),
    Key(
        path="pipeline",
        kind=KeyKind.OBJECT,
        default=None,
        status=Status.ACCEPTED,
        note="Only a pipeline module would read it.",
        effect="Settings of a pipeline module.",
    ),
    Key(
        path="expert_parallel",
        kind=KeyKind.OBJECT,
        default=None,
        off=({},),
        status=Status.NOT_RUN,
        postponed="Expert parallelism",
        note="Expert parallelism is postponed.",
        way_out="Remove the expert_parallel block; experts are sharded with their block.",
        effect="Automatic expert parallelism.",
    ),
    _degree("sequence_parallel_size", "Sequence parallelism", postponed=False),
    Key(
        path="use_data_before_expert_parallelism",
        kind=KeyKind.BOOL,
        default=False,
        status=Status.ACCEPTED,
        note="There is no expert parallelism here.",
        effect="No effect.",
    ),
)

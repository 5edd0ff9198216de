"""Rows of the table: offload of optimizer states and parameters, and the file I/O that goes with it."""

from __future__ import annotations

from zerotrain.contract.config.keys import Choice, Key, KeyKind, Status

_Z = "zero_optimization"


def _device(block: str, what: str, effect: str) -> Key:
    return Key(
        path=f"{_Z}.{block}.device",
        kind=KeyKind.TEXT,
        default="none",
        choices=(
            Choice(value="none", note="Stays on the accelerator."),
            Choice(value="cpu", note=f"{what} live in host memory."),
            Choice(value="nvme", note=f"{what} live in an encrypted, unnamed spill file of each rank."),
        ),
        effect=effect,
    )


def _offload(block: str, name: str, kind: KeyKind, default: object, effect: str, **more: object) -> Key:
    return Key(
        path=f"{_Z}.{block}.{name}",
        kind=kind,
        default=default,
        effect=effect,
        needs=f"{_Z}.{block}.device",
        **more,  # type: ignore[arg-type]
    )


_HINT: dict[str, object] = {
    "status": Status.ACCEPTED,
    "note": "Staging buffers are sized from the layout.",
    "minimum": 0,
}
_PIPELINED: dict[str, object] = {
    "status": Status.ACCEPTED,
    "off": (True,),
    "note": "Tiles are always read ahead and written behind.",
}
_SUPER = f"{_Z}.offload_optimizer.super_offload"
_PATH = "Folder of the spill; absent = the worker's NVMe volume."
_PIN = (
    "On CUDA: page-lock what is copied to and from the device, so that transfers run beside the computation."
)

OFFLOAD: tuple[Key, ...] = (
    _device(
        "offload_optimizer",
        "Optimizer states",
        "Where optimizer states live and the update runs, at any stage.",
    ),
    _offload("offload_optimizer", "nvme_path", KeyKind.TEXT, None, _PATH),
    _offload("offload_optimizer", "pin_memory", KeyKind.BOOL, True, _PIN),
    _offload("offload_optimizer", "buffer_count", KeyKind.INT, 4, "DeepSpeed: staging buffers.", **_HINT),
    _offload(
        "offload_optimizer",
        "pipeline_read",
        KeyKind.BOOL,
        False,
        "Read the next tile during the update; always so here.",
        **_PIPELINED,
    ),
    _offload(
        "offload_optimizer",
        "pipeline_write",
        KeyKind.BOOL,
        False,
        "Write the last tile during the update; always so here.",
        **_PIPELINED,
    ),
    _offload(
        "offload_optimizer",
        "fast_init",
        KeyKind.BOOL,
        False,
        "DeepSpeed: skip the first write of zero states.",
        status=Status.ACCEPTED,
        note="The first write is one sweep, in which zero states are sealed like all others.",
    ),
    _offload(
        "offload_optimizer",
        "ratio",
        KeyKind.FLOAT,
        1.0,
        "Fraction of the states that is offloaded, at any stage (DeepSpeed: stage 3); the rest stays on the "
        "accelerator, whole units of it, those that forward uses first.",
        minimum=0.0,
        maximum=1.0,
    ),
    _offload(
        "offload_optimizer",
        "just_in_time",
        KeyKind.BOOL,
        None,
        "Update in the background after step() returned, each unit before its next forward, with the same "
        "bits; absent = where it pays (on CUDA or nvme at stages 0 and 3, or with one rank). Not a key of "
        "DeepSpeed.",
    ),
    _offload(
        "offload_optimizer",
        "super_offload",
        KeyKind.BOOL,
        False,
        "DeepSpeed's SuperOffload.",
        status=Status.NOT_RUN,
        postponed="SuperOffload",
        note="SuperOffload is postponed.",
        way_out="Set super_offload to false.",
    ),
    Key(
        path=f"{_Z}.offload_optimizer.cpuadam_cores_perc",
        kind=KeyKind.FLOAT,
        default=0.8,
        minimum=0.0,
        maximum=1.0,
        needs=_SUPER,
        effect="Part of SuperOffload.",
    ),
    _offload(
        "offload_optimizer",
        "convert_grad_on_cpu",
        KeyKind.BOOL,
        True,
        "DeepSpeed: where gradients change dtype.",
        status=Status.ACCEPTED,
        note="The update reads gradients in the dtype they arrive in.",
    ),
    _device("offload_param", "Parameter shards", "Where parameter shards live; no effect below stage 3."),
    _offload("offload_param", "nvme_path", KeyKind.TEXT, None, _PATH),
    _offload("offload_param", "pin_memory", KeyKind.BOOL, True, _PIN),
    _offload("offload_param", "buffer_count", KeyKind.INT, 5, "DeepSpeed: staging buffers.", **_HINT),
    _offload("offload_param", "buffer_size", KeyKind.INT, 100_000_000, "DeepSpeed: their elements.", **_HINT),
    _offload(
        "offload_param",
        "max_in_cpu",
        KeyKind.INT,
        1_000_000_000,
        "With nvme: elements of a rank's shards that stay in host memory, whole units of them.",
        minimum=0,
    ),
    Key(
        path=f"{_Z}.spill.encryption",
        kind=KeyKind.TEXT,
        default=None,
        choices=(
            Choice(
                value="AEAD",
                note="AES-256-GCM; the key lives only in the rank's locked memory.",
            ),
            Choice(
                value="None",
                note="Plain bytes on the disk, still in a file without a name; a metric says so.",
            ),
        ),
        effect="How the spill is sealed; absent = as the job says, else AEAD. Not a key of DeepSpeed.",
    ),
    Key(
        path=f"{_Z}.spill.max_bytes",
        kind=KeyKind.INT,
        default=None,
        minimum=1,
        effect="Largest spill of one rank; a worker's NVMe volume, divided by its ranks, bounds it as well. "
        "Not a key of DeepSpeed.",
    ),
    Key(
        path=f"{_Z}.spill.paths",
        kind=KeyKind.TEXTS,
        default=None,
        effect="Folders, best one per drive, over which the spill is striped, in place of nvme_path. Not a "
        "key of DeepSpeed.",
    ),
    Key(
        path=f"{_Z}.zenflow",
        kind=KeyKind.OBJECT,
        default=None,
        status=Status.NOT_RUN,
        postponed="ZenFlow",
        note="ZenFlow is postponed.",
        way_out="Remove the zenflow block.",
        effect="DeepSpeed's ZenFlow.",
    ),
)

_RING = "The engine keeps one ring per folder, submits in batches and takes completions as they come."

AIO: tuple[Key, ...] = (
    Key(
        path="aio.block_size",
        kind=KeyKind.INT,
        default=1_048_576,
        minimum=4096,
        effect="Bytes of one request of the NVMe tier.",
    ),
    Key(
        path="aio.queue_depth",
        kind=KeyKind.INT,
        default=32,
        minimum=1,
        maximum=4096,
        effect="Requests of the NVMe tier in flight per folder (DeepSpeed: 8).",
    ),
    *(
        Key(
            path=f"aio.{name}",
            kind=KeyKind.BOOL if isinstance(default, bool) else KeyKind.INT,
            default=default,
            minimum=None if isinstance(default, bool) else 1,
            status=Status.ACCEPTED,
            note=_RING,
            effect=effect,
        )
        for name, default, effect in (
            ("intra_op_parallelism", 1, "DeepSpeed: threads per transfer."),
            ("single_submit", False, "DeepSpeed: submit one by one."),
            ("overlap_events", True, "DeepSpeed: submit while others complete; always so here."),
        )
    ),
    Key(
        path="aio.use_gds",
        kind=KeyKind.BOOL,
        default=False,
        status=Status.ACCEPTED,
        note="States pass through host memory, where they are opened and updated.",
        effect="DeepSpeed: GPUDirect storage.",
    ),
    Key(
        path="aio.thread_count",
        kind=KeyKind.INT,
        default=1,
        minimum=1,
        status=Status.ACCEPTED,
        note="The older name of intra_op_parallelism. " + _RING,
        effect="Older name of intra_op_parallelism.",
    ),
)

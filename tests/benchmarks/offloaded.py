"""The contenders of `bench_offload.py`: zerotrain and DeepSpeed with states in host memory or on NVMe.

The rank processes import this module. Both engines take the folder from ZEROTRAIN_NVME_PATH.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from tests.benchmarks.contenders import Contender, Sizes, config_of, engine_facts, engine_step, make_model

DEEPSPEED_AIO = {
    "block_size": 1 << 20,
    "queue_depth": 32,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
}
SUB_GROUP_NUMEL = 20_000_000
"""Size of the groups between which DeepSpeed overlaps I/O; its default of 1e9 is one group per model.
"""


def zerotrain(stage: int, device: str, **more: Any) -> Callable[[Sizes], Contender]:
    """Return a builder of this engine; `more` are other keys of `zero_optimization`."""

    def build(sizes: Sizes) -> Contender:
        import zerotrain.runtime as zt

        config = config_of(stage, sizes)
        block = {"device": device, **more.get("offload_optimizer", {})}
        config["zero_optimization"] |= {**more, "offload_optimizer": block}
        # No rank holds the whole model in fp32, as the largest one would not fit.
        with zt.init_context(config=config, enabled=sizes.d_model > 1024):
            model = make_model(sizes)
        engine = zt.initialize(model=model, config=config)[0]
        print(f"zerotrain-{stage}-{device}: {backend_of(engine)}", flush=True)
        return Contender(
            step=engine_step(engine), facts=lambda: offload_facts(engine), settle=engine.synchronize
        )

    return build


def deepspeed(stage: int, device: str) -> Callable[[Sizes], Contender]:
    """Return a builder of DeepSpeed on its CPU accelerator.

    Its nvme runs as fast as its settings allow, with plain bytes.
    """

    def build(sizes: Sizes) -> Contender:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed as ds  # type: ignore[import-not-found, unused-ignore]

        ds.init_distributed(dist_backend="gloo")
        config = config_of(stage, sizes)
        block: dict[str, Any] = {"device": device, "pin_memory": False}
        if device == "nvme":
            block |= {"nvme_path": os.environ["ZEROTRAIN_NVME_PATH"]}
            block |= {"pipeline_read": True, "pipeline_write": True, "buffer_count": 16}
            config["aio"] = DEEPSPEED_AIO
            config["zero_optimization"]["sub_group_size"] = SUB_GROUP_NUMEL
        config["zero_optimization"]["offload_optimizer"] = block
        engine = ds.initialize(model=make_model(sizes), config=config)[0]
        return Contender(step=engine_step(engine))

    return build


def offload_facts(engine: Any) -> Mapping[str, float]:
    """Return bytes by the engine's counters and by the formulas, of one rank."""
    status, numel = engine.memory_status(), sum(unit.numel for unit in engine.core.layout.units)
    info, updates = engine.spill_info, max(1, engine.global_steps)
    moved = status.offload.spill_read_bytes + status.offload.spill_written_bytes
    filled = 0 if info is None else status.tier_bytes["disk"]
    return {
        **engine_facts(engine),
        "host_bytes": status.tier_bytes["host"],
        "host_formula_bytes": status.planned_host_bytes,
        "disk_bytes": status.tier_bytes["disk"],
        "disk_formula_bytes": status.planned_disk_bytes,
        "spill_bytes_per_parameter": (moved - filled) / updates / (numel / engine.world_size),
        "is_direct": float(info is not None and info.is_direct),
    }


def backend_of(engine: Any) -> str:
    """Return the names of the I/O engine, the encryption and its backend."""
    info = engine.spill_info
    return "" if info is None else f"{info.engine}, {info.encryption} by {info.backend}"


PLAIN = {"spill": {"encryption": "None"}}

OFFLOADED: Mapping[str, Callable[[Sizes], Contender]] = {
    **{f"zerotrain-{stage}-cpu": zerotrain(stage, "cpu") for stage in (0, 1, 2, 3)},
    **{f"zerotrain-{stage}-nvme": zerotrain(stage, "nvme") for stage in (0, 1, 2, 3)},
    **{f"zerotrain-{stage}-nvme-plain": zerotrain(stage, "nvme", **PLAIN) for stage in (1, 2, 3)},
    "zerotrain-3-nvme-sync": zerotrain(3, "nvme", offload_optimizer={"just_in_time": False}),
    **{f"deepspeed-{stage}-cpu": deepspeed(stage, "cpu") for stage in (1, 2, 3)},
    "deepspeed-3-nvme": deepspeed(3, "nvme"),
}

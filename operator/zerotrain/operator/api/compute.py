"""Resources that a worker requests from its node: GPUs, cores, memory, RDMA."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from .base import ApiModel, Int, rule
from .quantity import Bytes, Cpu

ResourceName = Annotated[
    str,
    StringConstraints(
        min_length=3,
        max_length=317,
        pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
    ),
]
"""Name of an extended resource: domain/name."""


class Gpus(ApiModel):
    """GPUs of a worker."""

    count: Annotated[Int, Field(ge=1, le=64)]
    """GPUs of each worker, 1 to 64. Also the default of ranksPerWorker. Leave `gpus` out to train on CPUs."""

    resource_name: ResourceName = "nvidia.com/gpu"
    """Extended resource that the device plugin offers; nvidia.com/gpu unless given."""

    memory: Bytes | None = None
    """Memory of one GPU, such as 80Gi, for the memory planner: a job that cannot fit it gets no pods. Unless
    given it is taken from the labels nvidia.com/gpu.memory or nvidia.com/gpu.product in
    scheduling.nodeSelector, or else unknown."""


class Rdma(ApiModel):
    """RDMA devices of a worker."""

    resource_name: ResourceName
    """Extended resource that the device plugin offers, such as rdma/hca."""

    count: Annotated[Int, Field(ge=1, le=64)] = 1
    """Devices of each worker, 1 to 64."""


class Resources(ApiModel):
    """Resources of each worker; requests equal limits. Immutable."""

    RULES = (
        rule(
            "has(self.memory) || !has(self.pinnedMemory)",
            "memory must be given when pinnedMemory is: pinned memory is a part of it",
            holds=lambda self: self.memory is not None or self.pinned_memory is None,
            field_path=".memory",
        ),
        rule(
            "has(self.memory) || !has(self.sharedMemory)",
            "memory must be given when sharedMemory is: shared memory is a part of it",
            holds=lambda self: self.memory is not None or self.shared_memory is None,
            field_path=".memory",
        ),
        rule(
            "!has(self.rdma) || !has(self.gpus) || self.rdma.resourceName != self.gpus.resourceName",
            "rdma and gpus must be different resources",
            holds=lambda self: (
                self.rdma is None or self.gpus is None or self.rdma.resource_name != self.gpus.resource_name
            ),
            field_path=".rdma",
        ),
    )

    gpus: Gpus | None = None
    """GPUs of each worker; none unless given."""

    cpu: Cpu | None = None
    """Cores of each worker, such as 32, 0.5 or 500m: request and limit; its ranks share them as threads.
    Unless given there is no limit, and they share all cores of the node, whether or not other pods run
    there."""

    memory: Bytes | None = None
    """Host memory of each worker, such as 512Gi: request and limit. It is the whole amount: pinnedMemory and
    sharedMemory are counted in it, and must leave enough for the processes themselves. No limit unless
    given."""

    pinned_memory: Bytes | None = None
    """Part of memory that the engine may page-lock for transfers to the GPUs, such as 256Gi. It stays
    resident and so counts towards the memory request. None unless given."""

    shared_memory: Bytes | None = None
    """Size of /dev/shm, such as 16Gi: a memory-backed volume that is counted in memory. The container
    runtime's default of 64Mi unless given."""

    rdma: Rdma | None = None
    """RDMA devices of each worker: request and limit. The worker's container then asks for the capability
    IPC_LOCK, which Pod Security allows only at the level privileged, and no NetworkPolicy applies to traffic
    over these devices. None unless given."""

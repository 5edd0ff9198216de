"""The security contexts of a worker pod: Pod Security "restricted", with a read-only root file system.

Only RDMA needs more: one capability, which the spec requests by name.
"""

from __future__ import annotations

from typing import Final

from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.api.core.containers import ContainerUser

from .identity import Json
from .volumes import as_written

IPC_LOCK: Final = "IPC_LOCK"
"""The only capability that a worker may request."""

WORKER_USER: Final = 65532
"""User ID of "nonroot" in the common base images and in the runtime image."""


def pod_security_context() -> Json:
    return {
        "runAsNonRoot": True,
        "runAsUser": WORKER_USER,
        "runAsGroup": WORKER_USER,
        "fsGroup": WORKER_USER,
        # A checkpoint volume may hold a million files: change their group once, not at every start.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def worker_security_context(job: ZeroTrainingJob) -> Json:
    """Return the security context of the worker container. RDMA pins the memory that its devices access."""
    context = container_security_context()
    resources = job.spec.resources
    if resources is not None and resources.rdma is not None:
        context["capabilities"] = {**context["capabilities"], "add": [IPC_LOCK]}
    return context


def container_security_context(user: ContainerUser | None = None) -> Json:
    """Return the security context of a container; `user` is the part that podTemplate may set for its
    containers."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        **(as_written(user) if user is not None else {}),
    }

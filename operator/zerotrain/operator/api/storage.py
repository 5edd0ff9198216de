"""Storage of a worker: the NVMe volume for spilled state, the node's own disk, the checkpoint volume."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from .base import ApiModel, Bool, Int, ObjectName, one_of, rule
from .core.volumes import ClaimSource, EmptyDirSource, EphemeralSource, NfsSource
from .paths import AbsolutePath
from .quantity import Bytes


class Encryption(StrEnum):
    AEAD = "AEAD"
    NONE = "None"


class Nvme(ApiModel):
    """Fast local volume of each worker for state that is spilled out of memory. Immutable."""

    RULES = (
        rule(
            "!has(self.requireEncryptedVolume) || !self.requireEncryptedVolume || has(self.storageClassName)",
            "requireEncryptedVolume needs storageClassName: without a class the volume is an emptyDir on the "
            "node's own disk, and nothing declares that to be encrypted",
            holds=lambda self: not self.require_encrypted_volume or self.storage_class_name is not None,
            field_path=".storageClassName",
        ),
    )

    size: Bytes
    """Size of the volume of each worker, such as 2Ti."""

    storage_class_name: ObjectName | None = None
    """StorageClass of a generic ephemeral volume, which is created and deleted with the pod. Without it the
    volume is an emptyDir with this size as its limit. Never a hostPath."""

    mount_path: AbsolutePath = "/local_nvme"
    """Path where the volume is mounted; /local_nvme unless given. A nvme_path of the configuration must equal
    it."""

    encryption: Encryption | None = None
    """Encryption of spilled state. AEAD encrypts everything that is spilled, with a key that exists only in
    the rank's memory; None writes plain bytes. Unless given the configuration decides, and AEAD applies if
    that says nothing either."""

    require_encrypted_volume: Bool | None = None
    """Whether the volume must be encrypted. When true, no pod is created unless the StorageClass declares
    that its volumes are encrypted: by a parameter that its driver is known for, or by the annotation
    zerotrain.dev/encrypted-volumes: "true". False unless given."""


class Scratch(ApiModel):
    """Limits of what each worker stores on its node's own disk. A pod that exceeds one is evicted and the job
    restarted. May be changed at any time; applies from the next attempt on, running pods keep theirs."""

    size: Bytes | None = None
    """Size of /tmp, where programs have their home and caches, and of every emptyDir on disk that has no
    sizeLimit; 50Gi unless given. A model that is downloaded there must fit."""

    ephemeral_storage: Bytes | None = None
    """Limit of the worker's ephemeral-storage: all folders on the node's disk, an nvme volume without a
    class, logs. Unless given, the sum of what these may take and 2Gi. Lower it if a LimitRange or a quota of
    the namespace allows less."""


class CheckpointVolume(ApiModel):
    """Volume that checkpoints are written to; exactly one kind."""

    RULES = (
        one_of("persistentVolumeClaim", "ephemeral", "emptyDir", "nfs"),
        rule(
            "!has(self.persistentVolumeClaim) || !has(self.persistentVolumeClaim.readOnly) "
            "|| !self.persistentVolumeClaim.readOnly",
            "a checkpoint volume must be writable",
            holds=lambda self: not (self.persistent_volume_claim and self.persistent_volume_claim.read_only),
            field_path=".persistentVolumeClaim.readOnly",
        ),
        rule(
            "!has(self.nfs) || !has(self.nfs.readOnly) || !self.nfs.readOnly",
            "a checkpoint volume must be writable",
            holds=lambda self: not (self.nfs and self.nfs.read_only),
            field_path=".nfs.readOnly",
        ),
    )

    persistent_volume_claim: ClaimSource | None = None
    """Existing claim; with several workers one that all of them can mount (ReadWriteMany, or one node)."""

    ephemeral: EphemeralSource | None = None
    """Claim that is created and deleted with the pod: only for one worker, and lost with it."""

    empty_dir: EmptyDirSource | None = None
    """Folder that lives as long as the pod: only for one worker, and lost with it."""

    nfs: NfsSource | None = None
    """Folder of an NFS server, shared by all workers. Pod Security "restricted" forbids it in pods: there,
    give the claim of a PersistentVolume that names it."""

    @property
    def shared(self) -> bool:
        """Whether all workers see the same folder."""
        return self.persistent_volume_claim is not None or self.nfs is not None


class Verify(StrEnum):
    NEVER = "Never"
    ON_COMPLETION = "OnCompletion"


def _names_a_class(checkpoint: Checkpoint) -> bool:
    made = checkpoint.volume.ephemeral
    if made is not None:
        return made.volume_claim_template.spec.storage_class_name is not None
    return checkpoint.volume.persistent_volume_claim is not None


class Checkpoint(ApiModel):
    """Schedule, destination and retention of checkpoints."""

    RULES = (
        rule(
            "!has(self.requireEncryptedVolume) || !self.requireEncryptedVolume "
            "|| has(self.volume.persistentVolumeClaim) || (has(self.volume.ephemeral) "
            "&& has(self.volume.ephemeral.volumeClaimTemplate.spec.storageClassName))",
            "requireEncryptedVolume needs a persistentVolumeClaim, or ephemeral with a storageClassName: "
            "nothing declares that any other volume is encrypted",
            holds=lambda self: not self.require_encrypted_volume or _names_a_class(self),
            field_path=".requireEncryptedVolume",
        ),
        rule(
            "!has(self.verify) || self.verify == 'Never' || has(self.volume.persistentVolumeClaim) "
            "|| has(self.volume.nfs)",
            "verify needs a volume that another pod can mount: persistentVolumeClaim or nfs",
            holds=lambda self: self.verify in (None, Verify.NEVER) or self.volume.shared,
            field_path=".verify",
        ),
    )

    volume: CheckpointVolume
    """Volume of the checkpoints. The job writes below <volume>/<its name> (nfs: <volume>/<namespace>/<its
    name>); a new job of the same name resumes from there, unless resumeFrom says otherwise. Immutable."""

    require_encrypted_volume: Bool | None = None
    """Whether the volume must be encrypted. When true, no pod is created unless the StorageClass of the
    volume (the one that an existing claim names) declares that its volumes are encrypted; as
    nvme.requireEncryptedVolume. False unless given."""

    every_steps: Annotated[Int, Field(ge=1, le=10**9)] | None = None
    """Steps between two checkpoints. With neither everySteps nor everySeconds, checkpoints are taken only on
    termination and at the end."""

    every_seconds: Annotated[Int, Field(ge=1, le=604_800)] | None = None
    """Seconds between two checkpoints, at most 604800 (a week): the first step after that time takes one."""

    keep_last: Annotated[Int, Field(ge=1, le=1000)] = 3
    """Number of checkpoints that are kept, 1 to 1000. The newest durable one is never removed."""

    on_termination: Bool = True
    """Whether to checkpoint when the job is suspended or a worker is asked to stop, before the pods end."""

    grace_period_seconds: Annotated[Int, Field(ge=1, le=86_400)] = 120
    """Seconds for one step and one checkpoint once a worker is asked to stop; the pods'
    terminationGracePeriodSeconds. 1 to 86400."""

    resume_from: Annotated[
        str, StringConstraints(max_length=128, pattern=r"^[A-Za-z0-9][-._A-Za-z0-9]*$")
    ] = "Latest"
    """Checkpoint to start from. Latest resumes from the newest intact checkpoint of the folder, None starts
    from scratch in the first attempt, and the name of a step folder resumes from that one."""

    verify: Verify | None = None
    """Verification of the last checkpoint. OnCompletion creates one pod after the job has completed that
    reads every byte of its newest checkpoint (zerotrain checkpoint verify) through a read-only mount; the
    outcome is in status.checkpoint.verification, and ttlSecondsAfterFinished waits for it. Never, or absent,
    creates none. May be changed at any time."""

    verify_timeout_seconds: Annotated[Int, Field(ge=1, le=604_800)] | None = None
    """Seconds that the verification may take, the wait for a node included; 1 to 604800, 7200 if absent. May
    be changed at any time."""

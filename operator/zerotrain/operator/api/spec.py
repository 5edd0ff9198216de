"""The spec of a ZeroTrainingJob: the parts of the sibling modules and the rules across them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Set
from typing import Annotated, Any

from pydantic import Field, StringConstraints, model_validator

from zerotrain.contract.finetune_spec import PROGRAM
from zerotrain.operator.constants import MANAGER, MAX_FREE_ENTRIES, MAX_WORKERS

from .base import ATOMIC, ApiModel, Argument, Bool, Int, Rule, one_for_changes, one_of, rule
from .compute import Resources
from .core.containers import Image
from .elastic import Elastic
from .failures import FailureAction, FailurePolicy
from .finetune import Finetune
from .hangs import HangPolicy
from .lifecycle import RunPolicy
from .network import Network
from .packed import unpacked
from .pod_template import PodTemplate
from .scheduling import Scheduling
from .storage import Checkpoint, Nvme, Scratch
from .workload import ConfigSource, Data, Model

_COMMAND_GIVEN = "(has(self.command) && size(self.command) > 0)"


def _same(field: str) -> str:
    kept = f"has(self.{field}) == has(oldSelf.{field})"
    return f"{kept} && (!has(self.{field}) || self.{field} == oldSelf.{field})"


def _immutable(field: str, why: str) -> Rule:
    return rule(_same(field), f"{field} is immutable: {why}", field_path=f".{field}")


def _frozen(field: str) -> Rule:
    """Return a rule that lets the field change only while the job is suspended: pods of a running attempt
    would not see the change."""
    return rule(
        f"self.suspend || oldSelf.suspend || ({_same(field)})",
        f"{field} can be changed only while the job is suspended",
        field_path=f".{field}",
    )


def _frozen_but(field: str, model: type[ApiModel], *free: str) -> tuple[Rule, ...]:
    """Return `_frozen` rules for every part of the field except those named: one rule each, so that messages
    name the part."""
    parts = [str(info.alias) for info in model.model_fields.values()]
    unknown = set(free) - set(parts)
    if unknown:
        raise ValueError(f"{model.__name__} has no field {', '.join(sorted(unknown))}")
    return tuple(_frozen_part(field, part) for part in parts if part not in free)


def _frozen_part(field: str, part: str) -> Rule:
    now, before = (f"(has({side}.{field}) && has({side}.{field}.{part}))" for side in ("self", "oldSelf"))
    same = f"{now} == {before} && (!{now} || self.{field}.{part} == oldSelf.{field}.{part})"
    return rule(
        f"self.suspend || oldSelf.suspend || ({same})",
        f"{field}.{part} can be changed only while the job is suspended",
        field_path=f".{field}",
    )


def _needed_by_trainer(field: str) -> Rule:
    return rule(
        f"has(self.{field}) || {_COMMAND_GIVEN} || has(self.finetune)",
        f"{field} must be given, unless command names a program of your own or finetune is given",
        holds=lambda self: getattr(self, field) is not None or bool(self.program),
        field_path=f".{field}",
    )


_CHANGES = (
    rule(
        "has(self.elastic) == has(oldSelf.elastic) || self.suspend || oldSelf.suspend",
        "elastic can be given or removed only while the job is suspended",
        field_path=".elastic",
    ),
    rule(
        "self.workers == oldSelf.workers || has(self.elastic)",
        "workers is immutable unless elastic is given",
        field_path=".workers",
    ),
    rule(
        "has(self.checkpoint) == has(oldSelf.checkpoint) "
        "&& (!has(self.checkpoint) || self.checkpoint.volume == oldSelf.checkpoint.volume)",
        "checkpoint.volume is immutable: the job would lose its checkpoints",
        field_path=".checkpoint",
    ),
    _immutable("model", "checkpoints hold its parameters"),
    _immutable("ranksPerWorker", "make a new job"),
    _immutable("resources", "make a new job"),
    _immutable("nvme", "make a new job"),
    _immutable("seed", "a resumed job must draw the same data"),
    _immutable("managedBy", "two operators must never hold one job"),
    _frozen("image"),
    _frozen("command"),
    _frozen("args"),
    _frozen("config"),
    _frozen("configFrom"),
    _frozen("data"),
    _frozen("finetune"),
    _frozen("steps"),
    _frozen("logEverySteps"),
    # The volume has its own rule; a verification runs in a separate pod, created after the last attempt.
    *_frozen_but("checkpoint", Checkpoint, "volume", "verify", "verifyTimeoutSeconds"),
    # Running pods keep their priority: a change applies to the queue and to the next attempt's pods.
    *_frozen_but("scheduling", Scheduling, "priorityClassName"),
    _frozen("podTemplate"),
)


_RULES = (
    one_of("config", "configFrom", field_path=".config"),
    _needed_by_trainer("model"),
    _needed_by_trainer("data"),
    _needed_by_trainer("steps"),
    rule(
        f"!has(self.finetune) || !({_COMMAND_GIVEN} || has(self.model) || has(self.data))",
        "a job has one program: remove finetune; or command; or model and data, which are the built-in "
        "trainer's (finetune has its own)",
        holds=lambda self: (
            self.finetune is None or not (self.command or self.model is not None or self.data is not None)
        ),
        field_path=".finetune",
    ),
    rule(
        "!has(self.finetune) || has(self.steps) != has(self.finetune.epochs)",
        "finetune needs its epochs or steps of the job, and not both",
        holds=lambda self: self.finetune is None or (self.steps is None) != (self.finetune.epochs is None),
        field_path=".finetune",
    ),
    rule(
        "!has(self.finetune) || has(self.checkpoint)",
        "finetune needs checkpoint: its output folder is on that volume",
        holds=lambda self: self.finetune is None or self.checkpoint is not None,
        field_path=".finetune",
    ),
    rule(
        f"!has(self.args) || size(self.args) == 0 || {_COMMAND_GIVEN}",
        "args needs command: the built-in trainer takes no arguments",
        holds=lambda self: not self.args or bool(self.command),
        field_path=".args",
    ),
    rule(
        "!has(self.elastic) || (self.elastic.minWorkers <= self.workers "
        "&& self.workers <= self.elastic.maxWorkers)",
        "workers must be between elastic.minWorkers and elastic.maxWorkers",
        holds=lambda self: (
            self.elastic is None or self.elastic.min_workers <= self.workers <= self.elastic.max_workers
        ),
        field_path=".workers",
    ),
    rule(
        "!has(self.elastic) || has(self.config)",
        "elastic needs config inline: gradient_accumulation_steps changes with the number of workers",
        holds=lambda self: self.elastic is None or self.config is not None,
        field_path=".elastic",
    ),
    rule(
        "!has(self.elastic) || (has(self.checkpoint) && (!has(self.checkpoint.onTermination) "
        "|| self.checkpoint.onTermination) && (has(self.checkpoint.volume.persistentVolumeClaim) "
        "|| has(self.checkpoint.volume.nfs)))",
        "elastic needs checkpoint with onTermination, on a volume that all workers see "
        "(persistentVolumeClaim or nfs): a resize goes on from a checkpoint",
        holds=lambda self: (
            self.elastic is None
            or (
                self.checkpoint is not None
                and self.checkpoint.on_termination
                and self.checkpoint.volume.shared
            )
        ),
        field_path=".elastic",
    ),
    rule(
        "has(self.elastic) || !has(self.failurePolicy) || !has(self.failurePolicy.rules) "
        "|| !self.failurePolicy.rules.exists(item, item.action == 'ShrinkAndRestart')",
        "failurePolicy.rules: ShrinkAndRestart needs elastic, which sets the minimum size of the job",
        holds=lambda self: (
            self.elastic is not None
            or all(item.action is not FailureAction.SHRINK_AND_RESTART for item in self.failure_policy.rules)
        ),
        field_path=".failurePolicy",
    ),
    rule(
        "!has(self.ranksPerWorker) || !has(self.resources) || !has(self.resources.gpus) "
        "|| self.ranksPerWorker <= self.resources.gpus.count",
        "ranksPerWorker must not exceed resources.gpus.count: every rank needs a GPU of its own",
        holds=lambda self: self.num_gpus == 0 or self.num_ranks_per_worker <= self.num_gpus,
        field_path=".ranksPerWorker",
    ),
    rule(
        "!has(self.checkpoint) || self.workers == 1 || has(self.checkpoint.volume.persistentVolumeClaim) "
        "|| has(self.checkpoint.volume.nfs)",
        "several workers need one checkpoint volume that all of them see: persistentVolumeClaim or nfs",
        holds=lambda self: self.checkpoint is None or self.workers == 1 or self.checkpoint.volume.shared,
        field_path=".checkpoint.volume",
    ),
)


RULE_FOR_CHANGES = one_for_changes(
    "spec", _CHANGES, "a field cannot be changed, or only while the job is suspended"
)
"""Rule of the whole job rather than of its spec, as it reads the status, too."""


class ZeroTrainingJobSpec(ApiModel):
    """Desired state: what to train and with what."""

    RULES = _RULES

    workers: Annotated[Int, Field(ge=1, le=MAX_WORKERS)] = 1
    """Number of worker pods, 1 to 10000; 1 unless given. Immutable unless elastic is given."""

    ranks_per_worker: Annotated[Int, Field(ge=1, le=64)] | None = None
    """Processes of each worker, 1 to 64; resources.gpus.count unless given, or 1 without GPUs. Immutable."""

    image: Image
    """Image of the workers. It must contain the zerotrain runtime. Changes only while suspended."""

    command: Annotated[tuple[Argument, ...], Field(max_length=64, json_schema_extra=ATOMIC)] = ()
    """Program that the launcher starts once per rank; the built-in trainer unless given. `zerotrain launch
    SCRIPT` gives a script this engine as `import deepspeed`. Changes only while suspended."""

    args: Annotated[tuple[Argument, ...], Field(max_length=256, json_schema_extra=ATOMIC)] = ()
    """Arguments of command. Changes only while suspended."""

    config: Annotated[dict[str, Any], Field(max_length=MAX_FREE_ENTRIES)] | None = None
    """DeepSpeed-style configuration, inline; the same keys as in its JSON file. Either this or configFrom.
    Changes only while suspended."""

    config_from: ConfigSource | None = None
    """Reference to the configuration. Either this or config. Changes only while suspended."""

    model: Model | None = None
    """Model that the built-in trainer trains. Needed unless command or finetune is given. Immutable."""

    data: Data | None = None
    """Training data of the built-in trainer. Needed unless command or finetune is given. Changes only while
    suspended."""

    finetune: Finetune | None = None
    """Fine-tuning of a language model, in place of command and of the built-in trainer. Changes only while
    suspended."""

    steps: Annotated[Int, Field(ge=1, le=10**12)] | None = None
    """Optimizer steps of the whole job, over all attempts. Needed unless command or finetune.epochs is given.
    Changes only while suspended."""

    seed: Annotated[Int, Field(ge=0, le=2**53 - 1)] = 0
    """Seed of parameters, dropout and data order; 0 unless given. Immutable."""

    log_every_steps: Annotated[Int, Field(ge=1, le=10**9)] = 10
    """Steps between two log lines of the trainer; 10 unless given. Changes only while suspended."""

    resources: Resources | None = None
    """GPUs, cores and memory of each worker; requests equal limits. Immutable."""

    nvme: Nvme | None = None
    """Fast local volume of each worker for state that is spilled out of memory. None unless given.
    Immutable."""

    network: Network | None = None
    """Networks that the job's pods may connect to, besides its own ranks and DNS; none unless given. May be
    changed at any time."""

    scratch: Scratch | None = None
    """Limits of what each worker stores on its node's own disk. May be changed at any time; applies from the
    next attempt on."""

    checkpoint: Checkpoint | None = None
    """Schedule and destination of checkpoints. Without it nothing is saved and every restart begins at step
    0. Changes only while suspended, its volume never, verify and verifyTimeoutSeconds at any time."""

    elastic: Elastic | None = None
    """Range of worker numbers to which the job may be resized. Fixed size unless given."""

    failure_policy: FailurePolicy = Field(default_factory=FailurePolicy)
    """Limits and rules for restarts after failures. May be changed at any time."""

    hang_policy: HangPolicy | None = None
    """Limits after which a job whose step no longer advances counts as hung. May be changed at any time."""

    run_policy: RunPolicy = Field(default_factory=RunPolicy)
    """Deadlines and clean-up. May be changed at any time; times of a finished job count from its end."""

    scheduling: Scheduling | None = None
    """Queue, gang, priority and placement of the workers. Changes only while suspended, priorityClassName at
    any time."""

    suspend: Bool = False
    """Whether the job is suspended. When true it checkpoints, releases its pods and waits; false resumes it
    at the same step. May be changed at any time."""

    managed_by: Annotated[
        str, StringConstraints(min_length=3, max_length=128, pattern=r"^[^/\s]+/[^/\s]+$")
    ] = MANAGER
    """Controller that manages the job, as domain/path; zerotrain.dev/operator unless given. Any other value
    makes this operator leave the job alone. Immutable."""

    pod_template: PodTemplate | None = None
    """Additions to the worker pods: labels, environment, volumes, sidecars. Changes only while
    suspended."""

    @model_validator(mode="before")
    @classmethod
    def _unpack(cls, given: Any) -> Any:
        return unpacked(given) if isinstance(given, dict) else given

    @property
    def program(self) -> tuple[str, ...]:
        """Command that the launcher starts once per rank; empty for the built-in trainer."""
        return PROGRAM if self.finetune is not None else (*self.command, *self.args)

    @property
    def num_ranks_per_worker(self) -> int:
        """Number of processes of each worker, with the default applied."""
        if self.ranks_per_worker is not None:
            return self.ranks_per_worker
        return self.num_gpus or 1

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of each worker; 0 means training on CPUs."""
        gpus = self.resources.gpus if self.resources else None
        return gpus.count if gpus else 0

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self.workers * self.num_ranks_per_worker


def spec_hash(spec: ZeroTrainingJobSpec, *, parts: Set[str], but: Mapping[str, Any]) -> str:
    """Return the hash of the fields `parts` of the spec, without those of their own fields that `but` names:
    16 hex digits. By it the operator tells whether an object would be created the same today.

    Defaults do not count: another version of the operator, with fields that this one does not know, must
    compute the same hash.
    """
    kept = spec.model_dump(
        mode="json",
        include=set(parts),
        exclude={name: set(of) for name, of in but.items()},
        exclude_defaults=True,
    )
    # A part in which no field counts equals a missing part.
    kept = {name: value for name, value in kept.items() if value not in ({}, None)}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]

"""Checkpoints of the trainer: when to save, saving, and resuming."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from zerotrain.contract.progress import RejectedCheckpoint
from zerotrain.contract.train_spec import CheckpointPolicy
from zerotrain.runtime.checkpoint import LoadResult, load
from zerotrain.runtime.train.report import passed_over
from zerotrain.runtime.train.session import Session
from zerotrain.runtime.zero.state import CheckpointState

RESUME_LATEST = "Latest"
RESUME_NONE = "None"


def is_due(policy: CheckpointPolicy, *, step: int, is_time_up: bool) -> bool:
    """Return whether to save after `step`. `is_time_up` must be the answer of one rank, sent to all of
    them."""
    by_steps = policy.every_steps is not None and step % policy.every_steps == 0
    return by_steps or (policy.every_seconds is not None and is_time_up)


@dataclass(kw_only=True)
class Checkpoints:
    """Checkpoint folder of one run; does nothing when the job has none."""

    session: Session
    clock: Callable[[], float] = time.monotonic
    resumed_from: int | None = None
    """Step of the checkpoint from which this attempt goes on."""
    rejected: tuple[RejectedCheckpoint, ...] = ()
    notices: tuple[str, ...] = ()
    _saved_at: float = field(init=False)
    _saved_step: int | None = None
    """Step of the newest checkpoint that is durable or being written."""

    def __post_init__(self) -> None:
        self._saved_at = self.clock()

    @property
    def enabled(self) -> bool:
        return self.session.settings.launch.checkpoint_dir is not None

    @property
    def policy(self) -> CheckpointPolicy:
        return self.session.settings.spec.checkpoint

    @property
    def is_time_up(self) -> bool:
        """Whether `every_seconds` have passed on this rank; rank 0's answer counts."""
        interval = self.policy.every_seconds
        return interval is not None and self.clock() - self._saved_at >= interval

    def open_and_resume(self) -> LoadResult | None:
        """Claim the folder and load what the policy asks for; None when the run starts afresh. Collective."""
        directory = self.session.settings.launch.checkpoint_dir
        if directory is None:
            return None
        self.session.engine.claim_checkpoints(directory)
        state = self.session.engine.checkpoint_state()
        result = self._load(state)
        self.rejected = passed_over(result)
        if result.path is None:
            return None
        self.session.engine.after_state_load(state)
        self.notices = self.session.loader.restore(result.client_state["data"])
        self.resumed_from = result.step
        self._saved_at, self._saved_step = self.clock(), result.step
        return result

    def _load(self, state: CheckpointState) -> LoadResult:
        launch, resume_from = self.session.settings.launch, self.policy.resume_from
        directory = launch.checkpoint_dir
        assert directory is not None  # only called with a folder
        if resume_from == RESUME_LATEST:
            return load(state, directory)
        # `resume_from` is about the job's start; once it has checkpoints of its own, a restart goes on from
        # these.
        own = load(state, directory, of_job=launch.job_uid)
        if own.path is not None or resume_from == RESUME_NONE:
            return own
        return load(state, directory, resume_from)

    def save(self, *, wait: bool) -> None:
        """Save now, unless this step is saved or being saved, or there is no folder. Collective.

        With `wait` the checkpoint is durable on return; otherwise the policy says whether training waits for
        it.
        """
        directory = self.session.settings.launch.checkpoint_dir
        engine = self.session.engine
        if directory is None:
            return
        if self._saved_step != engine.global_steps:
            engine.save_checkpoint(
                directory,
                client_state={"data": self.session.loader.state()},
                keep_last=self.policy.keep_last,
                asynchronous=False if wait else self.policy.asynchronous,
            )
            self._saved_at, self._saved_step = self.clock(), engine.global_steps
        elif wait:
            engine.wait_for_checkpoint()

"""transformers' Trainer in a job: checkpoints that are whole or not there, a stop at one step, a resume by
itself. `zerotrain.compat.libraries.mends.jobs` calls these functions in place of its methods."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from zerotrain.compat.job.folders import OutputFolder
from zerotrain.contract.progress import RejectedCheckpoint
from zerotrain.runtime.checkpoint.group import default_group
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.train.automatic_events import Resume
from zerotrain.runtime.train.automatic_reporter import AutomaticReporter, resume_from

Method = Callable[..., Any]

STATE_FILE = "trainer_state.json"

_trained: set[Path] = set()
"""Folders of trainings that began in this process: a second one there is the script's next, not this
attempt's resume."""


def begin_training(
    train: Method, trainer: Any, resume_from_checkpoint: Any = None, trial: Any = None, **given: Any
) -> Any:
    """Train from the newest whole checkpoint of the job, if there is one; see `docs/huggingface.md`."""
    if trial is None:
        trainer.add_callback(trainer_callback())
        resume_from_checkpoint = checkpoint_to_resume(trainer.args.output_dir, resume_from_checkpoint)
    return train(trainer, resume_from_checkpoint=resume_from_checkpoint, trial=trial, **given)


def checkpoint_to_resume(output_dir: str, asked: Any) -> Any:
    """Return what the training resumes from: the job's own newest checkpoint, else what the script asks for.
    Collective.

    What a script asks for is where a job begins. Once the job has checkpoints, its attempts go on from these.
    """
    folder = OutputFolder.in_job(output_dir)
    if folder is None or folder.path in _trained:
        return asked
    _trained.add(folder.path)
    group = default_group()
    folder.open(group)
    choice = folder.choose(group, of_job_only=True)
    damaged = choice.damaged
    if choice.path is None and asked is True:
        choice = folder.choose(group, of_job_only=False)
        damaged += choice.damaged
    rejected = tuple(RejectedCheckpoint(path=str(path), reason=reason) for path, reason in damaged)
    resume_from(Resume(folder=choice.path, rejected=rejected))
    return asked if choice.path is None else str(choice.path)


def newest_checkpoint(find: Method, output_dir: str) -> str | None:
    """Return the newest whole checkpoint of a folder, as a script asks for it; of a folder in which none has
    a record, what transformers takes for the newest."""
    folder = OutputFolder.in_job(output_dir)
    if folder is None or not folder.whole():
        found: str | None = find(output_dir)
        return found
    usable = folder.resumable(of_job_only=False)
    return os.path.join(output_dir, usable[0].path.name) if usable else None


def save_checkpoint(save: Method, trainer: Any, model: Any, trial: Any) -> None:
    """Save as the Trainer does, but in a folder of this attempt, and move it to its place when it is whole.
    Collective."""
    reporter, args = AutomaticReporter.current(), trainer.args
    with nullcontext() if reporter is None else reporter.silent_pause():
        folder = OutputFolder.in_job(args.output_dir)
        if folder is None or trial is not None or args.save_on_each_node:
            save(trainer, model, trial)
            return
        stops = reporter is not None and reporter.stop_agreed
        with _saving_into(trainer, folder.saving), _with_states(args) if stops else nullcontext():
            save(trainer, model, trial)
            if isinstance(trainer.model_wrapped, Engine):
                trainer.model_wrapped.wait_for_checkpoint()
            name, is_resumable = f"checkpoint-{trainer.state.global_step}", not args.save_only_model
        _name_best(trainer, folder)
        result = folder.complete(
            name, step=trainer.state.global_step, resumable=is_resumable, group=default_group()
        )
        if args.push_to_hub:
            trainer._push_from_checkpoint(str(folder.path / name))
        if args.should_save:
            folder.rotate(args.save_total_limit, best=trainer.state.best_model_checkpoint)
    if reporter is not None:
        reporter.saved(result)


def kept_at_end(sort: Method, output_dir: str, **given: Any) -> list[str]:
    """Return the checkpoints that the end of a training may remove: not the one from which another attempt
    would go on if this one ended before the script does."""
    found: list[str] = sort(output_dir=output_dir, **given)
    folder = OutputFolder.in_job(output_dir)
    newest = [] if folder is None else folder.resumable(of_job_only=True)[:1]
    return [path for path in found if Path(path).absolute() not in [item.path for item in newest]]


def evaluate(method: Method, trainer: Any, *args: Any, **given: Any) -> Any:
    """Evaluate or predict as the Trainer does, in a pause of training."""
    reporter = AutomaticReporter.current()
    with nullcontext() if reporter is None else reporter.pause():
        return method(trainer, *args, **given)


def load_best_model(load: Method, trainer: Any) -> None:
    """Load the best model at the end of a training; the steps that were taken stay reported."""
    reporter = AutomaticReporter.current()
    with nullcontext() if reporter is None else reporter.silent_pause():
        load(trainer)


def run_epoch(run: Method, trainer: Any, *args: Any, **given: Any) -> None:
    """Train an epoch as the Trainer does, unless all steps are done.

    A job may end after its last checkpoint, while its script evaluates or saves. transformers begins the next
    attempt with one more step.
    """
    state = trainer.state
    if OutputFolder.in_job(trainer.args.output_dir) is not None and state.global_step >= state.max_steps:
        trainer.control.should_training_stop = True
        return
    run(trainer, *args, **given)


def trainer_callback() -> Any:
    """Return a callback that reports the length of the training and stops it on request."""
    from transformers import TrainerCallback

    class JobCallback(TrainerCallback):
        """Stops the training with a checkpoint after the step at which all ranks agreed."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if (reporter := AutomaticReporter.current()) is not None:
                reporter.plan(state.max_steps, at_step=state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
            if _is_stopping():
                control.should_save = control.should_training_stop = True
                control.should_evaluate = False  # the next attempt goes on soon, and may need the time
            return control

        def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            reporter = AutomaticReporter.current()
            if reporter is not None and reporter.stop_agreed:
                reporter.finish_stopped()

    return JobCallback()


def _is_stopping() -> bool:
    reporter = AutomaticReporter.current()
    return reporter is not None and reporter.stop_agreed


@contextmanager
def _saving_into(trainer: Any, folder: Path) -> Iterator[None]:
    """Make the Trainer write its next checkpoint into this folder, and upload nothing: uploads go on in the
    background, and the folder is moved."""
    trainer._get_output_dir = lambda trial: str(folder)
    trainer._push_from_checkpoint = lambda checkpoint: None
    try:
        yield
    finally:
        del trainer._get_output_dir, trainer._push_from_checkpoint


@contextmanager
def _with_states(args: Any) -> Iterator[None]:
    """Make a Trainer that saves models only save all that another attempt needs."""
    before, args.save_only_model = args.save_only_model, False
    try:
        yield
    finally:
        args.save_only_model = before


def _name_best(trainer: Any, folder: OutputFolder) -> None:
    """Store the place of the best checkpoint as it will be."""
    state, args = trainer.state, trainer.args
    if not state.best_global_step or args.save_strategy == "no":
        return
    name = f"checkpoint-{state.best_global_step}"
    if state.best_global_step == state.global_step or (folder.path / name).exists():
        state.best_model_checkpoint = os.path.join(args.output_dir, name)
        if args.should_save:
            saved = folder.saving / f"checkpoint-{state.global_step}"
            state.save_to_json(os.path.join(saved, STATE_FILE))

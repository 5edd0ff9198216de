"""Mends of transformers and Accelerate for scripts in a job; `zerotrain.compat.job` does the work.

Outside of a job, and without a launcher, the changed functions do what they did. The engine is imported when
one of them is called: many programs import transformers and train nothing.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from zerotrain.compat.libraries.mends.around import Function, around


def keep_checkpoints_whole(module: ModuleType) -> None:
    """Make the Trainer's checkpoints whole or absent."""
    _replace(module.Trainer, "_save_checkpoint", "trainer", "save_checkpoint")


def resume_by_itself(module: ModuleType) -> None:
    """Make `Trainer.train` resume from the job's newest whole checkpoint, and stop on request."""
    _replace(module.Trainer, "train", "trainer", "begin_training")


def pause_for_evaluation(module: ModuleType) -> None:
    """Make `evaluate` and `predict` of the Trainer pauses of training."""
    for name in ("evaluate", "predict"):
        _replace(module.Trainer, name, "trainer", "evaluate")


def keep_reported_steps(module: ModuleType) -> None:
    """Make the load of the best model at the end of a training leave the reported steps as they are."""
    _replace(module.Trainer, "_load_best_model", "trainer", "load_best_model")


def find_whole_checkpoints(module: ModuleType) -> None:
    """Make `get_last_checkpoint` pass over checkpoints that are not whole."""
    _replace(module, "get_last_checkpoint", "trainer", "newest_checkpoint")


def take_no_step_too_many(module: ModuleType) -> None:
    """Make a training whose steps are all done, as its checkpoint says, take none."""
    _replace(module.Trainer, "_run_epoch", "trainer", "run_epoch")


def keep_last_checkpoint(module: ModuleType) -> None:
    """Make the end of a training with `save_total_limit=1` keep the newest checkpoint beside the best."""
    _replace(module, "sort_checkpoints", "trainer", "kept_at_end")


def keep_states_whole(module: ModuleType) -> None:
    """Make what Accelerate's `save_state` writes whole or absent, and report it."""
    _replace(module.Accelerator, "save_state", "accelerate", "save_state")


def report_loads(module: ModuleType) -> None:
    """Make `load_state` of Accelerate report the folder that it loads."""
    _replace(module.Accelerator, "load_state", "accelerate", "load_state")


def check_arguments(module: ModuleType) -> None:
    """Make `TrainingArguments` refuse an output folder that cannot be written, and keep the global batch."""
    _replace(module.TrainingArguments, "__post_init__", "arguments", "complete")


def follow_in_json(module: ModuleType) -> None:
    """Make the DeepSpeed JSON of the Trainer keep the global batch."""
    _replace(module.HfTrainerDeepSpeedConfig, "trainer_config_process", "arguments", "complete_json")


def _replace(owner: Any, name: str, home: str, function: str) -> None:
    """Replace a function by one of `zerotrain.compat.job`, which gets it as its first argument."""

    @around(owner, name)
    def in_job(given: Function, *args: Any, **kwargs: Any) -> Any:
        from zerotrain.compat import job

        return job.function(home, function)(given, *args, **kwargs)

"""`TrainingArguments` in a job: a folder that can be written, and the global batch of the job's beginning."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zerotrain.compat.job.place import first_size
from zerotrain.compat.refusal import CompatError
from zerotrain.runtime.checkpoint import job_folder

KEY = "gradient_accumulation_steps"
NO_POSTS = "DISABLE_KUBEFLOW_INTEGRATION"
"""Variable that keeps transformers from posting what the engine reports itself."""


def complete(post_init: Callable[[Any], None], arguments: Any) -> None:
    """Check the output folder, let the accumulation follow the number of ranks, and complete the arguments as
    transformers does. Raises CompatError."""
    check_output(arguments.output_dir or "trainer_output")
    if arguments.deepspeed:
        os.environ[NO_POSTS] = "TRUE"
    steps = getattr(arguments, KEY)
    if type(steps) is int:
        setattr(arguments, KEY, steps_for_ranks(steps, "TrainingArguments"))
    post_init(arguments)


def complete_json(
    process: Callable[..., None], config: Any, arguments: Any, *args: Any, **given: Any
) -> None:
    """Let the accumulation of a DeepSpeed JSON follow the number of ranks, and complete it.

    The arguments do so already, and the operator's own file, too.
    """
    steps = config.config.get(KEY)
    if type(steps) is int and steps != getattr(arguments, KEY):
        config.config[KEY] = steps_for_ranks(steps, "the DeepSpeed JSON")
    process(config, arguments, *args, **given)


def check_output(output_dir: str | os.PathLike[str]) -> None:
    """Create the output folder. Raises CompatError if a rank of a job cannot write it."""
    if job_folder() is None:
        return
    place, reason = Path(output_dir).expanduser(), "it is read-only"
    try:
        place.mkdir(parents=True, exist_ok=True)
        if os.access(place, os.W_OK | os.X_OK):
            return
    except OSError as error:
        reason = f"{error.strerror}: {error.filename}"
    raise CompatError(
        f"output_dir {str(output_dir)!r} cannot be written in this job ({reason}); give a relative path, "
        "which is then on the job's checkpoint volume, or one on a volume that podTemplate mounts"
    )


def steps_for_ranks(steps: int, where: str) -> int:
    """Return the accumulation steps that keep the samples of an optimizer step, on as many ranks as there are
    now. Raises CompatError where they do not divide."""
    began, now = first_size(), int(os.environ.get("WORLD_SIZE", "1"))
    if began is None or began == now:
        return steps
    whole, rest = divmod(steps * began, now)
    if rest:
        sizes = [size for size in range(1, steps * began + 1) if steps * began % size == 0]
        raise CompatError(
            f"{KEY} {steps} of {where} was meant for the {began} rank(s) with which this job began, and "
            f"{steps} x {began} micro-batches do not divide among {now}; run it on "
            f"{', '.join(map(str, sizes))} ranks"
        )
    return whole

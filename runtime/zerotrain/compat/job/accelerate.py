"""Accelerate's own loops in a job: states that are whole or not there, and how they are reported.

A script resumes by its own code, which lists its folders. All that it finds there under the name that it gave
is whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from zerotrain.compat.job.folders import OutputFolder
from zerotrain.runtime.checkpoint.group import default_group
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.train.automatic_events import Resume
from zerotrain.runtime.train.automatic_reporter import AutomaticReporter, resume_from

Method = Callable[..., Any]

_opened: set[Path] = set()
"""Folders in which this process has tidied up."""


def save_state(save: Method, accelerator: Any, output_dir: Any = None, *args: Any, **given: Any) -> Any:
    """Save as Accelerate does, but move the folder to its place when it is whole. Collective.

    Folders that Accelerate names and removes itself (`automatic_checkpoint_naming`) are written in place, as
    is the folder in which the script runs.
    """
    project, target = accelerator.project_configuration, Path(output_dir or ".").absolute()
    stays = project.automatic_checkpoint_naming or Path.cwd().is_relative_to(target.resolve())
    folder = OutputFolder.in_job(target.parent)
    if stays or folder is None or project.save_on_each_node:
        return save(accelerator, output_dir, *args, **given)
    reporter = AutomaticReporter.current()
    with nullcontext() if reporter is None else reporter.silent_pause():
        if target.parent not in _opened:
            _opened.add(target.parent)
            folder.open(default_group())
        written = save(accelerator, str(folder.saving / target.name), *args, **given)
        engines = [model for model in accelerator._models if isinstance(model, Engine)]
        for engine in engines:
            engine.wait_for_checkpoint()
        step = max((engine.global_steps for engine in engines), default=0)
        result = folder.complete(target.name, step=step, resumable=True, group=default_group())
    if reporter is not None:
        reporter.saved(result)
    return os.fspath(output_dir) if written else written


def load_state(load: Method, accelerator: Any, input_dir: Any = None, *args: Any, **given: Any) -> Any:
    """Load as Accelerate does, and report it as a resume from this folder."""
    if input_dir is not None:
        resume_from(Resume(folder=Path(input_dir).absolute()))
    return load(accelerator, input_dir, *args, **given)

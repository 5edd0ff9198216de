"""Rows of the table: trackers, to which rank 0 writes the numbers of every step.

The blocks and keys are those of DeepSpeed's monitors; `mlflow` is ours.
"""

from __future__ import annotations

from dataclasses import replace

from zerotrain.contract.config.keys import Key, KeyKind, Status

TRACKERS = ("tensorboard", "csv_monitor", "wandb", "comet", "trackio", "mlflow")
"""Names of the blocks."""

_TEXT = KeyKind.TEXT
_FOLDER = (
    "Folder of the files; a relative one is below the job's checkpoint folder, or without a job below the "
    "working directory."
)
_FILES = (
    Key(path="output_path", kind=_TEXT, default="", effect=_FOLDER),
    Key(path="job_name", kind=_TEXT, default="DeepSpeedJobName", effect="Folder of the run within it."),
)
_PROJECT = Key(path="project", kind=_TEXT, default="deepspeed", effect="Project that gets the run.")


def _tracker(block: str, what: str, parts: tuple[Key, ...]) -> tuple[Key, ...]:
    switch = Key(
        path=f"{block}.enabled",
        kind=KeyKind.BOOL,
        default=False,
        effect=f"Rank 0 writes loss, learning rate, gradient norm, pace and memory of every step to {what}.",
    )
    return switch, *(replace(part, path=f"{block}.{part.path}", needs=switch.path) for part in parts)


MONITORS: tuple[Key, ...] = (
    *_tracker("tensorboard", "TensorBoard's event files", _FILES),
    *_tracker(
        "wandb",
        "Weights & Biases",
        (
            Key(path="group", kind=_TEXT, default=None, effect="Group of the run."),
            Key(path="team", kind=_TEXT, default=None, effect="Entity that owns the project."),
            _PROJECT,
        ),
    ),
    *_tracker("csv_monitor", "CSV files, one for each number", _FILES),
    *_tracker(
        "comet",
        "Comet",
        (
            Key(
                path="samples_log_interval",
                kind=KeyKind.INT,
                default=100,
                minimum=1,
                effect="Samples between two points.",
            ),
            Key(path="project", kind=_TEXT, default=None, effect="Project that gets the experiment."),
            Key(path="workspace", kind=_TEXT, default=None, effect="Workspace of the project."),
            Key(
                path="api_key",
                kind=_TEXT,
                default=None,
                effect="Key of an account.",
                status=Status.NOT_RUN,
                note="A configuration is read by many, and is no place for a key.",
                way_out="Set COMET_API_KEY in the environment; in a job by a Secret of podTemplate.envFrom.",
                is_secret=True,
            ),
            Key(path="experiment_name", kind=_TEXT, default=None, effect="Name that is shown."),
            Key(
                path="experiment_key",
                kind=_TEXT,
                default=None,
                effect="Experiment that is continued, instead of the one of this job.",
            ),
            Key(path="online", kind=KeyKind.BOOL, default=None, effect="false: files for a later upload."),
            Key(path="mode", kind=_TEXT, default=None, effect="Comet's get, create or get_or_create."),
        ),
    ),
    *_tracker("trackio", "Trackio's local database", (_PROJECT,)),
    *_tracker(
        "mlflow",
        "MLflow",
        (
            Key(path="project", kind=_TEXT, default="deepspeed", effect="Experiment that gets the run."),
            Key(
                path="tracking_uri",
                kind=_TEXT,
                default=None,
                effect="Server or store; absent = MLFLOW_TRACKING_URI, else a folder mlruns beside the "
                "checkpoints.",
            ),
        ),
    ),
)

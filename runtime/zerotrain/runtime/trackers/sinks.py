"""Writing to each tracker through its own library; only the thread of a `TrackerWriter` does it.

A sink is opened with the first point, as a tracker may have to know from where on a run is written again: an
attempt repeats the steps since the last checkpoint. Any error may come out of a library.
"""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from zerotrain.runtime.trackers.run import Run

Settings = Mapping[str, Any]
Values = Mapping[str, float]


class Sink(Protocol):
    """A tracker's run that is open."""

    def write(self, step: int, values: Values) -> None:
        """Write the numbers of a step."""

    def flush(self) -> None:
        """Make what was written visible."""

    def close(self) -> None:
        """End this attempt's part of the run."""


def open_sink(name: str, settings: Settings, run: Run, *, step: int) -> Sink:
    """Open a tracker's run, whose next point is that of `step`."""
    match name:
        case "tensorboard":
            return TensorBoard(settings, run, step=step)
        case "csv_monitor":
            return Csv(settings, run)
        case "wandb":
            return Wandb(settings, run)
        case "comet":
            return Comet(settings, run)
        case "trackio":
            return Trackio(settings, run)
        case "mlflow":
            return MlFlow(settings, run)
    raise ValueError(f"no tracker is named {name!r}")


def folder_of(settings: Settings, run: Run) -> Path:
    """Return the folder of a tracker that writes files."""
    return run.base / str(settings["output_path"]) / str(settings["job_name"])


class TensorBoard:
    """Event files in one folder; the viewer drops earlier points of steps that are written again."""

    def __init__(self, settings: Settings, run: Run, *, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder_of(settings, run)), purge_step=step)
        text = "\n".join(f"- {name}: {value}" for name, value in {**run.facts, "run": run.id}.items())
        self._writer.add_text("run", text, step)

    def write(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Csv:
    """A file of (step, value) for each number, as DeepSpeed writes it; rows of repeated steps are removed."""

    def __init__(self, settings: Settings, run: Run) -> None:
        self._folder = folder_of(settings, run)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, Path] = {}

    def write(self, step: int, values: Values) -> None:
        for name, value in values.items():
            with self._file(name, before=step).open("a", newline="") as file:
                csv.writer(file).writerow([step, value])

    def flush(self) -> None:
        """Do nothing: each row is written at once."""

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _file(self, name: str, *, before: int) -> Path:
        if name not in self._files:
            file = self._folder / f"{name.replace('/', '_')}.csv"
            rows = [["step", name], *_rows_before(file, before)]
            partial = file.with_suffix(".partial")
            with partial.open("w", newline="") as opened:
                csv.writer(opened).writerows(rows)
            partial.replace(file)
            self._files[name] = file
        return self._files[name]


def _rows_before(file: Path, step: int) -> list[list[str]]:
    """Return the whole rows of earlier steps; a torn or foreign row is left out."""
    try:
        with file.open(newline="") as opened:
            rows = list(csv.reader(opened))
    except FileNotFoundError:
        return []
    return [row for row in rows if len(row) == 2 and row[0].isdecimal() and int(row[0]) < step]


class Wandb:
    """A run of Weights & Biases, continued by its id. Its key comes from the environment."""

    def __init__(self, settings: Settings, run: Run) -> None:
        import wandb

        self._run = wandb.init(
            project=settings["project"],
            group=settings["group"],
            entity=settings["team"],
            id=run.id,
            name=run.name,
            resume="allow",
            config=dict(run.facts),
            dir=os.environ.get("WANDB_DIR", str(run.base)),
            settings=wandb.Settings(console="off"),
        )
        # Its own counter of steps only rises, and points of repeated steps would be lost.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Values) -> None:
        self._run.log({**values, "step": step})

    def flush(self) -> None:
        """Do nothing: a process of its own sends."""

    def close(self) -> None:
        self._run.finish()


class Comet:
    """An experiment of Comet, continued by its key. Its account's key comes from the environment."""

    def __init__(self, settings: Settings, run: Run) -> None:
        import comet_ml

        self._every = max(1, settings["samples_log_interval"] // run.samples_per_step)
        self._experiment = comet_ml.start(
            project_name=settings["project"],
            workspace=settings["workspace"],
            experiment_key=settings["experiment_key"] or run.id,
            mode=settings["mode"] or "get_or_create",
            online=settings["online"],
        )
        self._experiment.set_name(settings["experiment_name"] or run.name)
        self._experiment.log_others(dict(run.facts))

    def write(self, step: int, values: Values) -> None:
        if step % self._every == 0:
            self._experiment.log_metrics(dict(values), step=step)

    def flush(self) -> None:
        """Do nothing: a thread of its own sends."""

    def close(self) -> None:
        self._experiment.end()


class Trackio:
    """A run in Trackio's local database, continued by its name."""

    def __init__(self, settings: Settings, run: Run) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(run.base / "trackio"))
        import trackio

        self._trackio = trackio
        trackio.init(
            project=settings["project"],
            name=f"{run.name}-{run.id[:8]}",
            resume="allow",
            config=dict(run.facts),
            embed=False,
        )

    def write(self, step: int, values: Values) -> None:
        self._trackio.log(dict(values), step=step)

    def flush(self) -> None:
        """Do nothing: a thread of its own writes."""

    def close(self) -> None:
        self._trackio.finish()


class MlFlow:
    """A run of MLflow, found again by a tag with its id. Credentials come from the environment."""

    def __init__(self, settings: Settings, run: Run) -> None:
        from mlflow import MlflowClient

        store = settings["tracking_uri"] or os.environ.get("MLFLOW_TRACKING_URI")
        if not store:
            store = (run.base / "mlruns").resolve().as_uri()
            # MLflow advises a database, which shared volumes do not carry; plain files need this word.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = MlflowClient(tracking_uri=store)
        self._run_id = self._opened(settings["project"], run)

    def _opened(self, project: str, run: Run) -> str:
        client, tags = self._client, {"zerotrain.run_id": run.id}
        experiment = client.get_experiment_by_name(project)
        where = client.create_experiment(project) if experiment is None else experiment.experiment_id
        found = client.search_runs([where], f"tags.`zerotrain.run_id` = '{run.id}'", max_results=1)
        made = found[0] if found else client.create_run(where, run_name=run.name, tags=tags)
        run_id = str(made.info.run_id)
        client.update_run(run_id, status="RUNNING")
        for name, value in run.facts.items():
            client.set_tag(run_id, f"zerotrain.{name}", value)
        return run_id

    def write(self, step: int, values: Values) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def flush(self) -> None:
        """Do nothing: each point is sent at once."""

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

"""Jobs as local processes: the same job file and the same rules as in the cluster, without one.

This module turns a loaded job into what the launcher reads: rendered configuration files and the launch
environment.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from zerotrain.client.config_source import inlined
from zerotrain.client.jobfile import JobFile
from zerotrain.contract.strict_json import own_json
from zerotrain.contract.train_spec import CONFIG_FILE, TRAIN_SPEC_FILE, TrainSpecError
from zerotrain.contract.worker_environment import LaunchSpec
from zerotrain.operator.api.failures import FailurePolicy
from zerotrain.operator.api.storage import Nvme
from zerotrain.operator.resources.secret import config_files, train_spec

CHECKPOINTS_DIR = "checkpoints"
"""Folder in the run folder that stands for /checkpoints in a worker: the job writes below
checkpoints/<name>."""

SPILL_DIR = "nvme"
"""Folder in the run folder that replaces the job's NVMe volume."""

DEFAULT_GRACE_S = 30.0
LOCAL_UID = "local"


class LocalRunError(ValueError):
    """Error for a valid job that cannot run here; the message says what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalRun:
    """Settings of a local run that do not change between its attempts."""

    name: str
    num_ranks: int
    program: tuple[str, ...]
    """Per-rank command; empty for the built-in trainer."""
    environ: dict[str, str]
    """Variables of podTemplate.env that have a plain value."""
    files: dict[str, str]
    """Texts of the configuration files, by name."""
    total_steps: int | None
    checkpoint: bool
    nvme: Nvme | None
    """NVMe volume of the job; here a folder of the run."""
    grace_s: float
    failure_policy: FailurePolicy
    """Limits and rules for restarts; on one machine there is no other node and no other size to continue
    with."""

    def write_files(self, run_dir: Path) -> None:
        """Write the files that the operator would put into an attempt's Secret. Raises OSError."""
        run_dir.mkdir(parents=True, exist_ok=True)
        if self.nvme is not None:
            (run_dir / SPILL_DIR).mkdir(mode=0o700, exist_ok=True)
        for name, text in self.files.items():
            (run_dir / name).write_text(text)

    def launch_spec(self, run_dir: Path, *, attempt: int, master_port: int) -> LaunchSpec:
        """Return the environment of the single worker that holds all ranks. `run_dir` must be absolute."""
        scratch = attempt_dir(run_dir, attempt)
        nvme = self.nvme
        return LaunchSpec(
            job=self.name,
            job_uid=LOCAL_UID,
            attempt=attempt,
            master_addr="127.0.0.1",
            master_port=master_port,
            world_size=self.num_ranks,
            node_rank=0,
            ranks_per_worker=self.num_ranks,
            config_path=run_dir / CONFIG_FILE,
            train_spec_path=run_dir / TRAIN_SPEC_FILE if TRAIN_SPEC_FILE in self.files else None,
            checkpoint_dir=run_dir / CHECKPOINTS_DIR / self.name if self.checkpoint else None,
            nvme_path=run_dir / SPILL_DIR if nvme is not None else None,
            nvme_bytes=nvme.size.num_bytes if nvme is not None else None,
            nvme_encryption=nvme.encryption.value if nvme is not None and nvme.encryption else None,
            http_host="127.0.0.1",
            http_port=0,
            grace_seconds=self.grace_s,
            termination_log=scratch / "termination.json",
            run_dir=scratch,
        )


def attempt_dir(run_dir: Path, attempt: int) -> Path:
    """Return the scratch folder of one attempt: channel socket, stack dumps, termination message."""
    return run_dir / "attempts" / str(attempt)


def local_run(
    file: JobFile, *, ranks: int | None = None, data: Path | None = None, config: Path | None = None
) -> LocalRun:
    """Return the plan of a local run. `ranks` and `data` override the job, and `config` is the file of its
    ConfigMap if the job file does not contain it.

    Raises JobFileError for what the cluster would reject too, LocalRunError for features that only a cluster
    has, ConfigSourceError if the ConfigMap of spec.configFrom cannot be found.
    """
    file = inlined(file, config)
    file.check()
    spec = file.job.spec
    files = _files(file, data)
    checkpoint = spec.checkpoint
    return LocalRun(
        name=file.job.name,
        num_ranks=ranks or spec.world_size,
        program=spec.program,
        environ=_plain_variables(file),
        files=files,
        total_steps=spec.steps,
        checkpoint=checkpoint is not None,
        nvme=spec.nvme,
        grace_s=float(checkpoint.grace_period_seconds) if checkpoint else DEFAULT_GRACE_S,
        failure_policy=spec.failure_policy,
    )


def _files(file: JobFile, data: Path | None) -> dict[str, str]:
    try:
        files = config_files(file.job)
        spec = train_spec(file.job)
    except TrainSpecError as error:
        raise file.error([("spec.model", str(error))]) from error
    if data is not None and spec is not None:
        record = own_json(spec.to_json())
        files[TRAIN_SPEC_FILE] = json.dumps(
            record | {"data_path": str(data.resolve())}, indent=1, sort_keys=True
        )
    return files


def _plain_variables(file: JobFile) -> dict[str, str]:
    template = file.job.spec.pod_template
    variables = template.env if template is not None else ()
    referring = [variable.name for variable in variables if variable.value_from is not None]
    if referring:
        raise LocalRunError(
            f"{file.source}: spec.podTemplate.env {', '.join(referring)} has valueFrom, which only a cluster "
            "can look up; give value, or set the variable in your shell and remove it from the file"
        )
    return {variable.name: variable.value or "" for variable in variables}

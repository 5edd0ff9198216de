"""Attempts of a job's script, in the folder that the job would have on its checkpoint volume."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tests.support.hf_scripts import Losses, run_script
from tests.support.launcher import launched
from tests.support.ports import free_port
from zerotrain.compat.job.place import SIZE_FILE
from zerotrain.contract.finetune_spec import FINETUNE_FILE, PROGRAM, FinetuneSpec
from zerotrain.contract.worker_environment import LaunchSpec


def run_attempt(
    tmp_path: Path,
    number: int,
    script: Path,
    *arguments: str,
    ranks: int = 2,
    environment: Mapping[str, str] | None = None,
) -> list[Losses]:
    """Run one attempt of a job in its folder; return what each rank recorded. Raises ScriptFailed."""
    job = tmp_path / "job"
    (job / "script").mkdir(parents=True, exist_ok=True)
    spec = LaunchSpec(
        job="demo",
        job_uid="uid-1",
        attempt=number,
        master_addr="127.0.0.1",
        world_size=ranks,
        ranks_per_worker=ranks,
        node_rank=0,
        config_path=tmp_path / "none.json",
        checkpoint_dir=job,
        run_dir=tmp_path / "run",
    )
    if number == 1:
        (job / SIZE_FILE).write_text(json.dumps({"job_uid": "uid-1", "world_size": ranks}))
    own = {name: value for name, value in spec.to_env().items() if name != "MASTER_PORT"}
    return run_script(
        script, job / "script", *arguments, ranks=ranks, environment={**own, **(environment or {})}
    )


def finish_finetune(tmp_path: Path, spec: FinetuneSpec, *, ranks: int = 2) -> tuple[int, str]:
    """Run a fine-tuning under the launcher; return its exit code and its output."""
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"train_micro_batch_size_per_gpu": "auto"}))
    (tmp_path / FINETUNE_FILE).write_text(spec.to_json())
    with launched(
        tmp_path,
        "",
        ranks=ranks,
        command=list(PROGRAM),
        config_path=config,
        checkpoint_dir=tmp_path / "job",
        master_port=free_port(),
    ) as launcher:
        return launcher.finish()

"""deploy/examples: a real API server accepts every file, the operator admits every job, and each is planned.

The small ones also run on a real node, in `test_quickstart.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from tests.support.crd import install_crd
from tests.support.devcluster import REPOSITORY, Cluster
from zerotrain.client.jobfile import load_job
from zerotrain.operator.api.configuration import engine_config
from zerotrain.operator.api.planning import plan_job
from zerotrain.operator.api.validation import refusals

FOLDER = REPOSITORY / "deploy" / "examples"
FILES = sorted(FOLDER.glob("*.yaml"))
JOBS = [path for path in FILES if "kind: ZeroTrainingJob" in path.read_text()]

SCRIPTS = ("hf-trainer.yaml", "sft-lora.yaml", "dpo.yaml", "own-accelerate.yaml")
"""Scripts of others, which `zerotrain launch` runs."""

NOT_PLANNED = {
    "deepspeed-config.yaml": "only the workers read",
    "own-script.yaml": "the program is the user's own",
    **dict.fromkeys(SCRIPTS, "the program is the user's own"),
}
"""Jobs that the operator starts without a verdict, and the reason that it gives."""

WITH_VOLUME = {"gpt.yaml", "gpt-nvme.yaml", "kueue.yaml"}
"""Jobs that use the claim of volume.yaml, as the table says."""

WITH_OWN_CLAIMS = {"hf-finetune.yaml", "llama-70b-one-node.yaml", "gang-topology.yaml"}
"""Jobs that are too large for a claim of an example."""


@pytest.mark.unit
@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_the_operator_would_start_it(path: Path) -> None:
    spec = load_job(path).job.spec
    assert refusals(spec) == ()
    plan = plan_job(spec, base_workers=spec.workers if spec.elastic is not None else None)
    if path.name in NOT_PLANNED:
        assert NOT_PLANNED[path.name] in plan.message
    else:
        assert plan.verdict == "Fits", plan.message


@pytest.mark.unit
@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_its_configuration_is_run_as_written(path: Path) -> None:
    config = engine_config(load_job(path).job.spec)
    if config is not None:
        assert config.unsupported == ()


@pytest.mark.unit
def test_the_planner_finds_the_nearest_setting_for_the_large_one_without_offloading() -> None:
    """The file gives the reason for its offloading: the job does not fit without it."""
    spec = load_job(FOLDER / "llama-70b-one-node.yaml").job.spec
    assert spec.config is not None
    zero = {"stage": spec.config["zero_optimization"]["stage"]}
    changed = spec.model_copy(update={"config": {**spec.config, "zero_optimization": zero}})
    plan = plan_job(changed)
    assert plan.verdict == "DoesNotFit"
    assert "offload_optimizer" in plan.message


@pytest.mark.unit
def test_every_file_is_in_the_table() -> None:
    named = re.findall(r"\]\(([a-z0-9-]+\.yaml)\)", (FOLDER / "README.md").read_text())
    assert sorted(named) == [path.name for path in FILES]


@pytest.mark.unit
def test_names_do_not_clash() -> None:
    """All jobs can be applied to one namespace."""
    names = [load_job(path).job.name for path in JOBS]
    assert len(set(names)) == len(names)


@pytest.mark.unit
def test_claims_are_served_by_the_classes_of_small_clusters() -> None:
    """kind, minikube and k3s reject every access mode but this; the comment says what several nodes need."""
    modes = {
        (path.name, claim["metadata"]["name"]): (
            claim["spec"]["accessModes"],
            "ReadWriteMany" in path.read_text(),
        )
        for path in FILES
        for claim in yaml.safe_load_all(path.read_text())
        if claim["kind"] == "PersistentVolumeClaim"
    }
    assert ("quickstart.yaml", "first-checkpoints") in modes
    assert set(map(str, modes.values())) == {str((["ReadWriteOnce"], True))}


@pytest.mark.unit
def test_the_table_names_the_claims_of_a_job() -> None:
    """A claim that no file makes would leave the pods Pending."""
    documents = {path.name: list(yaml.safe_load_all(path.read_text())) for path in FILES}
    made = {
        name: {item["metadata"]["name"] for item in items if item["kind"] == "PersistentVolumeClaim"}
        for name, items in documents.items()
    }
    used = {
        name: set(re.findall(r"claimName': '([^']+)'", str(items))) - made[name]
        for name, items in documents.items()
    }
    assert {name for name, claims in used.items() if claims & made["volume.yaml"]} == WITH_VOLUME
    assert {name for name, claims in used.items() if claims - made["volume.yaml"]} == WITH_OWN_CLAIMS


@pytest.fixture(scope="module")
def space(control_plane: Cluster) -> Iterator[str]:
    install_crd(control_plane)
    with control_plane.namespace() as name:
        yield name


@pytest.mark.cluster
def test_the_api_server_takes_all_of_them(control_plane: Cluster, space: str) -> None:
    arguments = [part for path in FILES for part in ("-f", str(path))]
    done = control_plane.kubectl("apply", "--dry-run=server", "--validate=strict", "-n", space, *arguments)
    assert "Warning" not in done.stderr
    assert done.stdout.count("zerotrainingjob.zerotrain.dev/") == len(JOBS)


@pytest.mark.cluster
def test_a_mistake_in_one_of_them_would_be_refused(
    control_plane: Cluster, space: str, tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text((FOLDER / "gpt.yaml").read_text().replace("everySteps:", "everyStep:"))
    done = control_plane.kubectl("apply", "--dry-run=server", "-n", space, "-f", str(path), check=False)
    assert done.returncode != 0
    assert "everyStep" in done.stderr

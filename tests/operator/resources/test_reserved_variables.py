"""Variables that the product reads from a rank's environment come from the job alone, whatever an image or a
ConfigMap named by envFrom sets: from the operator's pod over the launcher to the rank, for every variable
there is.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.support.jobs import make_job
from zerotrain.contract.config import load, resolve
from zerotrain.contract.variables import LAUNCH_VARIABLE, SETTABLE, TORCH_VARIABLES, is_reserved
from zerotrain.contract.worker_environment import CommEnv, LaunchSpec, RankEnv, SpillEnv, unfolded
from zerotrain.operator.resources import ResourceOptions, worker_pod
from zerotrain.runtime.launch.process import rank_environment
from zerotrain.runtime.offload.spill import spill_settings

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3]
CONTRACT = {item.metadata["env"] for cls in (LaunchSpec, RankEnv, CommEnv, SpillEnv) for item in fields(cls)}
READ = CONTRACT | set(SETTABLE)

SPILLING = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
SITE = [{"configMapRef": {"name": "site-defaults"}}]
JOBS: dict[str, dict[str, Any]] = {
    "says nothing": {},
    "one worker": {"spec.workers": 1, "spec.checkpoint": {"volume": {"emptyDir": {}}}},
    "a program": {"spec.command": ["python", "train.py"]},
    "spills": {"spec.config": SPILLING, "spec.nvme": {"size": "1Gi"}},
    "gives settings": {
        "spec.podTemplate.env": [{"name": name, "value": f"of the job {name}"} for name in SETTABLE]
    },
}


def rank_sees(changes: dict[str, Any], elsewhere: dict[str, str]) -> dict[str, str]:
    """Return the environment of rank 1 of the job's worker 0 where image and envFrom set `elsewhere`."""
    job = make_job({**changes, "spec.podTemplate.envFrom": SITE})
    (container,) = worker_pod(job, 1, 0, ResourceOptions())["spec"]["containers"]
    # The kubelet gives the variables of the pod precedence, name by name.
    environ = unfolded({**elsewhere, **{item["name"]: item["value"] for item in container["env"]}})
    spec = LaunchSpec.from_env(environ)
    place = {"socket_path": spec.run_dir / "channel", "stacks_path": spec.run_dir / "stacks"}
    return rank_environment(spec, 1, environ, **place)


@pytest.mark.parametrize("name", sorted(READ | {LAUNCH_VARIABLE, "ZEROTRAIN_OF_A_LATER_VERSION"}))
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("value", ["None", "1"])
def test_what_an_image_or_a_configmap_sets_has_no_effect(job: str, name: str, value: str) -> None:
    assert rank_sees(JOBS[job], {name: value, "LANG": "C"}) == rank_sees(JOBS[job], {"LANG": "C"})


def test_the_spill_is_encrypted_whatever_a_configmap_contains() -> None:
    environ = rank_sees(JOBS["spills"], {"ZEROTRAIN_NVME_ENCRYPTION": "None"})
    settings = spill_settings(resolve(load(SPILLING), world_size=4), environ, world_size=4)
    assert settings is not None
    assert settings.encryption == "AEAD"


def test_the_operator_writes_every_variable_of_a_launcher_into_one() -> None:
    (container,) = worker_pod(make_job(), 1, 0, ResourceOptions())["spec"]["containers"]
    (text,) = [item["value"] for item in container["env"] if is_reserved(item["name"])]
    assert set(json.loads(text)) == {item.metadata["env"] for item in fields(LaunchSpec)}


def test_every_variable_that_the_code_names_is_reserved_and_of_the_contract_or_settable() -> None:
    assert {name for name in CONTRACT if not is_reserved(name)} == set()
    assert {name for name in CONTRACT if not name.startswith("ZEROTRAIN_")} == TORCH_VARIABLES
    assert not set(SETTABLE) & {item.metadata["env"] for cls in (LaunchSpec, RankEnv) for item in fields(cls)}
    sources = [*(ROOT / "runtime").rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp")]
    named = {name for path in sources for name in re.findall(r'"(ZEROTRAIN_[A-Z_]+[A-Z])"', path.read_text())}
    assert named == {name for name in READ if name.startswith("ZEROTRAIN_")} | {LAUNCH_VARIABLE}


@pytest.mark.parametrize("name", SETTABLE)
def test_a_job_gives_a_setting_by_its_own_name_and_value(name: str) -> None:
    env = {"spec.podTemplate.env": [{"name": name, "value": "of the job"}]}
    assert rank_sees(env, {name: "of the image"})[name] == "of the job"
    source = {"configMapKeyRef": {"name": "site-defaults", "key": "a"}}
    with pytest.raises(ValidationError, match=r"(?s)podTemplate.env.*.*without valueFrom"):
        make_job({"spec.podTemplate.env": [{"name": name, "valueFrom": source}]})


@pytest.mark.parametrize("name", sorted(READ - set(SETTABLE) | {LAUNCH_VARIABLE, "ZEROTRAIN_ANY"}))
def test_a_job_cannot_give_any_other(name: str) -> None:
    with pytest.raises(ValidationError, match=r"(?s)podTemplate.env.*the operator sets these"):
        make_job({"spec.podTemplate.env": [{"name": name, "value": "1"}]})


def test_the_kubelet_replaces_nothing_in_the_variable() -> None:
    """The kubelet replaces $(NAME) by other variables, which a ConfigMap may hold by valueFrom."""
    path = "/nvme$(SITE)"
    changes = {"spec.config": SPILLING, "spec.nvme": {"size": "1Gi", "mountPath": path}}
    (container,) = worker_pod(make_job(changes), 1, 0, ResourceOptions())["spec"]["containers"]
    (text,) = [item["value"] for item in container["env"] if item["name"] == LAUNCH_VARIABLE]
    assert "$" not in text
    assert rank_sees(changes, {})["ZEROTRAIN_NVME_PATH"] == path

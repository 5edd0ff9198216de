"""Service, Secret and NetworkPolicy of a job."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from tests.support.jobs import ABSENT, make_job
from zerotrain.contract.channel_token import derive
from zerotrain.contract.train_spec import TrainSpec
from zerotrain.operator.constants import LABEL_JOB, LABEL_JOB_UID
from zerotrain.operator.reconcile.yield_request import frozen_hash
from zerotrain.operator.resources import (
    ResourceOptions,
    attempt_secret,
    build,
    headless_service,
    network_policy,
    secret_name,
    service_name,
)
from zerotrain.operator.resources.secret import config_files

pytestmark = pytest.mark.unit


KEY = b"k" * 32
OPTIONS = ResourceOptions()
OWN_PROGRAM = {"spec.command": ["python", "train.py"]}
Json = dict[str, Any]


def _by_kind(objects: list[Json]) -> dict[str, Json]:
    return {item["kind"]: item for item in objects}


def test_every_object_goes_with_its_job() -> None:
    job = make_job()
    for item in build(job, 3, KEY, OPTIONS):
        meta = item["metadata"]
        (owner,) = meta["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("ZeroTrainingJob", job.uid, True)
        assert owner["blockOwnerDeletion"] is False
        assert meta["namespace"] == "ml"
        assert (meta["labels"][LABEL_JOB], meta["labels"][LABEL_JOB_UID]) == ("gpt", job.uid)
        assert meta["labels"]["app.kubernetes.io/name"] == "zerotrain"


def test_names_and_order() -> None:
    job = make_job(OWN_PROGRAM)
    built = [(item["kind"], item["metadata"]["name"]) for item in build(job, 2, KEY, OPTIONS)]
    assert built == [
        ("Service", service_name(job)),
        ("NetworkPolicy", "gpt"),
        ("Secret", secret_name(job, 2)),
        ("Pod", "gpt-2-0"),
        ("Pod", "gpt-2-1"),
    ]


def test_no_two_contents_have_one_name() -> None:
    """An existing object of the name is taken for the attempt's own.

    Garbage collection of a deleted job of the same name may be late, and an attempt may be begun anew from
    another spec.
    """
    spec = make_job({"spec.steps": 7}).spec
    changes: list[Json] = [
        {},
        {"metadata.uid": "another-life"},
        {"status.shape.frozenHash": frozen_hash(spec)},
    ]
    names = {secret_name(make_job({"status.shape.workers": 2, **change}), 1) for change in changes}
    assert len(names | {secret_name(make_job(), 2)}) == 4
    assert all(name.startswith("gpt-1-files-") for name in names)


def test_objects_are_plain_json_and_reproducible() -> None:
    once, again = (json.dumps(build(make_job(), 1, KEY, OPTIONS)) for _ in range(2))
    assert once == again


@pytest.mark.parametrize("changes", [{}, OWN_PROGRAM], ids=["the trainer", "a program of the user's"])
def test_the_service_is_headless_and_names_pods_before_they_are_ready(changes: Json) -> None:
    job = make_job(changes)
    found = headless_service(job)
    assert found is not None
    assert found["spec"]["clusterIP"] == "None"
    assert found["spec"]["publishNotReadyAddresses"] is True
    assert {port["port"] for port in found["spec"]["ports"]} == {8471, 29400}


def test_the_trainer_reads_back_the_jobs_values() -> None:
    job = make_job({"spec.seed": 7, "spec.logEverySteps": 5, "spec.checkpoint.everySeconds": 60})
    spec = TrainSpec.from_json(config_files(job)["train.json"])
    assert spec.model.gpt is not None
    assert (spec.model.gpt.d_model, spec.model.gpt.context) == (64, 64)
    assert (spec.data_path, spec.steps, spec.seed, spec.log_every_steps) == (
        "builtin:python-stdlib",
        100,
        7,
        5,
    )
    policy = spec.checkpoint
    assert (policy.every_steps, policy.every_seconds, policy.keep_last) == (20, 60, 3)
    assert (policy.on_termination, policy.resume_from) == (True, "Latest")


def test_a_factory_and_its_arguments_reach_the_trainer() -> None:
    factory = {"function": "pkg.mod:build", "args": {"depth": [1, 2]}, "context": 16}
    spec = TrainSpec.from_json(config_files(make_job({"spec.model": {"factory": factory}}))["train.json"])
    assert (spec.model.factory, spec.model.factory_args, spec.context) == (
        "pkg.mod:build",
        {"depth": [1, 2]},
        16,
    )


def test_the_configuration_is_passed_on_as_written() -> None:
    job = make_job({"spec.config.optimizer": {"type": "AdamW", "params": {"lr": 5e-6}}})
    assert json.loads(config_files(job)["ds_config.json"]) == job.spec.config


def test_a_configuration_by_reference_is_not_copied() -> None:
    source = {"configMapKeyRef": {"name": "ds", "key": "c.json"}}
    assert set(config_files(make_job({"spec.config": ABSENT, "spec.configFrom": source}))) == {"train.json"}


def test_a_program_of_ones_own_needs_no_training_part() -> None:
    changes = {f"spec.{field}": ABSENT for field in ("model", "data", "steps")}
    assert set(config_files(make_job({**changes, "spec.command": ["a"]}))) == {"ds_config.json"}


def test_the_files_are_those_of_this_attempt_and_cannot_be_changed() -> None:
    job = make_job()
    secret = attempt_secret(job, 4, KEY)
    assert (secret["type"], secret["immutable"]) == ("Opaque", True)
    files = {name: base64.b64decode(text).decode() for name, text in secret["data"].items()}
    assert files == {**config_files(job), "token": derive(KEY, job.uid, 4)}
    assert secret["data"]["token"] != attempt_secret(job, 5, KEY)["data"]["token"]


def test_a_short_operator_key_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 32 bytes"):
        attempt_secret(make_job(), 1, b"short")


def test_the_network_is_closed_but_for_ranks_operator_and_monitoring() -> None:
    job = make_job()
    spec = network_policy(job, ResourceOptions(operator_namespace="ops", monitoring_namespace="mon"))["spec"]
    ours = {"podSelector": {"matchLabels": {LABEL_JOB: "gpt", LABEL_JOB_UID: job.uid}}}
    assert spec["podSelector"] == ours["podSelector"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    ranks, callers = spec["ingress"]
    assert ranks == {"from": [ours]}
    assert callers["ports"] == [{"protocol": "TCP", "port": 8471}]
    operator, monitoring = callers["from"]
    assert operator["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "ops"}
    assert operator["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "operator"
    assert monitoring == {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "mon"}}}


def test_ranks_reach_each_other_and_dns_alone() -> None:
    out = network_policy(make_job(), OPTIONS)["spec"]["egress"]
    assert len(out) == 2
    assert "ports" not in out[0]
    assert {port["port"] for port in out[1]["ports"]} == {53, 5353}
    assert all("to" in rule for rule in out)


def test_dns_is_where_the_installer_configured_it() -> None:
    options = ResourceOptions(
        dns_namespace="openshift-dns", dns_labels={"dns": "default"}, dns_cidrs=("169.254.20.10/32",)
    )
    dns = network_policy(make_job(), options)["spec"]["egress"][1]
    assert dns["to"] == [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "openshift-dns"}},
            "podSelector": {"matchLabels": {"dns": "default"}},
        },
        {"ipBlock": {"cidr": "169.254.20.10/32"}},
    ]
    assert {port["port"] for port in dns["ports"]} == {53, 5353}


def test_further_destinations_are_the_installers_choice() -> None:
    options = ResourceOptions(extra_egress_cidrs=("10.0.0.0/8",), extra_http_cidrs=("192.0.2.1/32",))
    spec = network_policy(make_job(), options)["spec"]
    assert spec["egress"][-1] == {"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}
    assert spec["ingress"][1]["from"][-1] == {"ipBlock": {"cidr": "192.0.2.1/32"}}

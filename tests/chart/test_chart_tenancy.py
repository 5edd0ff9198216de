"""Tenants that forge metrics, and several releases in one cluster: which jobs each release's alerts are
about.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from deploy.monitoring.config import worker_limits
from tests.support.helm import Helm, named
from tests.support.tools import run_program

pytestmark = pytest.mark.tools


MONITORS = {kind: {"enabled": True} for kind in ("podMonitor", "serviceMonitor", "prometheusRule")}
Manifests = list[dict[str, Any]]


def release(helm: Path, home: Path, namespace: str, **values: Any) -> Manifests:
    renderer = Helm(program=helm, home=home, namespace=namespace)
    return renderer.template({**MONITORS, "watch": {"namespaces": [f"{namespace}-jobs"]}, **values})


def groups(manifests: Manifests) -> list[dict[str, Any]]:
    rules = [item for item in manifests if item["kind"] == "PrometheusRule"]
    return [group for item in rules for group in item["spec"]["groups"]]


def test_the_pod_monitor_bounds_and_drops_as_the_development_servers_do(helm: Path, tmp_path: Path) -> None:
    """A real Prometheus shows the effect of these settings in tests/monitoring."""
    mine = {"sourceLabels": ["__name__"], "regex": "mine", "action": "drop"}
    monitors = MONITORS | {"podMonitor": {"enabled": True, "metricRelabelings": [mine]}}
    monitor = named(release(helm, tmp_path, "a", **monitors), "PodMonitor")["spec"]
    limits = worker_limits()
    (drop,) = limits["metric_relabel_configs"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["metricRelabelings"] == [
        {"sourceLabels": drop["source_labels"], "regex": drop["regex"], "action": "drop"},
        mine,
    ]
    for ours, theirs in (
        ("sample_limit", "sampleLimit"),
        ("label_value_length_limit", "labelValueLengthLimit"),
        ("body_size_limit", "bodySizeLimit"),
    ):
        assert monitor[theirs] == limits[ours]
    assert endpoint["followRedirects"] is limits["follow_redirects"] is False
    assert endpoint["relabelings"][0] == {
        "sourceLabels": ["__meta_kubernetes_pod_container_name"],
        "regex": "worker",
        "action": "keep",
    }


def test_buckets_of_other_ranks_are_dropped_where_that_is_asked_for(helm: Path, tmp_path: Path) -> None:
    monitors = MONITORS | {"podMonitor": {"enabled": True, "buckets": "firstRank"}}
    (endpoint,) = named(release(helm, tmp_path, "a", **monitors), "PodMonitor")["spec"]["podMetricsEndpoints"]
    rule = endpoint["metricRelabelings"][1]
    assert (rule["sourceLabels"], rule["action"]) == (["__name__", "rank"], "drop")
    dropped = re.compile(rule["regex"])
    assert dropped.fullmatch("zerotrain_step_duration_seconds_bucket;12")
    for kept in (
        "zerotrain_step_duration_seconds_bucket;0",
        "zerotrain_step_duration_seconds_sum;12",
        "my_bucket;3",
    ):
        assert not dropped.fullmatch(kept)


def test_releases_of_one_name_share_no_object_in_the_namespace_of_monitoring(
    helm: Path, tmp_path: Path
) -> None:
    def names(namespace: str) -> set[tuple[str, str]]:
        found = release(
            helm,
            tmp_path,
            namespace,
            monitoring={"namespace": "monitoring"},
            dcgm={"enabled": True, "namespace": "monitoring"},
        )
        return {
            (item["kind"], item["metadata"]["name"])
            for item in found
            if item["metadata"].get("namespace") == "monitoring"
        }

    first, second = names("research"), names("production")
    assert len(first) == len(second) >= 12
    assert not first & second
    assert {kind for kind, _ in first} == {"PodMonitor", "ServiceMonitor", "PrometheusRule", "ConfigMap"}


def test_a_second_release_brings_the_alerts_on_its_own_operator_alone(helm: Path, tmp_path: Path) -> None:
    rules = {"enabled": True, "jobs": False, "disabled": ["ZeroTrainJobStalled"]}
    found = groups(release(helm, tmp_path, "second", prometheusRule=rules))
    assert [group["name"] for group in found] == ["zerotrain-operator"]
    assert {group["name"] for group in groups(release(helm, tmp_path, "first"))} > {"zerotrain-operator"}


@pytest.mark.parametrize(
    ("series", "fires"),
    [
        ('zerotrain_operator_leader{namespace="mine"}', False),
        ('zerotrain_operator_leader{namespace="theirs"}', True),
    ],
)
def test_another_operator_does_not_keep_the_alert_quiet(
    helm: Path, promtool: Path, tmp_path: Path, series: str, fires: bool
) -> None:
    own = [
        group for group in groups(release(helm, tmp_path, "mine")) if group["name"] == "zerotrain-operator"
    ]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": own}))
    (down,) = (rule for rule in own[0]["rules"] if rule["alert"] == "ZeroTrainOperatorDown")
    alert = {
        "exp_labels": {**down["labels"], "namespace": "mine"},
        "exp_annotations": down["annotations"],
    }
    test = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "30s",
        "tests": [
            {
                "interval": "30s",
                "input_series": [{"series": series, "values": "1x30"}],
                "alert_rule_test": [
                    {"eval_time": "10m", "alertname": down["alert"], "exp_alerts": [alert] if fires else []}
                ],
            }
        ],
    }
    (tmp_path / "test.yaml").write_text(json.dumps(test))
    assert "SUCCESS" in run_program([promtool, "test", "rules", tmp_path / "test.yaml"])

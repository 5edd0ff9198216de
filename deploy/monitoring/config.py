"""The configuration of Prometheus and Alertmanager.

It is written as JSON, which is valid YAML.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from deploy.monitoring.access import Access

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "dashboards" / "rules"
INHIBITION = ROOT / "dashboards" / "alertmanager" / "alertmanager.yaml"
WORKERS = "zerotrain-workers"
OPERATOR = "zerotrain-operator"
TEST_ALERT = "ZeroTrainTest"

_POD = "__meta_kubernetes_pod"
_RUNNING = "Pending|Running"


def prometheus_config(
    access: Access, *, kubeconfig: Path, alertmanager: str, rules: list[str], interval_s: int
) -> dict[str, Any]:
    """Return a configuration that scrapes all workers and operators through the API server's pod proxy."""
    interval = f"{interval_s}s"
    return {
        "global": {
            "scrape_interval": interval,
            "scrape_timeout": f"{min(interval_s, 10)}s",
            "evaluation_interval": interval,
        },
        "rule_files": rules,
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
        "scrape_configs": [
            _scrape(WORKERS, access, kubeconfig, component="worker", honor_labels=False) | worker_limits(),
            # Series of a job have the job's namespace, not the operator's.
            _scrape(OPERATOR, access, kubeconfig, component="operator", honor_labels=True),
        ],
    }


def worker_limits() -> dict[str, Any]:
    """Return the limits for workers, which run tenants' programs.

    Number and size of their samples are bounded, names that only operator, rules and DCGM use are dropped,
    and redirects, which could lead to what only Prometheus may reach, are not followed, as in the chart's
    PodMonitor.
    """
    forged = "zerotrain_operator_.*|zerotrain_job_.*|.*:.*|DCGM_.*|ALERTS.*"
    return {
        "sample_limit": 20_000,
        "label_value_length_limit": 1024,
        "body_size_limit": "8MB",
        "follow_redirects": False,
        "metric_relabel_configs": [{"source_labels": ["__name__"], "regex": forged, "action": "drop"}],
    }


def alertmanager_config() -> dict[str, Any]:
    """Return a configuration that keeps alerts for the page and API and sends none.

    An alert is inhibited while a more severe one fires.
    """
    return {
        "route": {
            "receiver": "page-and-api-only",
            "group_by": ["namespace", "job_name"],
            "group_wait": "1s",
            "group_interval": "10s",
        },
        "receivers": [{"name": "page-and-api-only"}],
        "inhibit_rules": YAML(typ="safe", pure=True).load(INHIBITION.read_text())["inhibit_rules"],
    }


def test_alert_rules() -> dict[str, Any]:
    """Return a rule of an alert that fires for every job whose metrics arrive.

    It shows that scraping, rules and Alertmanager work together before a real alert relies on it.
    """
    rule = {
        "alert": TEST_ALERT,
        "expr": "max by (namespace, job_name) (zerotrain_step) > 0",
        "labels": {"severity": "info"},
        "annotations": {
            "summary": "Test: {{ $labels.namespace }}/{{ $labels.job_name }} has done {{ $value }} steps",
            "description": "Fires for every job that makes steps. It is loaded by --test-alert only.",
        },
    }
    return {"groups": [{"name": "zerotrain-test", "rules": [rule]}]}


def _scrape(
    name: str, access: Access, kubeconfig: Path, *, component: str, honor_labels: bool
) -> dict[str, Any]:
    return {
        "job_name": name,
        "honor_labels": honor_labels,
        "scheme": access.scheme,
        **access.settings,
        "kubernetes_sd_configs": [{"role": "pod", "kubeconfig_file": str(kubeconfig.resolve())}],
        "relabel_configs": [
            _keep(f"{_POD}_label_app_kubernetes_io_name", "zerotrain"),
            _keep(f"{_POD}_label_app_kubernetes_io_component", component),
            _keep(f"{_POD}_container_port_name", "http"),
            _keep(f"{_POD}_container_name", component),
            _keep(f"{_POD}_phase", _RUNNING),
            {
                "source_labels": [
                    "__meta_kubernetes_namespace",
                    f"{_POD}_name",
                    f"{_POD}_container_port_number",
                ],
                "regex": "(.+);(.+);(.+)",
                "target_label": "__metrics_path__",
                "replacement": "/api/v1/namespaces/$1/pods/$2:$3/proxy/metrics",
            },
            _label("__meta_kubernetes_namespace", "namespace"),
            _label(f"{_POD}_name", "pod"),
            _label(f"{_POD}_node_name", "node"),
            _label(f"{_POD}_container_name", "container"),
            # All targets are scraped at one address: without this label all would be the same instance.
            _label("__address__", "instance"),
            {"target_label": "__address__", "replacement": access.host},
        ],
    }


def _keep(label: str, regex: str) -> dict[str, Any]:
    return {"source_labels": [label], "regex": regex, "action": "keep"}


def _label(source: str, target: str) -> dict[str, Any]:
    return {"source_labels": [source], "target_label": target}

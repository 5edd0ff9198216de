"""The chart's files that are generated from other folders.

`make generate` and the tests call this module. A chart can read only files inside its own folder, so these
files are copies, and a test compares them. The roles come from deploy/kustomize, whose rules are tested
against every request of the operator.
"""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from deploy.chart.reference import table

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "zerotrain"
KUSTOMIZE = ROOT / "deploy" / "kustomize"
GENERATED_FOLDER = Path("files", "generated")
"""Folder of the chart that holds only generated files."""

CLUSTER_SCOPED = frozenset({"nodes", "priorityclasses", "resourceflavors", "storageclasses"})
"""Cluster-scoped resources in the operator's rules, which a Role cannot grant."""

BEGIN, END = "<!-- values: begin -->", "<!-- values: end -->"
_HEADER = "# Generated from {source} by `python -m deploy.chart`; do not edit.\n"


def generated() -> dict[Path, str]:
    """Return the text of every generated file by its path."""
    files = CHART / GENERATED_FOLDER
    found = {
        files / "crds" / path.name: path.read_text() for path in (ROOT / "crds").glob("zerotrain.dev_*.yaml")
    }
    found[files / "policy" / "jobs.yaml"] = (ROOT / "deploy" / "policy" / "jobs.yaml").read_text()
    found[files / "rbac" / "operator.yaml"] = _operator_rules()
    found[files / "rbac" / "lease.yaml"] = _lease_rules()
    found[files / "rbac" / "users.yaml"] = _user_roles()
    found |= {
        files / "rules" / path.name: path.read_text()
        for path in (ROOT / "dashboards" / "rules").glob("*.yaml")
    }
    found |= {
        files / "dashboards" / path.name: path.read_text() for path in (ROOT / "dashboards").glob("*.json")
    }
    found[CHART / "README.md"] = _readme()
    return found


def differences() -> list[Path]:
    """Return the generated files that are missing, that differ, or that have no source any more."""
    wanted = generated()
    changed = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    return sorted([*changed, *_orphans(wanted)])


def write() -> None:
    """Write all generated files, and delete those without a source."""
    wanted = generated()
    for path in _orphans(wanted):
        path.unlink()
    for path, text in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _orphans(wanted: dict[Path, str]) -> list[Path]:
    present = (CHART / GENERATED_FOLDER).rglob("*")
    return [path for path in present if path.is_file() and path not in wanted]


def _operator_rules() -> str:
    (role,) = _documents("cluster_role.yaml")
    parts: dict[str, list[Any]] = {"cluster": [], "namespaced": []}
    for rule in role["rules"]:
        kinds = {resource in CLUSTER_SCOPED for resource in rule["resources"]}
        if len(kinds) > 1:
            raise ValueError(
                f"cluster_role.yaml: {rule['resources']} mixes resources with and without a namespace"
            )
        parts["cluster" if kinds.pop() else "namespaced"].append(rule)
    return _text(parts, "deploy/kustomize/cluster_role.yaml")


def _lease_rules() -> str:
    role = _documents("lease_role.yaml")[0]
    return _text({"rules": role["rules"]}, "deploy/kustomize/lease_role.yaml")


def _user_roles() -> str:
    """Return the users' roles with those labels that aggregate them; the chart adds its own labels."""
    roles = [
        {
            "name": role["metadata"]["name"].removeprefix("zerotrain-"),
            "labels": {
                key: value
                for key, value in role["metadata"]["labels"].items()
                if key.startswith("rbac.authorization.k8s.io/")
            },
            "rules": role["rules"],
        }
        for role in _documents("user_roles.yaml")
    ]
    return _text({"roles": roles}, "deploy/kustomize/user_roles.yaml")


def _documents(name: str) -> list[dict[str, Any]]:
    return list(YAML(typ="safe", pure=True).load_all((KUSTOMIZE / name).read_text()))


def _text(document: dict[str, Any], source: str) -> str:
    writer = YAML(typ="safe", pure=True)
    writer.default_flow_style = False
    writer.width = 120
    out = StringIO()
    writer.dump(document, out)
    return _HEADER.format(source=source) + out.getvalue()


def _readme() -> str:
    """Return the README with its table of values replaced."""
    text = (CHART / "README.md").read_text()
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{CHART / 'README.md'} needs the lines {BEGIN} and {END}; the values go between")
    return f"{before}{BEGIN}\n{table((CHART / 'values.yaml').read_text())}{END}{after}"

"""The CRD on a real API server, and what the API server says to jobs applied with kubectl."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.support.devcluster import Cluster, wait_until
from tests.support.jobs import job_json

CRD_FILE = Path(__file__).parents[2] / "crds" / "zerotrain.dev_zerotrainingjobs.yaml"
CRD_NAME = "zerotrainingjobs.zerotrain.dev"


def install_crd(cluster: Cluster) -> str:
    """Apply crds/ and wait until it is served; returns what kubectl printed. Safe to repeat."""
    applied = cluster.kubectl("apply", "-f", str(CRD_FILE))
    wait_established(cluster, CRD_NAME)
    # Discovery and OpenAPI follow a little later; kubectl needs both for short names and explain.
    wait_until(
        lambda: cluster.kubectl("explain", "ztj.spec", check=False).returncode == 0,
        "kubectl explain ztj.spec",
    )
    return f"{applied.stdout}{applied.stderr}"


def wait_established(cluster: Cluster, *names: str) -> None:
    """Until these CRDs are served. `kubectl wait` gives up on one that has no conditions at all yet."""
    for name in names:
        wait_until(
            lambda name=name: any(
                item["type"] == "Established" and item["status"] == "True"
                for item in cluster.get("crd", name).get("status", {}).get("conditions") or ()
            ),
            f"{name} to be established",
        )


def applied_job(name: str, namespace: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """A job as a user writes it: nothing but name, namespace and spec."""
    job = job_json(changes)
    job["metadata"] = {"name": name, "namespace": namespace}
    return job


def apply_all(cluster: Cluster, jobs: Iterable[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    """One `kubectl apply` of all jobs: kubectl goes on after a refusal and prints one line for each."""
    documents = "".join(f"---\n{json.dumps(job)}\n" for job in jobs)
    return cluster.kubectl("apply", "-f", "-", input=documents, check=False)


def refusals_by_name(text: str) -> dict[str, str]:
    """kubectl's messages by the name of the object: `... "NAME" is invalid: ...`, continuation lines kept."""
    found: dict[str, str] = {}
    current = ""
    for line in text.splitlines():
        if line.startswith(("The ", "Error ")):
            current = _name_in(line)
        if current:
            found[current] = f"{found.get(current, '')}{line}\n"
    return found


def _name_in(line: str) -> str:
    """The last quoted word before `is invalid`, or the only one that is no path."""
    head = line.split(" is invalid", 1)[0]
    return head.rsplit('"', 2)[1] if head.count('"') >= 2 else ""

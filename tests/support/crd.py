"""The CRD on a real API server, and the API server's answers to jobs applied with kubectl."""

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
    """Apply crds/ and wait until the CRD is served; return kubectl's output. Safe to repeat."""
    applied = cluster.kubectl("apply", "-f", str(CRD_FILE))
    wait_established(cluster, CRD_NAME)
    # Discovery and OpenAPI are updated a little later; kubectl needs both for short names and explain.
    wait_until(
        lambda: cluster.kubectl("explain", "ztj.spec", check=False).returncode == 0,
        "kubectl explain ztj.spec",
    )
    return f"{applied.stdout}{applied.stderr}"


def wait_established(cluster: Cluster, *names: str) -> None:
    """Wait until these CRDs are served. `kubectl wait` fails for a CRD that has no conditions yet."""
    for name in names:
        wait_until(
            lambda name=name: any(
                item["type"] == "Established" and item["status"] == "True"
                for item in cluster.get("crd", name).get("status", {}).get("conditions") or ()
            ),
            f"{name} to be established",
        )


def applied_job(name: str, namespace: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job as a user writes it: only name, namespace and spec."""
    job = job_json(changes)
    job["metadata"] = {"name": name, "namespace": namespace}
    return job


def apply_all(cluster: Cluster, jobs: Iterable[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    """Apply all jobs with one `kubectl apply`, which goes on after a rejection; it prints a line per job."""
    documents = "".join(f"---\n{json.dumps(job)}\n" for job in jobs)
    return cluster.kubectl("apply", "-f", "-", input=documents, check=False)


def refusals_by_name(text: str) -> dict[str, str]:
    """Return kubectl's messages by object name: `... "NAME" is invalid: ...` and its continuation lines."""
    found: dict[str, str] = {}
    current = ""
    for line in text.splitlines():
        if line.startswith(("The ", "Error ")):
            current = _name_in(line)
        if current:
            found[current] = f"{found.get(current, '')}{line}\n"
    return found


def _name_in(line: str) -> str:
    """Return the last quoted word before `is invalid`, or in the whole line if it has none."""
    head = line.split(" is invalid", 1)[0]
    return head.rsplit('"', 2)[1] if head.count('"') >= 2 else ""

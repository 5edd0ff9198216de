"""Rules that hold during attacks: no raw text is stored or shown, and the operator is healthy."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.hostile.texts import FORGED, raw_characters, raw_texts
from tests.operator.operator_process import OperatorProcess
from tests.support.commands import zerotrain
from tests.support.devcluster import Cluster
from tests.support.kube_json import KubeJson
from zerotrain.operator.constants import FIELD_MANAGER

Json = dict[str, Any]

STATUSES = 'jsonpath={range .items[*]}{.metadata.namespace}{"/"}{.metadata.name}{"\\t"}{.status}{"\\n"}{end}'
"""Query for statuses only, as kubectl can read specs that no parser here survives."""

OUR_KINDS = "configmaps,services,networkpolicies,poddisruptionbudgets,podgroups"
_TASK_ENDED = re.compile(r"task '[^']*' ended")


def statuses(cluster: Cluster, *where: str) -> dict[str, Json]:
    """Return the status of every job by namespace/name."""
    found = {}
    for line in cluster.kubectl("get", "ztj", *(where or ("-A",)), "-o", STATUSES).stdout.split("\n"):
        name, _, text = line.partition("\t")
        if name:
            found[name] = json.loads(text) if text else {}
    return found


def stored_complaints(cluster: Cluster, api: KubeJson, namespace: str) -> list[str]:
    """Return raw text in the status of any job, in events of jobs, and in objects that the operator wrote."""
    found = [
        f"status of {name}: {wrong}"
        for name, status in statuses(cluster).items()
        for wrong in raw_texts(status)
    ]
    for event in api.get("/apis/events.k8s.io/v1/events")["items"]:
        if event.get("regarding", {}).get("kind") == "ZeroTrainingJob":
            texts = {key: event.get(key) for key in ("note", "reason", "action", "reportingInstance")}
            found += [f"event {event['metadata']['name']}: {wrong}" for wrong in raw_texts(texts)]
    for item in api.get(f"/api/v1/namespaces/{namespace}/configmaps")["items"]:
        if _is_ours(item):
            found += [f"{item['metadata']['name']}: {wrong}" for wrong in raw_texts(item.get("data", {}))]
    return found


def _is_ours(item: Json) -> bool:
    managers = {entry.get("manager") for entry in item["metadata"].get("managedFields", ())}
    return (
        FIELD_MANAGER in managers
        or item["metadata"].get("labels", {}).get("app.kubernetes.io/managed-by") == FIELD_MANAGER
    )


def operator_complaints(operator: OperatorProcess, *, may_say: str = "") -> list[str]:
    """Return complaints from the operator's own HTTP server and log.

    Further lines of /readyz may contain `may_say`, as the operator is ready all the same.
    """
    responses = {path: operator.get(path).strip() for path in ("/healthz", "/readyz")}
    if may_say:
        lines = responses["/readyz"].split("\n")
        responses["/readyz"] = "\n".join([lines[0], *(line for line in lines[1:] if may_say not in line)])
    found = [
        f"{path} says {words[:300] or 'nothing'!r}" for path, words in responses.items() if words != "ok"
    ]
    log = operator.log.read_text(errors="replace")
    found += [f"log: {line[0]}" for line in _TASK_ENDED.finditer(log)]
    found += list(metrics_complaints(operator.get("/metrics")))
    return found


def metrics_complaints(text: str) -> Iterator[str]:
    """Yield text that is not an exposition, and raw text in names, labels and help."""
    if not text:
        yield "/metrics does not answer"
    yield from (f"/metrics: {found}" for found in raw_characters(text))
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                yield from (f"/metrics {sample.name}: {wrong}" for wrong in raw_texts(dict(sample.labels)))
    except ValueError as error:
        yield f"/metrics cannot be read: {error}"


def command_complaints(cluster: Cluster, names: list[str], *args: str) -> list[str]:
    """Return complaints unless the command ends with 0, prints all `names` and nothing raw."""
    done = zerotrain(*args, kubeconfig=cluster.kubeconfig)
    command = " ".join(args)
    found = [f"zerotrain {command}: exit {done.code}, {done.err[-600:]}"] if done.code else []
    missing = [name for name in names if name not in done.out]
    if missing and not done.code:
        found.append(f"zerotrain {command} lists all but {missing[:5]}")
    found += [f"zerotrain {command} prints {wrong}" for wrong in raw_characters(done.out + done.err)]
    if any(line.startswith(FORGED) for line in done.out.split("\n")):
        found.append(f"zerotrain {command} prints a forged line")
    return found

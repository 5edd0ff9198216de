"""The checks inside the cluster: two pods of the restricted level and two NetworkPolicies.

All of them are deleted afterwards. One pod runs the local checks on a worker's node and listens on two ports,
of which its policy opens one. The other pod tries both ports and the API server, which its own policy does
not open. A connection that succeeds although the policy forbids it shows that the cluster does not enforce
policies.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerotrain.cli.doctor.finding import Finding, from_records
from zerotrain.cli.errors import CliError
from zerotrain.client.command_exits import CommandExit
from zerotrain.client.errors import ClientError, ForbiddenError, InvalidJobError, NotFoundError
from zerotrain.client.lenient_json import Fields
from zerotrain.client.observed import Pod
from zerotrain.contract.strict_json import strict_json
from zerotrain.contract.text import printable
from zerotrain.operator.constants import APP_NAME, LABEL_HELPER
from zerotrain.operator.resources.container import container_security_context, pod_security_context

if TYPE_CHECKING:
    from zerotrain.client import Client

OPEN_PORT, CLOSED_PORT = 7001, 7002
HELPER = "doctor"
ROLE_LABEL = "zerotrain.dev/doctor"
COMMAND = ("python", "-m", "zerotrain.cli", "doctor", "-o", "json")
SPILL, SCRATCH = "/spill", "/tmp"
POLL_S = 0.5
LISTEN_S = 90
MAX_LOG_BYTES = 1 << 20
RIGHTS = "ask for the rights to create, get and delete pods, pods/log and networkpolicies in the namespace"


@dataclass(frozen=True, kw_only=True, slots=True)
class PodRequest:
    """Requested properties of the pods."""

    image: str
    node: str | None
    storage_class: str | None
    size: str
    gpus: int
    timeout_s: float
    pull_policy: str | None = None


class Examination:
    """One run of the checks. All objects that it creates have the same label, and `clean_up` deletes them."""

    def __init__(self, client: Client, request: PodRequest, *, on_progress: Callable[[str], None]) -> None:
        self._client = client
        self._request = request
        self._on_progress = on_progress
        self._id = secrets.token_hex(3)
        self._made: list[tuple[str, str, str]] = []
        self._until = time.monotonic() + request.timeout_s

    def run(self) -> list[Finding]:
        """Run the checks and return the findings.

        Raises CliError if a pod does not finish, or ClientError.
        """
        self._create("networking.k8s.io/v1", "networkpolicies", _policy(self._id, "server"))
        self._create("networking.k8s.io/v1", "networkpolicies", _policy(self._id, "client"))
        server = self._create("v1", "pods", self._server())
        self._on_progress(f"pod {server}: the checks of a worker's machine")
        address = self._address(server)
        found = self._findings(server)
        client = self._create("v1", "pods", self._peer(address))
        self._on_progress(f"pod {client}: whether NetworkPolicies hold")
        return [*found, *self._findings(client)]

    def clean_up(self) -> None:
        """Delete all created objects, even if one deletion fails. Raises CliError that names those left."""
        left: list[str] = []
        for version, plural, name in reversed(self._made):
            path = f"{self._path(version, plural)}/{name}"
            try:
                self._client.transport.delete(path, {"gracePeriodSeconds": 0}, what=name)
            except NotFoundError:
                continue
            except ClientError as error:
                left.append(f"{plural}/{name}: {error}")
        self._made.clear()
        if left:
            names = " ".join(item.split(":")[0] for item in left)
            raise CliError(
                "some objects of the check could not be deleted\n" + "\n".join(left),
                code=int(CommandExit.SERVER_ERROR),
                next_step=f"kubectl delete -n {self._client.namespace} {names}",
            )

    def _path(self, version: str, plural: str) -> str:
        base = "/api/v1" if version == "v1" else f"/apis/{version}"
        return f"{base}/namespaces/{self._client.namespace}/{plural}"

    def _create(self, version: str, plural: str, body: Mapping[str, Any]) -> str:
        name = str(body["metadata"]["name"])
        # Recorded before the answer is known: the object may exist although the answer was lost.
        self._made.append((version, plural, name))
        try:
            self._client.transport.post(self._path(version, plural), body, what=name)
        except (ForbiddenError, InvalidJobError, NotFoundError) as error:
            self._made.pop()
            if " cannot " in str(error):  # otherwise a policy of the cluster, whose message is the answer
                error.next_step = RIGHTS
            raise
        return name

    def _pod(self, name: str) -> Pod:
        return Pod.of(self._client.transport.get(f"{self._path('v1', 'pods')}/{name}", what=f"pod {name}"))

    def _address(self, name: str) -> str:
        while True:
            pod = self._pod(name)
            status = Fields(pod.raw).part("status")
            if status.text("podIP") and pod.phase == "Running":
                return status.text("podIP")
            self._wait(pod)

    def _findings(self, name: str) -> list[Finding]:
        """Wait for the findings, which the pod prints as one line of JSON."""
        while True:
            pod = self._pod(name)
            if pod.started or pod.exit_code is not None:
                path = f"{self._path('v1', 'pods')}/{name}/log"
                text = self._client.transport.read(path, what=f"log of {name}", limit=MAX_LOG_BYTES).decode(
                    errors="replace"
                )
                if (found := _read(text)) is not None:
                    return found
                if pod.exit_code is not None:
                    raise self._ended(pod, text)
            self._wait(pod)

    def _wait(self, pod: Pod) -> None:
        if pod.exit_code is not None and pod.phase == "Failed":
            raise self._ended(pod, "")
        if time.monotonic() > self._until:
            why = printable(f"{pod.reason} {pod.message}").strip() or pod.phase
            raise CliError(
                f"pod {pod.name} did not finish within {self._request.timeout_s:g} s: {why}",
                next_step="correct what it waits for, or give a longer --timeout",
            )
        time.sleep(POLL_S)

    def _ended(self, pod: Pod, text: str) -> CliError:
        last = [printable(line) for line in text.splitlines() if line.strip()][-3:]
        detail = " | ".join(last) or printable(f"{pod.reason} {pod.message}")
        return CliError(
            f"pod {pod.name} ended with {pod.exit_code} and no findings: {detail}",
            next_step="give an --image that holds the zerotrain runtime with its command line",
        )

    def _server(self) -> dict[str, Any]:
        arguments = ["--folder", SPILL, "--listen", str(OPEN_PORT), "--listen", str(CLOSED_PORT)]
        body = self._body("server", [*arguments, "--listen-seconds", str(LISTEN_S)])
        spec, request = body["spec"], self._request
        spec["volumes"].append({"name": "spill", **_volume(request)})
        container = spec["containers"][0]
        container["volumeMounts"].append({"name": "spill", "mountPath": SPILL})
        if request.gpus:
            container["resources"]["limits"]["nvidia.com/gpu"] = str(request.gpus)
        return body

    def _peer(self, address: str) -> dict[str, Any]:
        host = f"[{address}]" if ":" in address else address
        return self._body(
            "client",
            ["--allowed", f"{host}:{OPEN_PORT}", "--denied", f"{host}:{CLOSED_PORT}", "--denied-api-server"],
        )

    def _body(self, role: str, arguments: list[str]) -> dict[str, Any]:
        request = self._request
        container: dict[str, Any] = {
            "name": HELPER,
            "image": request.image,
            "command": [*COMMAND, *arguments],
            "env": [{"name": "HOME", "value": SCRATCH}, {"name": "TERM", "value": "dumb"}],
            "resources": {
                "requests": {"cpu": "100m", "memory": "256Mi"},
                "limits": {"memory": "2Gi"},
            },
            "securityContext": container_security_context(),
            "volumeMounts": [{"name": "tmp", "mountPath": SCRATCH}],
        }
        if request.pull_policy is not None:
            container["imagePullPolicy"] = request.pull_policy
        spec: dict[str, Any] = {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": int(request.timeout_s) + LISTEN_S,
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "securityContext": pod_security_context(),
            "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}}],
            "containers": [container],
        }
        if request.node is not None and role == "server":
            spec["nodeSelector"] = {"kubernetes.io/hostname": request.node}
        meta = {"name": _name(self._id, role), "labels": _labels(self._id, role)}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


def _name(run: str, role: str) -> str:
    return f"zerotrain-doctor-{run}-{role}"


def _labels(run: str, role: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": APP_NAME,
        "app.kubernetes.io/component": HELPER,
        LABEL_HELPER: HELPER,
        ROLE_LABEL: f"{run}-{role}",
    }


def _policy(run: str, role: str) -> dict[str, Any]:
    """Return the NetworkPolicy of a pod.

    The server pod accepts only the client pod, on one port. The client pod may reach only the server pod and
    DNS.
    """
    dns = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]

    def peer(other: str) -> list[dict[str, Any]]:
        return [{"podSelector": {"matchLabels": {ROLE_LABEL: f"{run}-{other}"}}}]

    rules: dict[str, Any]
    if role == "server":
        port = [{"protocol": "TCP", "port": OPEN_PORT}]
        rules = {"policyTypes": ["Ingress"], "ingress": [{"from": peer("client"), "ports": port}]}
    else:
        rules = {"policyTypes": ["Egress"], "egress": [{"to": peer("server")}, {"ports": dns}]}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": _name(run, role), "labels": _labels(run, role)},
        "spec": {"podSelector": {"matchLabels": {ROLE_LABEL: f"{run}-{role}"}}, **rules},
    }


def _volume(request: PodRequest) -> dict[str, Any]:
    if request.storage_class is None:
        return {"emptyDir": {"sizeLimit": request.size}}
    claim = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": request.storage_class,
        "resources": {"requests": {"storage": request.size}},
    }
    return {"ephemeral": {"volumeClaimTemplate": {"spec": claim}}}


def _read(text: str) -> list[Finding] | None:
    """Return the findings of the last line that holds such a list; None if there is none."""
    for line in reversed(text.splitlines()):
        if not line.startswith("["):
            continue
        try:
            return from_records(strict_json(line))
        except (ValueError, KeyError, TypeError):
            continue
    return None

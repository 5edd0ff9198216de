"""The network of a job: the headless Service, which gives the worker pods DNS names, and the default-deny
NetworkPolicy.

The rendezvous store and the collectives of torch have neither authentication nor encryption, so the network
must keep other pods out. Ingress is allowed from the ranks of the same job, and on the HTTP port only from
the operator and the monitoring namespace. Egress is allowed to the ranks of the same job and to DNS. Volumes
are mounted by the node and need no rule. Hubs or buckets that a job or one of its init containers reads must
be listed in spec.network, within ResourceOptions.allowed_egress_cidrs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from zerotrain.contract.worker_environment import MASTER_PORT, WORKER_HTTP_PORT
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.api.network import is_within
from zerotrain.operator.constants import HTTP_PORT_NAME, LABEL_RANK, RENDEZVOUS_PORT_NAME

from .identity import Json, ResourceOptions, common_labels, metadata, selector


def headless_service(job: ZeroTrainingJob) -> Json | None:
    """Return the headless Service; None for a single worker, which needs no DNS name."""
    if job.shape.workers == 1:
        return None
    pods = selector(job)
    if not job.spec.program:
        # The trainer resolves only worker 0: endpoints are written once per attempt, not for each pod.
        pods[LABEL_RANK] = "0"
    ports = {RENDEZVOUS_PORT_NAME: MASTER_PORT, HTTP_PORT_NAME: WORKER_HTTP_PORT}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job, service_name(job), common_labels(job)),
        "spec": {
            "clusterIP": "None",
            # The ranks must find each other before the rendezvous, and pods become ready only after it.
            "publishNotReadyAddresses": True,
            "selector": pods,
            "ports": [
                {"name": name, "port": port, "targetPort": port, "protocol": "TCP"}
                for name, port in ports.items()
            ],
        },
    }


def service_name(job: ZeroTrainingJob) -> str:
    """Return a DNS label that is unlikely to be the name of another Service.

    It depends on which pods the Service selects, because an existing Service is never changed.
    """
    named = "all" if job.spec.program else "first"
    return f"{job.name}-{hashlib.sha256(f'{job.uid}/{named}'.encode()).hexdigest()[:8]}"


def domain(job: ZeroTrainingJob) -> str | None:
    """Return the subdomain of the job's pods, which is the name of the headless Service; None for a single
    worker."""
    return service_name(job) if job.shape.workers > 1 else None


_NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""Label that the API server sets on every namespace."""

_HTTP = [{"protocol": "TCP", "port": WORKER_HTTP_PORT}]
# DNS pods of some distributions listen on 5353 behind the Service's port 53.
_DNS = [{"protocol": protocol, "port": port} for port in (53, 5353) for protocol in ("UDP", "TCP")]


def network_policy(job: ZeroTrainingJob, options: ResourceOptions) -> Json:
    own_ranks = [{"podSelector": {"matchLabels": selector(job)}}]
    callers: list[Json] = [
        _pods(options.operator_namespace, options.operator_labels),
        {"namespaceSelector": {"matchLabels": {_NAMESPACE_NAME: options.monitoring_namespace}}},
        *_networks(options.extra_http_cidrs),
    ]
    egress: list[Json] = [
        {"to": own_ranks},
        {
            "to": [_pods(options.dns_namespace, options.dns_labels), *_networks(options.dns_cidrs)],
            "ports": _DNS,
        },
    ]
    if networks := (*options.extra_egress_cidrs, *_asked(job, options)):
        egress.append({"to": _networks(networks)})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(job, job.name, common_labels(job)),
        "spec": {
            "podSelector": {"matchLabels": selector(job)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": own_ranks}, {"from": callers, "ports": _HTTP}],
            "egress": egress,
        },
    }


def _asked(job: ZeroTrainingJob, options: ResourceOptions) -> tuple[str, ...]:
    """Return the requested networks that are allowed. The bounds may have been narrowed since the job
    started."""
    asked = job.spec.network.egress_cidrs if job.spec.network is not None else ()
    return tuple(cidr for cidr in asked if is_within(cidr, options.allowed_egress_cidrs))


def _pods(namespace: str, labels: Mapping[str, str]) -> Json:
    """Return a peer that matches both selectors: in one list entry, namespace and pod selector are joined by
    "and"."""
    return {
        "namespaceSelector": {"matchLabels": {_NAMESPACE_NAME: namespace}},
        "podSelector": {"matchLabels": dict(labels)},
    }


def _networks(cidrs: tuple[str, ...]) -> list[Json]:
    return [{"ipBlock": {"cidr": cidr}} for cidr in cidrs]

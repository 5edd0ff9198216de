"""The default-deny NetworkPolicy of a job.

The rendezvous store and the collectives of torch have neither authentication nor encryption, so the network
must keep other pods out. Ingress is allowed from the ranks of the same job, and on the HTTP port only from
the operator and the monitoring namespace. Egress is allowed to the ranks of the same job and to DNS. Volumes
are mounted by the node and need no rule. Hubs or buckets that a job or one of its init containers reads must
be listed in spec.network, within ResourceOptions.allowed_egress_cidrs.
"""

from __future__ import annotations

from collections.abc import Mapping

from zerotrain.contract.launch import WORKER_HTTP_PORT
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.api.network import is_within

from .identity import Json, ResourceOptions, common_labels, metadata, selector

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

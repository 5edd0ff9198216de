"""The default-deny NetworkPolicy of a job.

The rendezvous store and the collectives of torch have neither authentication nor encryption, so the network
must keep strangers out: in come the ranks of the same job, the operator and the monitoring namespace (these
two on the HTTP port only); out go the ranks of the same job and DNS. Volumes are mounted by the node and need
no rule; what a job or one of its init containers reads from a hub or a bucket stands in spec.network, within
ResourceOptions.allowed_egress_cidrs.
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
# 5353 is where some distributions' DNS pods listen behind the Service's port 53.
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
    """What the job may have of what it asks for: the bounds may have become narrower under a running one."""
    asked = job.spec.network.egress_cidrs if job.spec.network is not None else ()
    return tuple(cidr for cidr in asked if is_within(cidr, options.allowed_egress_cidrs))


def _pods(namespace: str, labels: Mapping[str, str]) -> Json:
    """Both must hold: in one list entry, namespace and pod selector are joined by and."""
    return {
        "namespaceSelector": {"matchLabels": {_NAMESPACE_NAME: namespace}},
        "podSelector": {"matchLabels": dict(labels)},
    }


def _networks(cidrs: tuple[str, ...]) -> list[Json]:
    return [{"ipBlock": {"cidr": cidr}} for cidr in cidrs]

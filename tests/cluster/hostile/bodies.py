"""Bodies of requests as text, so that no parser here reads or writes them before the API server does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.jobs import ABSENT, job_json

Json = dict[str, Any]

NAMESPACE = "@namespace@"
"""Placeholder in a body for the namespace of the tenant."""

COLLECTIONS = {
    "ZeroTrainingJob": "/apis/zerotrain.dev/v1alpha1/namespaces/{}/zerotrainingjobs",
    "Pod": "/api/v1/namespaces/{}/pods",
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "Secret": "/api/v1/namespaces/{}/secrets",
    "Service": "/api/v1/namespaces/{}/services",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "ResourceQuota": "/api/v1/namespaces/{}/resourcequotas",
    "LimitRange": "/api/v1/namespaces/{}/limitranges",
}

MOST_BYTES = 1_350_000
"""Largest size of free-form JSON in one object, as etcd takes 1.5 MiB."""


@dataclass(frozen=True, kw_only=True)
class Post:
    """One object to create."""

    kind: str
    name: str
    text: str

    def body(self, namespace: str) -> bytes:
        return self.text.replace(NAMESPACE, namespace).encode(errors="surrogatepass")


def post(item: Json, raw: Mapping[str, str] | None = None) -> Post:
    """Return `item` with every string that is a key of `raw` replaced by that JSON text."""
    text = json.dumps(item)
    for name, part in (raw or {}).items():
        text = text.replace(f'"{name}"', part)
    return Post(kind=item["kind"], name=item["metadata"]["name"], text=text)


def job(
    name: str, changes: Mapping[str, Any] | None = None, raw: Mapping[str, str] | None = None, **meta: Any
) -> Post:
    """Return a job of one worker that would run, with `changes` by dotted path."""
    small = {"spec.workers": 1, "spec.ranksPerWorker": 1, "spec.checkpoint": ABSENT}
    item = job_json({**small, "metadata": {"name": name, **meta}, **(changes or {})})
    return post(item, raw)


def config(**keys: Any) -> Json:
    """Return the change that adds keys to the engine's configuration."""
    plain = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    return {"spec.config": {**plain, **keys}}


def core(kind: str, name: str, raw: Mapping[str, str] | None = None, **parts: Any) -> Post:
    """Return an object of the core group."""
    meta = {"name": name, **parts.pop("meta", {})}
    return post({"apiVersion": "v1", "kind": kind, "metadata": meta, **parts}, raw)


def pod(name: str, *, labels: Mapping[str, str] | None = None, **meta: Any) -> Post:
    """Return a pod of the tenant itself, with labels and owners of its choice."""
    spec = {"containers": [{"name": "worker", "image": "hostile"}], "schedulerName": "nobody"}
    return core("Pod", name, meta={"labels": dict(labels or {}), **meta}, spec=spec)


def owner(name: str, uid: str) -> Json:
    """Return a reference as the operator writes it."""
    reference = {"apiVersion": "zerotrain.dev/v1alpha1", "kind": "ZeroTrainingJob", "name": name, "uid": uid}
    return {**reference, "controller": True, "blockOwnerDeletion": False}


def nested_objects(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def nested_lists(depth: int) -> str:
    return "[" * depth + "]" * depth


def listed(item: str, size: int = MOST_BYTES) -> str:
    """Return a list of as many `item` as fit into `size` bytes."""
    return "[" + ",".join([item] * (size // (len(item) + 1))) + "]"


def keyed(item: str, size: int, key: str = "k{}") -> str:
    """Return an object of about `size` bytes whose values are all `item`."""
    count = size // (len(key) + len(item) + 8)
    return "{" + ",".join(f'"{key.format(number)}":{item}' for number in range(count)) + "}"

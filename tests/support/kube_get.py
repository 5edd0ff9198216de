"""A reader of the words of `kubectl get`, without a process of its own."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import urlencode

from tests.support.kube_json import Json, KubeJson

_parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
_parser.add_argument("kinds")
_parser.add_argument("name", nargs="?")
_parser.add_argument("-n", dest="namespace")
_parser.add_argument("-l", dest="labelSelector")
_parser.add_argument("--field-selector", dest="fieldSelector")

Kind = tuple[str, Json]
"""Path of an API group's version, and one of its resources as discovery names it."""


def get(api: KubeJson, args: Sequence[str], *, namespace: str) -> Any:
    """Return an object, or a list of all objects of one or more kinds separated by commas."""
    asked = _parser.parse_args(args)
    where = asked.namespace or namespace
    selectors = {key: getattr(asked, key) for key in ("labelSelector", "fieldSelector")}
    query = urlencode({key: value for key, value in selectors.items() if value})
    if asked.name:
        return api.get(f"{_path(api, asked.kinds, where)}/{asked.name}")
    items: list[Json] = []
    for kind in asked.kinds.split(","):
        listed = api.get(f"{_path(api, kind, where)}?{query}")
        # An item of a list does not say its own kind.
        own = {"apiVersion": listed["apiVersion"], "kind": listed["kind"].removesuffix("List")}
        items += [{**own, **item} for item in listed["items"]]
    return {"apiVersion": "v1", "kind": "List", "items": items}


def _path(api: KubeJson, kind: str, namespace: str) -> str:
    version, resource = _find(api, kind)
    where = f"/namespaces/{namespace}" if resource["namespaced"] else ""
    return f"{version}{where}/{resource['name']}"


@lru_cache(maxsize=1024)
def _find(api: KubeJson, kind: str) -> Kind:
    """Return the kind of a plural, singular or short name, with or without `.group`; a core one first."""
    name, _, group = kind.lower().partition(".")
    for version in _versions(api):
        if group and version.split("/")[2] != group:
            continue
        for resource in _resources(api, version):
            if name in (resource["name"], resource.get("singularName"), *resource.get("shortNames", ())):
                return version, resource
    raise LookupError(f"the API server has no kind {kind}")


def _versions(api: KubeJson) -> list[str]:
    """Return the paths of all versions of all groups, the preferred ones first: some kinds are in others."""
    groups = api.get("/apis")["groups"]
    preferred = [group["preferredVersion"]["groupVersion"] for group in groups]
    others = [version["groupVersion"] for group in groups for version in group["versions"]]
    return ["/api/v1", *(f"/apis/{version}" for version in dict.fromkeys([*preferred, *others]))]


def _resources(api: KubeJson, version: str) -> list[Json]:
    return [resource for resource in api.get(version)["resources"] if "/" not in resource["name"]]

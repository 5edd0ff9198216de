"""Record of the requests that an operator under test sends to the API server: verb, group, resource, as in a
role.

`recorded_operator` writes one line for each kind of request when it is first sent, kopf's included, so that
nothing is lost with a SIGKILL; `operator/live/test_rbac.py` reads the union of all operators of the session.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

FILE_VARIABLE = "ZEROTRAIN_TEST_CALLS"
"""Variable that names the file which calls are appended to; without it an operator is started as it is
shipped.
"""

REFUSALS_VARIABLE = "ZEROTRAIN_TEST_REFUSALS"
"""Variable that names the file of one operator with every 403 that it got; quotas and ending namespaces give
403, too.
"""

_WITH_NAME = {"GET": "get", "PUT": "update", "PATCH": "patch", "DELETE": "delete", "POST": "create"}
_WITHOUT_NAME = {"GET": "list", "POST": "create", "DELETE": "deletecollection"}


class Call(NamedTuple):
    """Request as a rule of a role names it."""

    verb: str
    group: str
    resource: str
    """Resource with its subresource: `zerotrainingjobs/status`."""

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}{'.' + self.group if self.group else ''}"


def call_of(method: str, url: str) -> Call | None:
    """Return the request as authorization sees it; None if it is for no resource (discovery, health, a
    worker).
    """
    parts = urlsplit(url)
    path = parts.path.strip("/").split("/")
    if path[:2] == ["api", "v1"]:
        group, rest = "", path[2:]
    elif path[0] == "apis" and len(path) > 3:
        group, rest = path[1], path[3:]
    else:
        return None
    if rest[:1] == ["namespaces"] and len(rest) > 2:
        rest = rest[2:]
    if not rest:
        return None
    resource = "/".join([rest[0], *rest[2:3]])
    verb = (_WITH_NAME if len(rest) > 1 else _WITHOUT_NAME).get(method, method.lower())
    if method == "GET" and parse_qs(parts.query).get("watch", ["0"])[0] in ("1", "true"):
        verb = "watch"
    return Call(verb, group, resource)


def append(file: Path, call: Call) -> None:
    write(file, " ".join((call.verb, call.group or "-", call.resource)))


def write(file: Path, line: str) -> None:
    """Append one line, whole even when several operators write."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w") as out:
        out.write(line + "\n")


def recorded(file: Path) -> set[Call]:
    """Return all calls written so far."""
    if not file.exists():
        return set()
    found = (line.split(" ") for line in file.read_text().splitlines())
    return {Call(verb, "" if group == "-" else group, resource) for verb, group, resource in found}


def granted(files: Iterable[Path]) -> set[Call]:
    """Return the calls that the roles in these manifests allow."""
    from ruamel.yaml import YAML  # tests of the engine import this module, too, on machines without it

    calls: set[Call] = set()
    for file in files:
        for document in YAML(typ="safe", pure=True).load_all(file.read_text()):
            if document["kind"] in ("Role", "ClusterRole"):
                for rule in document["rules"]:
                    calls |= _of_rule(rule)
    return calls


def _of_rule(rule: Mapping[str, list[str]]) -> set[Call]:
    return {
        Call(verb, group, resource)
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }

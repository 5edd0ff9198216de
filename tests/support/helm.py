"""helm for tests: bound to one cluster, one namespace and folders of its own; manifests as objects."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from tests.support.devcluster import REPOSITORY

CHART = REPOSITORY / "charts" / "zerotrain"
RELEASE = "zerotrain"
MONITORING_API = "monitoring.coreos.com/v1"


def document(values: Mapping[str, Any]) -> str:
    """Return values as JSON that is also YAML.

    helm's parser accepts no surrogate pairs and no bare control characters.
    """
    text = json.dumps(values, ensure_ascii=False)
    return re.sub("[\x7f-\x9f\ufffe\uffff]", lambda found: f"\\u{ord(found[0]):04x}", text)


class HelmError(AssertionError):
    """helm failed; the message is its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Helm:
    """The helm program, bound to a namespace and, unless it only renders, a cluster."""

    program: Path
    home: Path
    """Folder for helm's caches and settings, so that it never uses the user's."""
    namespace: str = "zerotrain-system"
    kubeconfig: Path | None = None

    def run(self, *args: str | Path, values: Mapping[str, Any] | None = None, check: bool = True) -> str:
        """Run helm and return its output; raise HelmError if it fails and `check` is set."""
        done = self.attempt(*args, values=values)
        if check and done.returncode != 0:
            raise HelmError(
                f"helm {' '.join(map(str, args))}: exit {done.returncode}\n{done.stderr}{done.stdout}"
            )
        return done.stdout

    def attempt(
        self, *args: str | Path, values: Mapping[str, Any] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run helm without checking the result; `values` are passed on standard input."""
        command = [str(self.program), *map(str, args), "--namespace", self.namespace]
        if values is not None:
            command += ["--values", "-"]
        return subprocess.run(
            command,
            env=self._environ(),
            input=None if values is None else document(values),
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )

    def template(
        self,
        values: Mapping[str, Any] | None = None,
        *,
        files: Sequence[Path] = (),
        kubernetes: str = "1.36.0",
        apis: Sequence[str] = (),
        chart: Path = CHART,
    ) -> list[dict[str, Any]]:
        """Return the manifests that an installation without a cluster would make, hooks included."""
        words: list[str | Path] = ["template", RELEASE, chart, "--kube-version", kubernetes]
        for path in files:
            words += ["--values", path]
        for api in apis:
            words += ["--api-versions", api]
        return objects(self.run(*words, values=values))

    def install(self, *args: str, values: Mapping[str, Any] | None = None, chart: Path = CHART) -> str:
        return self.run("install", RELEASE, chart, "--create-namespace", *args, values=values)

    def upgrade(self, *args: str, values: Mapping[str, Any] | None = None, chart: Path = CHART) -> str:
        return self.run("upgrade", RELEASE, chart, *args, values=values)

    def uninstall(self, *args: str) -> str:
        return self.run("uninstall", RELEASE, *args)

    def _environ(self) -> dict[str, str]:
        folders = {f"HELM_{kind}_HOME": str(self.home / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
        kubeconfig = str(self.kubeconfig) if self.kubeconfig else os.devnull
        return {**os.environ, **folders, "KUBECONFIG": kubeconfig}


def objects(text: str) -> list[dict[str, Any]]:
    """Return YAML documents as plain objects, without empty ones."""
    found = yaml.load_all(text, Loader=yaml.CSafeLoader)  # the C parser: the custom resource is long
    return [document for document in found if document]


def named(manifests: Sequence[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    """Return the one object of this kind (and name)."""
    found = [
        item for item in manifests if item["kind"] == kind and (not name or item["metadata"]["name"] == name)
    ]
    assert len(found) == 1, (
        f"{len(found)} objects {kind} {name}: {[item['metadata']['name'] for item in found]}"
    )
    return found[0]

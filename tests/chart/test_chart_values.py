"""values.schema.json: helm itself refuses every mistyped value, at every level."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]

from tests.support.helm import CHART, MONITORING_API, Helm

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
CI = sorted((CHART / "ci").glob("*-values.yaml"))


@pytest.fixture
def renderer(helm: Path, tmp_path: Path) -> Helm:
    return Helm(program=helm, home=tmp_path)


def open_objects(schema: dict[str, Any], path: str = "$") -> Iterator[str]:
    """Yield the objects of the schema that have named keys and accept others as well."""
    if "properties" in schema and schema.get("additionalProperties") is not False:
        yield path
    for key, inner in [*schema.get("properties", {}).items(), *schema.get("$defs", {}).items()]:
        yield from open_objects(inner, f"{path}.{key}")
    if "items" in schema:
        yield from open_objects(schema["items"], f"{path}[]")


@pytest.mark.unit
def test_no_object_with_named_keys_takes_others() -> None:
    assert list(open_objects(SCHEMA)) == []
    assert list(open_objects({"properties": {"a": {"items": {"properties": {}}}}})) == ["$", "$.a[]"]


def free_objects(schema: dict[str, Any], path: str = "$") -> Iterator[str]:
    """Yield the objects of the schema that accept any key."""
    is_named = schema.keys() & {"properties", "patternProperties"}
    is_uniform = isinstance(schema.get("additionalProperties"), dict)
    if schema.get("type") == "object" and not is_named and not is_uniform:
        yield path
    for key, inner in [*schema.get("properties", {}).items(), *schema.get("$defs", {}).items()]:
        yield from free_objects(inner, f"{path}.{key}")
    if "items" in schema:
        yield from free_objects(schema["items"], f"{path}[]")


@pytest.mark.unit
def test_what_takes_any_key_is_documented() -> None:
    assert list(free_objects(SCHEMA)) == ["$.global", "$.extraObjects[]"]
    readme = (CHART / "README.md").read_text()
    assert "Only `global` and the objects of `extraObjects` take any key" in readme


@pytest.mark.unit
@pytest.mark.parametrize("path", CI, ids=[path.stem for path in CI])
def test_the_examples_are_accepted(path: Path) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(yaml.safe_load(path.read_text()))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"replica": 2}, "replica"),
    ({"operator": {"replica": 2}}, "replica"),
    ({"operator": {"replicas": "2"}}, "replicas"),
    ({"operator": {"replicas": -1}}, "replicas"),
    ({"operator": {"resources": {"limit": {}}}}, "limit"),
    ({"operator": {"tolerations": [{"keys": "a"}]}}, "keys"),
    ({"operator": {"runAsUser": 0}}, "runAsUser"),
    ({"operator": {"runAsUser": 2**31}}, "runAsUser"),
    ({"operator": {"workers": 1.5}}, "workers"),
    ({"operator": {"extraEnv": [{"value": "x"}]}}, "extraEnv"),
    ({"operator": {"affinity": {"podAffinity": {"preferred": []}}}}, "preferred"),
    ({"operator": {"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "a"}]}}, "whenUnsatisfiable"),
    ({"operator": {"extraEnv": [{"name": "A", "valueFrom": {"secretRef": {}}}]}}, "secretRef"),
    ({"operator": {"resources": {"claims": [{"name": "a", "for": "b"}]}}}, "claims"),
    ({"networkPolicy": {"extraIngress": [{"to": []}]}}, "to"),
    ({"networkPolicy": {"extraEgress": [{"to": [{"podSelectors": {}}]}]}}, "podSelectors"),
    ({"networkPolicy": {"extraEgress": [{"ports": [{"protocol": "tcp"}]}]}}, "protocol"),
    ({"crds": {"keeps": True}}, "keeps"),
    ({"crds": {"keep": "no"}}, "keep"),
    ({"watch": {"namespace": "a"}}, "namespace"),
    ({"watch": {"namespaces": "a,b"}}, "namespaces"),
    ({"watch": {"namespaces": ["A"]}}, "namespaces"),
    ({"image": {"digest": "sha256:123"}}, "digest"),
    ({"image": {"repository": "a b"}}, "repository"),
    ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
    ({"image": {"pullSecrets": [{"name": "a"}]}}, "pullSecrets"),
    ({"image": {"pullSecrets": [""]}}, "pullSecrets"),
    ({"image": {"pullSecrets": ["a", "a"]}}, "pullSecrets"),
    ({"jobs": {"extraEgressCidrs": ["10.0.0.1"]}}, "extraEgressCidrs"),
    ({"networkPolicy": {"apiServerPorts": [0]}}, "apiServerPorts"),
    ({"networkPolicy": {"apiServerPorts": []}}, "apiServerPorts"),
    ({"networkPolicy": {"dns": {"label": {}}}}, "label"),
    ({"networkPolicy": {"dns": {"labels": ["dns=cluster"]}}}, "labels"),
    ({"networkPolicy": {"dns": {"cidrs": ["169.254.20.10"]}}}, "cidrs"),
    ({"monitoring": {"prometheusNamespace": ""}}, "prometheusNamespace"),
    ({"podMonitor": {"enabled": "yes"}}, "enabled"),
    ({"podMonitor": {"interval": "15"}}, "interval"),
    ({"podMonitor": {"sampleLimit": 0}}, "sampleLimit"),
    ({"podMonitor": {"bodySizeLimit": "8 MB"}}, "bodySizeLimit"),
    ({"serviceMonitor": {"relabelings": [{"targetlabel": "x"}]}}, "targetlabel"),
    ({"prometheusRule": {"disabled": "ZeroTrainFailed"}}, "disabled"),
    ({"prometheusRule": {"runbookBaseUrl": "runbooks"}}, "runbookBaseUrl"),
    ({"dashboards": {"labels": {"grafana_dashboard": 1}}}, "grafana_dashboard"),
    ({"priorityClasses": {"classes": [{"name": "a"}]}}, "classes"),
    ({"priorityClasses": {"classes": [{"name": "a", "value": 2_000_000_000}]}}, "value"),
    ({"channelKey": {"key": "secret"}}, "key"),
    ({"extraObjects": {}}, "extraObjects"),
]


@pytest.mark.unit
@pytest.mark.parametrize(("values", "word"), WRONG, ids=[json.dumps(values) for values, _ in WRONG])
def test_a_wrong_value_is_refused_where_it_stands(values: dict[str, Any], word: str) -> None:
    errors = list(jsonschema.Draft202012Validator(SCHEMA).iter_errors(values))
    assert len(errors) == 1
    assert word in f"{errors[0].json_path} {errors[0].message}"


@pytest.mark.tools
def test_helm_refuses_a_typo_and_names_it(renderer: Helm) -> None:
    """The check above is Python's; helm has a validator of its own."""
    refused = renderer.attempt("template", "zerotrain", CHART, values={"operator": {"replica": 2}})
    assert refused.returncode != 0
    assert "at '/operator': additional properties 'replica' not allowed" in refused.stderr


@pytest.mark.tools
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"serviceAccount": {"create": False}}, "serviceAccount.name is needed"),
        ({"prometheusRule": {"enabled": True, "disabled": ["ZeroTrainTypo"]}}, 'no alert "ZeroTrainTypo"'),
    ],
)
def test_values_that_do_not_go_together_are_refused(
    renderer: Helm, values: dict[str, Any], message: str
) -> None:
    refused = renderer.attempt("template", "zerotrain", CHART, values=values)
    assert refused.returncode != 0
    assert message in refused.stderr


MAY_BE_NULL = {
    *("image.tag", "image.pullPolicy", "operator.replicas", "operator.runAsUser", "podMonitor.buckets"),
    *("operator.resources.requests.cpu", "operator.resources.requests.memory"),
    *("operator.resources.limits.memory", "dcgm.enabled", "priorityClasses.enabled", "tests.enabled"),
    *("dashboards.labels.grafana_dashboard", "dashboards.annotations.grafana_folder"),
}
"""Values without which Kubernetes' own default applies, or something is left out that protects nobody."""


def scalars(values: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield the paths of the values that have a default and are no lists."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from scalars(value, f"{path}{name}.")
        elif value not in (None, "") and not isinstance(value, list):
            yield f"{path}{name}"


@pytest.mark.tools
def test_a_value_that_protects_something_is_refused_without_a_word_after_it(renderer: Helm) -> None:
    """Helm takes its default away as well: after `crds: {keep: }` an uninstall would delete all jobs."""
    paths = set(scalars(yaml.safe_load((CHART / "values.yaml").read_text())))
    assert paths > MAY_BE_NULL
    assert {"crds.keep", "networkPolicy.enabled", "podMonitor.sampleLimit"} <= paths - MAY_BE_NULL
    for path in sorted(paths - MAY_BE_NULL):
        values: Any = None
        for name in reversed(path.split(".")):
            values = {name: values}
        refused = renderer.attempt("template", "zerotrain", CHART, values=values)
        assert (path, refused.returncode) != (path, 0)
        assert f"{path} is null" in refused.stderr or "serviceAccount" in path, refused.stderr


def without_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return the lists and maps among the values, each as a key with nothing behind it."""
    bare: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, list) or value == {}:
            bare[name] = None
        elif isinstance(value, dict) and (inner := without_values(value)):
            bare[name] = inner
    return bare


@pytest.mark.tools
def test_a_list_or_map_without_a_value_is_the_default(renderer: Helm) -> None:
    """`commonLabels:` above lines that are commented out is null, which helm passes on as nothing at all: no
    schema sees it.
    """
    chosen = {"channelKey": {"existingSecret": "key"}, "dcgm": {"enabled": True}}
    bare = without_values(yaml.safe_load((CHART / "values.yaml").read_text()))
    assert {"commonLabels", "crds", "networkPolicy", "prometheusRule"} <= bare.keys()
    apis = [MONITORING_API]
    assert renderer.template({**bare, **chosen}, apis=apis) == renderer.template(chosen, apis=apis)

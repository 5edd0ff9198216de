"""Values that break templates: each is rendered exactly as given, or refused with its place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]

from tests.support.helm import CHART, RELEASE, Helm, named

Manifests = list[dict[str, Any]]
SCHEMA = jsonschema.Draft202012Validator(json.loads((CHART / "values.schema.json").read_text()))

TEXTS = [
    *("", " ", "a", "true", "null", "~", "123", "0x1f", "1e5", "012", "1_000", "12:34", "2020-01-01", "yes"),
    *("- a", "a: b", "a #b", "#b", "'q'", '"q"', "\\", "{{ .Values }}", "{{", "}}", "${0}", "$1", "%", "@x"),
    *("`x`", "!tag", "&a", "*a", "|", ">", "[a]", "{a}", "?", "? a", ": ", "=", "<<", "---", "..."),
    *("---\nkind: Secret", "a\n---\nb", "key: value\nother: x", "a\nb", "a\n", "a\n\n", "\n", "\na"),
    *(
        "  lead",
        "trail  ",
        "\ttab",
        "a\tb",
        "a\r\nb",
        "\x1b[0m",
        "é ü 日本語 🚀",
        "\u2028",
        "\u00a0",
        "\ufeff",
    ),
    "x" * 300,
]
UNPRINTABLE = ["\x7f", "\x80", "\x85", "\x9f", "\ufffe", "\uffff"]
"""Characters for which helm's toYaml returns nothing at all, or, for the third, a space."""


class AsKubernetes(yaml.CSafeLoader):  # type: ignore[misc]
    """YAML loader that reads `=` and `<<` as texts: PyYAML has types for them, no reader of Kubernetes
    has.
    """


for _tag in ("value", "merge"):
    AsKubernetes.add_constructor(f"tag:yaml.org,2002:{_tag}", lambda loader, node: node.value)


@pytest.fixture(scope="module")
def renderer(helm: Path, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(program=helm, home=tmp_path_factory.mktemp("helm"))


def render(helm: Helm, values: dict[str, Any], release: str = RELEASE, *, checked: bool = True) -> Manifests:
    words = [] if checked else ["--skip-schema-validation"]
    text = helm.run("template", release, CHART, *words, values=values)
    return [item for item in yaml.load_all(text, Loader=AsKubernetes) if item]


def refusal(helm: Helm, values: dict[str, Any], release: str = RELEASE) -> str:
    done = helm.attempt("template", release, CHART, values=values)
    assert done.returncode != 0, "it was rendered"
    return done.stderr


def everywhere(texts: dict[str, str]) -> dict[str, Any]:
    """Return values with the texts in every place that takes any text."""
    relabelings = [{"regex": text, "replacement": text, "sourceLabels": [text]} for text in texts.values()]
    return {
        "operator": {
            "podAnnotations": texts,
            "extraEnv": [{"name": key, "value": text} for key, text in texts.items()],
            "tolerations": [{"key": "a", "operator": "Equal", "value": text} for text in texts.values()],
        },
        "serviceAccount": {"annotations": texts},
        "crds": {"annotations": texts, "keep": False},
        "dashboards": {"annotations": {"grafana_folder": "", **texts}},
        "podMonitor": {"enabled": True, "relabelings": relabelings, "metricRelabelings": relabelings},
        "serviceMonitor": {"enabled": True, "relabelings": relabelings, "metricRelabelings": relabelings},
        "prometheusRule": {"enabled": True, "alertLabels": texts},
        "priorityClasses": {
            "enabled": True,
            "classes": [{"name": "a", "value": 1, "description": text} for text in texts.values()],
        },
    }


def found_again(manifests: Manifests, count: int) -> dict[str, Any]:
    """Return the same values, read from the rendered manifests."""
    pod = named(manifests, "Deployment")["spec"]["template"]
    (worker,) = named(manifests, "PodMonitor")["spec"]["podMetricsEndpoints"]
    (own,) = named(manifests, "ServiceMonitor")["spec"]["endpoints"]
    dashboard = next(item for item in manifests if item["kind"] == "ConfigMap")
    rules = next(item for item in manifests if item["kind"] == "PrometheusRule")
    alert = next(rule for group in rules["spec"]["groups"] for rule in group["rules"] if "alert" in rule)
    keys = ("relabelings", "metricRelabelings")
    return {
        "operator": {
            "podAnnotations": pod["metadata"]["annotations"],
            "extraEnv": pod["spec"]["containers"][0]["env"][-count:],
            "tolerations": pod["spec"]["tolerations"],
        },
        "serviceAccount": {"annotations": named(manifests, "ServiceAccount")["metadata"]["annotations"]},
        "crds": {
            "annotations": named(manifests, "CustomResourceDefinition")["metadata"]["annotations"],
            "keep": False,
        },
        "dashboards": {"annotations": dashboard["metadata"]["annotations"]},
        "podMonitor": {"enabled": True, **{key: worker[key][-count:] for key in keys}},
        "serviceMonitor": {"enabled": True, **{key: own[key] for key in keys}},
        "prometheusRule": {
            "enabled": True,
            "alertLabels": {key: text for key, text in alert["labels"].items() if key.startswith("z")},
        },
        "priorityClasses": {
            "enabled": True,
            "classes": [
                {"name": item["metadata"]["name"], "value": item["value"], "description": item["description"]}
                for item in manifests
                if item["kind"] == "PriorityClass"
            ],
        },
    }


@pytest.mark.tools
def test_any_text_is_rendered_as_it_is(renderer: Helm) -> None:
    texts = {f"z{index}": text for index, text in enumerate(TEXTS)}
    values = everywhere(texts)
    assert found_again(render(renderer, values), len(texts)) == values


@pytest.mark.tools
@pytest.mark.parametrize("text", ["", "a\n", "a\n\n", "\n", "  lead", "trail  "])
def test_what_ends_a_block_keeps_its_end(renderer: Helm, text: str) -> None:
    """The text is the last entry of its block, after which the template goes on."""
    given = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "last"}, "zzz": text}
    values = everywhere({"z": text})
    manifests = render(renderer, {**values, "extraObjects": [given]})
    manifests.remove(given)
    assert found_again(manifests, 1) == values


@pytest.mark.unit
@pytest.mark.parametrize("text", UNPRINTABLE, ids=ascii)
def test_what_helm_would_drop_is_refused(text: str) -> None:
    for values in (
        {"operator": {"podAnnotations": {"a": "b", "k": f"x{text}"}}},
        {"operator": {"extraEnv": [{"name": "A", "value": text}]}},
        {"extraObjects": [{"data": {"a": [text]}}]},
        {"extraObjects": [{"data": {text: "a"}}]},
    ):
        assert not SCHEMA.is_valid(values)


@pytest.mark.tools
def test_helm_drops_what_the_schema_refuses(renderer: Helm) -> None:
    """The schema refuses such values because helm alone would drop the whole map silently."""
    values = {"operator": {"podAnnotations": {"a": "b", "k": "\x7f"}}}
    (deployment,) = (item for item in render(renderer, values, checked=False) if item["kind"] == "Deployment")
    assert not deployment["spec"]["template"]["metadata"]["annotations"]


PLAIN_AND_AMBIGUOUS = {
    "plaina": "123",
    "plainb": "true",
    "plainc": "1e3",
    "plaind": "0x1f",
    "plaine": "null",
    "plainf": "no",
    "plaing": "12",
    "plainh": "34",
    "plaini": "012",
    "plainj": "8.5",
    "plaink": "1e5",
    "plainl": "10",
    "plainm": "2020-01-01",
    "plainn": "6",
    "plaino": "0o7",
    "plainp": "on",
}
"""Name -> one that YAML reads as a number, a date, a boolean or null unless it is quoted."""


def names(*, ambiguous: bool) -> dict[str, Any]:
    """Return values with a name of their own in every place that takes one."""
    values = {
        "watch": {"namespaces": ["plaina", "plainb"]},
        "monitoring": {"prometheusNamespace": "plainc", "namespace": "plaind"},
        "networkPolicy": {"dns": {"namespace": "plaine", "labels": {"plainf": "plainb"}}},
        "image": {"repository": "plaing", "tag": "plainh", "pullSecrets": ["plaini"]},
        "serviceAccount": {"name": "plainj"},
        "operator": {
            "priorityClassName": "plaink",
            "nodeSelector": {"plaina": "plainb"},
            "podLabels": {"plainb": "plaine"},
        },
        "dcgm": {"enabled": True, "namespace": "plainl", "name": "plainm"},
        "channelKey": {"existingSecret": "plainn", "entry": "plaino"},
        "priorityClasses": {"enabled": True, "classes": [{"name": "plainf", "value": 1}]},
        "commonLabels": {"plaine": "plaina"},
        **{kind: {"enabled": True} for kind in ("podMonitor", "serviceMonitor", "prometheusRule")},
    }
    return renamed(values) if ambiguous else values


def renamed(value: Any) -> Any:
    """Return the same value with the odd names, in keys and in texts."""
    text = json.dumps(value)
    return json.loads(re.sub("plain[a-p]", lambda found: PLAIN_AND_AMBIGUOUS[found[0]], text))


def comparable(manifests: Manifests) -> list[str]:
    return sorted(json.dumps(item, sort_keys=True) for item in manifests)


@pytest.mark.tools
def test_names_stay_texts_whatever_they_look_like(renderer: Helm) -> None:
    """Structure and types do not depend on the names of releases, namespaces, Secrets and labels."""
    plain = Helm(program=renderer.program, home=renderer.home, namespace="plaina")
    ambiguous = Helm(program=renderer.program, home=renderer.home, namespace=PLAIN_AND_AMBIGUOUS["plaina"])
    for release in ("plainb", "plaine", "plainf", "plainp"):
        wanted = render(plain, names(ambiguous=False), release)
        assert len(wanted) > 20
        assert comparable(
            render(ambiguous, names(ambiguous=True), PLAIN_AND_AMBIGUOUS[release])
        ) == comparable(renamed(wanted))


@pytest.mark.tools
def test_the_entry_of_the_own_secret_is_a_text(renderer: Helm) -> None:
    made = named(render(renderer, {"channelKey": {"entry": "0x1f"}}), "Secret")
    assert list(made["data"]) == ["0x1f"]


def texts_of(value: Any, key: str) -> Iterator[Any]:
    """Yield every value under this key, at every depth."""
    for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if name == key:
            yield inner
        if isinstance(inner, dict | list):
            yield from texts_of(inner, key)


@pytest.mark.tools
@pytest.mark.parametrize("release", ["r" * 53, "r" * 39 + "-" * 5 + "x" * 9, "a" + "-b" * 26])
def test_the_longest_names_stay_within_their_limits(renderer: Helm, release: str) -> None:
    values = {"watch": {"namespaces": ["n" * 63]}, "nameOverride": "o" * 40}
    values |= {kind: {"enabled": True} for kind in ("podMonitor", "serviceMonitor", "prometheusRule")}
    far = Helm(program=renderer.program, home=renderer.home, namespace="m" * 63)
    for item in render(far, values, release):
        short = item["kind"] in ("Service", "Pod", "Deployment", "NetworkPolicy", "ServiceAccount")
        name = item["metadata"]["name"]
        assert len(name) <= (63 if short else 253)
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", name), name
        for labels in (*texts_of(item, "labels"), *texts_of(item, "matchLabels")):
            if item["kind"] not in ("PrometheusRule", "CustomResourceDefinition"):
                assert all(len(text) <= 63 for text in labels.values())


@pytest.mark.tools
@pytest.mark.parametrize("release", ["123", "9a", "a.b"])
def test_a_release_that_cannot_name_a_service_gets_the_way_out(renderer: Helm, release: str) -> None:
    message = refusal(renderer, {}, release)
    assert f'give fullnameOverride: "{release}-zerotrain"' in message
    found = render(renderer, {"fullnameOverride": "trainer"}, release)
    assert named(found, "Service")["metadata"]["name"] == "trainer-operator-metrics"
    assert (
        named(found, "Deployment")["spec"]["selector"]["matchLabels"]["app.kubernetes.io/instance"] == release
    )


DIGEST = "sha256:" + "0" * 64
NO_IMAGES = (
    '"a',
    "{a}",
    "&a",
    "*a",
    "!a",
    "a#b",
    "a:b",
    "a b",
    "a/",
    "/a",
    "a@b",
    "Ä",
    "a\nb",
    "",
    "http://a/b",
)


@pytest.mark.unit
@pytest.mark.parametrize(
    "values",
    [
        {"prometheusRule": {"runbookBaseUrl": 'https://x/"'}},
        {"channelKey": {"entry": "../a"}},
        {"fullnameOverride": "1"},
        {"fullnameOverride": "a" * 41},
    ],
)
def test_what_would_break_a_manifest_is_refused(values: dict[str, Any]) -> None:
    assert not SCHEMA.is_valid(values)


@pytest.mark.unit
@pytest.mark.parametrize("repository", NO_IMAGES)
def test_what_is_no_image_is_refused(repository: str) -> None:
    assert not SCHEMA.is_valid({"image": {"repository": repository}})


@pytest.mark.tools
@pytest.mark.parametrize(
    ("image", "wanted"),
    [
        ({"repository": "12", "tag": "34"}, "12:34"),
        ({"repository": "localhost:5000/a/b_c", "tag": "0x1"}, "localhost:5000/a/b_c:0x1"),
        ({"repository": "R.Example.org/a--b", "digest": DIGEST}, f"R.Example.org/a--b@{DIGEST}"),
    ],
)
def test_images_are_put_together_as_given(renderer: Helm, image: dict[str, str], wanted: str) -> None:
    found = render(renderer, {"image": image})
    pods = [named(found, "Deployment")["spec"]["template"]["spec"], named(found, "Pod")["spec"]]
    assert [pod["containers"][0]["image"] for pod in pods] == [wanted] * 2


@pytest.mark.tools
def test_large_and_broken_numbers_keep_their_value(renderer: Helm) -> None:
    """helm reads numbers as floats, which print with an exponent from a million on."""
    relabeling = {"action": "hashmod", "modulus": 10_000_000, "sourceLabels": ["a"], "targetLabel": "b"}
    values: dict[str, Any] = {
        "operator": {
            "resources": {"limits": {"memory": 5_368_709_120, "cpu": 0.5}, "requests": {"memory": "1e9"}},
            "tolerations": [{"operator": "Exists", "tolerationSeconds": 123_456_789_012}],
            "workers": 2_000_000,
            "resyncSeconds": 0.25,
            "runAsUser": 1_000_660_000,
        },
        "podMonitor": {"enabled": True, "sampleLimit": 10_000_000, "relabelings": [relabeling]},
        "priorityClasses": {"enabled": True, "classes": [{"name": "a", "value": -2_147_483_648}]},
    }
    found = render(renderer, values)
    pod = named(found, "Deployment")["spec"]["template"]["spec"]
    env = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
    monitor = named(found, "PodMonitor")["spec"]
    wanted = values["operator"]
    assert pod["containers"][0]["resources"]["limits"] == wanted["resources"]["limits"]
    assert pod["containers"][0]["resources"]["requests"]["memory"] == "1e9"
    assert pod["tolerations"] == wanted["tolerations"]
    assert (env["ZEROTRAIN_OPERATOR_WORKERS"], env["ZEROTRAIN_OPERATOR_RESYNC_SECONDS"]) == (
        "2000000",
        "0.25",
    )
    assert pod["securityContext"]["fsGroup"] == 1_000_660_000
    assert monitor["sampleLimit"] == 10_000_000
    assert monitor["podMetricsEndpoints"][0]["relabelings"][-1] == relabeling
    assert named(found, "PriorityClass")["value"] == -2_147_483_648


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"commonLabels": {"a b": "x"}}, "at '/commonLabels'"),
    ({"commonLabels": {"a": "x y"}}, "at '/commonLabels/a'"),
    ({"operator": {"podLabels": {"a": "x" * 64}}}, "at '/operator/podLabels/a'"),
    ({"operator": {"nodeSelector": {"a/b/c": "x"}}}, "at '/operator/nodeSelector'"),
    ({"operator": {"podAnnotations": {"a: b": "x"}}}, "at '/operator/podAnnotations'"),
    ({"networkPolicy": {"dns": {"labels": {"a": "b,c=d"}}}}, "at '/networkPolicy/dns/labels/a'"),
    ({"prometheusRule": {"alertLabels": {"a-b": "x"}}}, "at '/prometheusRule/alertLabels'"),
    ({"prometheusRule": {"runbookBaseUrl": "https://x/{{.Values}}"}}, "at '/prometheusRule/runbookBaseUrl'"),
    ({"channelKey": {"entry": ".."}}, "at '/channelKey/entry'"),
    ({"operator": {"extraEnv": [{"name": "A=B"}]}}, "at '/operator/extraEnv/0/name'"),
    ({"fullnameOverride": "a.b"}, "at '/fullnameOverride'"),
    ({"nameOverride": "Ä"}, "at '/nameOverride'"),
    ({"operator": {"resources": {"limits": {"memory": True}}}}, "at '/operator/resources/limits/memory'"),
    ({"operator": {"affinity": {"nodeAffinity": {"required": {}}}}}, "'required' not allowed"),
    ({"operator": {"topologySpreadConstraints": [{"maxSkews": 1}]}}, "'maxSkews' not allowed"),
    ({"networkPolicy": {"extraEgress": [{"from": []}]}}, "'from' not allowed"),
]


def merged(into: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    for key, value in values.items():
        into[key] = merged(into.get(key, {}), value) if isinstance(value, dict) else value
    return into


@pytest.mark.tools
def test_helm_refuses_each_and_names_the_place(renderer: Helm) -> None:
    values: dict[str, Any] = {}
    for wrong, _ in REFUSED:
        assert not SCHEMA.is_valid(wrong), wrong
        merged(values, wrong)
    message = refusal(renderer, values)
    assert [place for _, place in REFUSED if place not in message] == []

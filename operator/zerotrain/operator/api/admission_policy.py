"""Print the policy for jobs: `python -m zerotrain.operator.api.admission_policy > deploy/policy/jobs.yaml`.

This ValidatingAdmissionPolicy bounds the free-form parts of a job before it is stored. The operator copes
with everything that is stored without it; with it, the user gets the error at once.
"""

from __future__ import annotations

import sys
from typing import Any

from zerotrain.operator.constants import GROUP, MAX_FREE_ENTRIES, MAX_SPEC_DEPTH, PLURAL, VERSION

from .crd import as_yaml

NAME = "zerotrain-jobs"
MAX_TEXT = 8192
"""Maximum number of characters of one key or text in the free-form parts."""
_HEADER = """\
# Generated from operator/zerotrain/operator/api/admission_policy.py; do not edit. From Kubernetes 1.30 on.
"""
_PARTS = {
    "config": "has({0}.spec.config) ? {0}.spec.config : {{}}",
    "args": "has({0}.spec.model) && has({0}.spec.model.factory) && has({0}.spec.model.factory.args) ? "
    "{0}.spec.model.factory.args : {{}}",
}
_PATHS = {"config": "spec.config", "args": "spec.model.factory.args"}


def _inner(value: str) -> str:
    """Return a CEL expression for the values of a list or an object; an empty list for anything else."""
    return f"(type({value}) == map ? {value}.map(k, {value}[k]) : type({value}) == list ? {value} : [])"


def bounds(value: str, levels: int) -> str:
    """Return a CEL rule that bounds the depth of nested lists and objects, the number of entries of each, and
    the length of each key and text. CEL has no recursion: the rule has one loop for each level. The sizes
    come first, so that nothing large is searched."""
    rule = "false"
    for level in range(levels, 0, -1):
        name = f"v{level}"
        above = f"v{level - 1}" if level > 1 else value
        is_composed = f"(type({name}) == map || type({name}) == list)"
        inner = f"(type({name}) == string ? size({name}) <= {MAX_TEXT} : !{is_composed} || {rule})"
        keys = f"(type({above}) != map || {above}.all(k, size(k) <= {MAX_TEXT}))"
        rule = f"(size({above}) <= {MAX_FREE_ENTRIES} && {keys} && {_inner(above)}.all({name}, {inner}))"
    return rule


def policy() -> list[dict[str, Any]]:
    """Return the policy and its binding."""
    unchanged = " && ".join(
        f"({part.format('oldObject')}) == ({part.format('object')})" for part in _PARTS.values()
    )
    validations = [
        {
            "expression": bounds(f"variables.{name}", MAX_SPEC_DEPTH),
            "message": f"{path}: lists and objects may lie {MAX_SPEC_DEPTH} levels deep, each may have "
            f"{MAX_FREE_ENTRIES} entries, and a key or text {MAX_TEXT} characters. Mount or download data, "
            "and keep in the job what describes it",
        }
        for name, path in _PATHS.items()
    ]
    rules = [
        {
            "apiGroups": [GROUP],
            "apiVersions": [VERSION],
            "operations": ["CREATE", "UPDATE"],
            "resources": [PLURAL],
        }
    ]
    return [
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingAdmissionPolicy",
            "metadata": {"name": NAME},
            "spec": {
                "failurePolicy": "Fail",
                "matchConstraints": {"resourceRules": rules},
                "matchConditions": [
                    {"name": "free-form-parts-change", "expression": f"oldObject == null || !({unchanged})"}
                ],
                "variables": [
                    {"name": name, "expression": part.format("object")} for name, part in _PARTS.items()
                ],
                "validations": validations,
            },
        },
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": {"name": NAME},
            "spec": {"policyName": NAME, "validationActions": ["Deny"]},
        },
    ]


def render() -> str:
    """Return both as YAML text."""
    return _HEADER + as_yaml(*policy())


if __name__ == "__main__":
    sys.stdout.write(render())

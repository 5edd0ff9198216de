"""The job that results when its file replaces it."""

from __future__ import annotations

from typing import Any

import pytest

from zerotrain.client.cluster import merged_over

pytestmark = pytest.mark.unit


def test_the_files_spec_and_the_labels_that_others_have_set() -> None:
    mine: dict[str, Any] = {"f:metadata": {"f:labels": {"f:team": {}, "f:dropped": {}}}}
    old = {
        "metadata": {
            "name": "gpt",
            "uid": "u",
            "resourceVersion": "7",
            "finalizers": ["zerotrain.dev/pods"],
            "labels": {"team": "a", "dropped": "yes", "others": "kept"},
            "annotations": {"note": "of somebody"},
            "managedFields": [{"manager": "me", "fieldsV1": mine}, {"manager": "kubectl"}, "nonsense"],
        },
        "spec": {"steps": 1, "elastic": {"minWorkers": 1}},
        "status": {"phase": "Running"},
    }
    new = {"kind": "K", "metadata": {"name": "gpt", "labels": {"team": "b"}}, "spec": {"steps": 2}}
    assert merged_over(old, new, "me") == {
        "kind": "K",
        "metadata": {
            "name": "gpt",
            "uid": "u",
            "resourceVersion": "7",
            "finalizers": ["zerotrain.dev/pods"],
            "labels": {"team": "b", "others": "kept"},
            "annotations": {"note": "of somebody"},
        },
        "spec": {"steps": 2},
    }
    assert "labels" not in merged_over({"metadata": {}}, {"metadata": {}}, "me")["metadata"]

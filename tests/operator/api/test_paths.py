"""No path of the API has an empty part, or one that is `.` or `..`: the API server's schema and the models
refuse them in every field that holds a path, those of later versions included.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import pytest
import re2
from pydantic import Field, TypeAdapter, ValidationError

from tests.support.jobs import make_job
from zerotrain.operator.api.base import ApiModel
from zerotrain.operator.api.crd import openapi_schema
from zerotrain.operator.api.validation import refusals

pytestmark = pytest.mark.unit

Json = dict[str, Any]
NO_FILES = {"fieldPath", "emptyDir"}
"""Names that end like a path but are a field of the pod and an object."""

PARTS = (
    *("a/../b", "..", "../a", "a/..", "a/../..", ".", "./a", "a/.", "a/./b"),
    *("a//b", "a/b//", "a\0b", "/a", "//a"),
)
CLEAN = ("a", "a/b", "a.b", ".a/b", "a/.b", "a/..b", "a/...", "a b/c-d_e", "a/b.c/d")


def is_path(name: str) -> bool:
    ending = name.lower()
    return ending.endswith(("path", "paths", "dir", "pathexpr", "folder")) and name not in NO_FILES


def schemas(schema: Json, path: str = "spec") -> Iterator[tuple[str, Json]]:
    """Yield every string of the schema that names a file or folder."""
    for name, child in schema.get("properties", {}).items():
        if child.get("type") == "string" and is_path(name):
            yield f"{path}.{name}", child
        yield from schemas(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from schemas(schema[key], f"{path}[]")


def fields(model: type[ApiModel]) -> Iterator[tuple[str, Any]]:
    """Yield the same of all models, by the classes that a job is made of."""
    for child in model.__subclasses__():
        yield from fields(child)
    for info in model.model_fields.values():
        if info.alias is not None and is_path(info.alias) and "status" not in model.__module__:
            yield f"{model.__name__}.{info.alias}", Annotated[info.annotation, Field(), *info.metadata]


SCHEMAS = dict(schemas(openapi_schema()["properties"]["spec"]))
FIELDS = dict(fields(ApiModel))


def beginnings(name: str) -> str:
    relative = ("subPath", "subPathExpr", "items[].path", "KeyToPath.path", "Item.path")
    return "" if name.endswith(relative) else "/"


def test_the_fields_are_found() -> None:
    found = {name.rsplit(".", 1)[-1] for name in SCHEMAS}
    assert found == {"path", "mountPath", "subPath", "subPathExpr", "workingDir"}
    assert len(SCHEMAS) > 20
    assert {name.rsplit(".", 1)[-1] for name in FIELDS} == found


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_schema_refuses(name: str) -> None:
    pattern = re2.compile(SCHEMAS[name]["pattern"])
    first = beginnings(name)
    assert [part for part in PARTS if pattern.search(first + part) is not None] == []
    assert [part for part in CLEAN if pattern.search(first + part) is None] == []


@pytest.mark.parametrize("name", FIELDS)
def test_the_models_refuse(name: str) -> None:
    adapter, first = TypeAdapter(FIELDS[name]), beginnings(name)
    for part in PARTS:
        with pytest.raises(ValidationError, match=r"without the parts '\.' and '\.\.'"):
            adapter.validate_python(first + part)
    for part in CLEAN:
        assert adapter.validate_python(first + part) == first + part


CONFIG = {"train_micro_batch_size_per_gpu": 1}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("key", ["spill.paths", "offload_optimizer.nvme_path", "offload_param.nvme_path"])
@pytest.mark.parametrize("root", ["/local_nvme", "/local_nvme/"])
def test_the_configuration_of_a_job_is_refused(key: str, part: str, root: str) -> None:
    zero: Json = {"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}}
    block, name = key.split(".")
    folder = root + "/" + part
    zero.setdefault(block, {})[name] = [folder] if name == "paths" else folder
    nvme = {"size": "1Gi", "storageClassName": "c", "requireEncryptedVolume": True}
    job = make_job({"spec.config": {**CONFIG, "zero_optimization": zero}, "spec.nvme": nvme})
    assert [item.path for item in refusals(job.spec)] == [f"spec.config.zero_optimization.{key}"]


def test_nothing_may_be_mounted_below_the_volume_of_the_spill() -> None:
    mounts = {
        "volumes": [{"name": "v", "emptyDir": {}}],
        "volumeMounts": [{"name": "v", "mountPath": "/local_nvme/x"}],
    }
    job = make_job({"spec.nvme": {"size": "1Gi"}, "spec.podTemplate": mounts})
    (refusal,) = refusals(job.spec)
    assert refusal.path == "spec.podTemplate.volumeMounts[0].mountPath"
    assert "below spec.nvme.mountPath /local_nvme" in refusal.message

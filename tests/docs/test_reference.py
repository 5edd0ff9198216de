"""`docs/reference/zerotrainingjob.md` equals what the models generate.

Its statements about changes are what the API server does, by the tables that
`tests/operator/api/test_crd_rejections.py` applies to a real one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.crd_cases import EDITABLE, IMMUTABLE
from zerotrain.operator.api.base import rule
from zerotrain.operator.api.crd import openapi_schema
from zerotrain.operator.api.reference import ANY_TIME, SUSPENDED, _change, document, mutability

pytestmark = pytest.mark.unit


FILE = Path(__file__).parents[2] / "docs" / "reference" / "zerotrainingjob.md"


def test_the_file_is_up_to_date() -> None:
    command = "python -m zerotrain.operator.api.reference > docs/reference/zerotrainingjob.md"
    assert FILE.read_text(encoding="utf-8") == document(), f"regenerate it: {command}"


def fields(schema: dict[str, Any], path: str) -> list[str]:
    found = []
    for name, child in schema.get("properties", {}).items():
        found += [f"{path}.{name}", *fields(child, f"{path}.{name}")]
    if "items" in schema:
        found += fields(schema["items"], path)
    return found


def test_every_field_has_its_row() -> None:
    text = document()
    schema = openapi_schema()
    names = {name.rsplit(".", 1)[-1] for name in fields(schema, "")}
    rows = set(re.findall(r"^\| \**`([A-Za-z0-9]+)`", text, flags=re.MULTILINE))
    assert names - rows == {"apiVersion", "kind", "spec", "status"} - rows
    for top in schema["properties"]["spec"]["properties"]:
        assert f"| `{top}` |" in text or f"| **`{top}`** |" in text


def test_no_row_breaks_its_table() -> None:
    for line in document().splitlines():
        if line.startswith("| ") and "`" in line:
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            assert len(cells) in (2, 3, 6), line


def documented_of(path: str, value: object) -> list[str]:
    paths = [f"{path}.{name}" for name in value] if isinstance(value, dict) else [path]
    return [mutability(path), *map(mutability, paths)]


@pytest.mark.parametrize(("change", "path", "text"), IMMUTABLE)
def test_what_the_api_server_refuses_to_change_is_not_documented_as_free(
    change: dict[str, Any], path: str, text: str
) -> None:
    documented = [when for field, value in change.items() for when in documented_of(field, value)]
    assert any(when != ANY_TIME for when in documented), (change, documented)
    if "suspended" in text and not text.startswith("given"):
        assert any(SUSPENDED in when for when in documented), (change, documented)


def test_what_the_api_server_lets_change_is_documented_as_free() -> None:
    for change in EDITABLE:
        for path, value in change.items():
            paths = [f"{path}.{name}" for name in value] if isinstance(value, dict) else [path]
            assert {mutability(field) for field in paths} <= {ANY_TIME}, paths


def test_a_rule_in_unknown_words_is_an_error_here() -> None:
    with pytest.raises(ValueError, match="in a known form"):
        _change(rule("self.seed == oldSelf.seed", "seed stays as it is"))


def test_links_inside_the_page_lead_to_headings() -> None:
    text = document()
    anchors = {
        re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]*)\)", text)) <= anchors

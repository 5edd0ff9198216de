"""docs/images/top.svg is what `zerotrain top` draws today."""

from __future__ import annotations

import re
from html import unescape

import pytest

from deploy.pictures.__main__ import FILE, top
from tests.test_repo_shape import ROOT


def words(picture: str) -> list[str]:
    """The texts of an SVG without the time of day, which is shown in the zone of the machine."""
    texts = re.findall(r"<text [^>]*>([^<]*)</text>", picture)
    return [
        re.sub(r"\d\d:\d\d:\d\d", "TIME", unescape(text)) for text in texts if text.strip("\u00a0 &#160;")
    ]


@pytest.mark.ranks
async def test_the_picture_shows_what_the_view_draws() -> None:
    found = words(FILE.read_text())
    assert any("straggler" in text for text in found)
    assert found == words(await top()), "the view has changed; run: python -m deploy.pictures"


@pytest.mark.unit
def test_the_picture_loads_nothing() -> None:
    assert re.search(r"url\(\W*http|href|@import", FILE.read_text()) is None


@pytest.mark.unit
def test_the_readme_shows_it() -> None:
    assert f"]({FILE.relative_to(ROOT)})" in (ROOT / "README.md").read_text()

"""`python -m deploy.pictures`: draws docs/images/top.svg, the live view of `zerotrain top`."""

from __future__ import annotations

import asyncio
import os
import re
import time
from pathlib import Path

from deploy.pictures.example import looks
from zerotrain.cli.top_app import TopApp

FILE = Path(__file__).resolve().parents[2] / "docs" / "images" / "top.svg"
SIZE = (128, 22)
"""Columns and lines."""

_FONTS = re.compile(r"\s*@font-face \{.*?\}", flags=re.DOTALL)
"""Loaded from elsewhere, which GitHub does not allow a picture to do."""


async def top() -> str:
    """The picture as SVG."""
    first, *others = looks()
    app = TopApp(lambda: others[-1], first=first, every_s=3600)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.pause()
        for look in others:
            app.show(look)
        await pilot.pause()
        return _FONTS.sub("", app.export_screenshot(title="zerotrain top gpt"))


def main() -> None:
    os.environ["TZ"] = "UTC"  # the view shows the time in the zone of the machine
    time.tzset()
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(asyncio.run(top()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""A headless Chromium from PATH, for pages that people look at."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    # This maps every name to one that does not resolve: the page must not need any host.
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
TIMEOUT_S = 120.0


class Browser:
    """One browser program; each call is a process with its own profile."""

    def __init__(self, program: str, folder: Path) -> None:
        self.program = program
        self.folder = folder
        self._calls = 0

    def screenshot(self, page: Path, image: Path, *, width: int, height: int, dark: bool = False) -> None:
        """Save the top of the page as a PNG image."""
        dark_flags = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []
        self._run(page, f"--screenshot={image}", f"--window-size={width},{height}", *dark_flags)

    def dom(self, page: Path) -> str:
        """Return the page's elements after it was loaded, as HTML."""
        return self._run(page, "--dump-dom")

    def pdf(self, page: Path, file: Path) -> None:
        """Save the page as it is printed."""
        self._run(page, f"--print-to-pdf={file}", "--no-pdf-header-footer")

    def _run(self, page: Path, *flags: str) -> str:
        self._calls += 1
        profile = self.folder / f"profile-{self._calls}"
        command = [self.program, *FLAGS, f"--user-data-dir={profile}", *flags, page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        return done.stdout


def find_browser(folder: Path) -> Browser:
    """Find a browser; skip the test with the reason if the machine has none."""
    program = next((found for name in NAMES if (found := shutil.which(name)) is not None), None)
    if program is None:
        pytest.skip(f"no browser on PATH ({', '.join(NAMES)}): apt-get install chromium to look at the page")
    return Browser(program, folder)


def paper(image: Path, *, parts: int) -> float:
    """Return the brightness of the page's left edge, 0 to 1.

    Raises AssertionError if one of the equal parts of its height is empty, as charts must be drawn in visible
    colours.
    """
    from matplotlib.image import imread

    pixels = imread(image)[..., :3]
    height = len(pixels) // parts
    for part in range(parts):
        region = pixels[part * height : (part + 1) * height, 100:900]
        assert float(region.std()) > 0.02, f"part {part} of the page is empty"
        assert len({tuple(pixel) for pixel in region[::7, ::7].reshape(-1, 3).round(1).tolist()}) > 8
    return float(pixels[:, :8].mean())

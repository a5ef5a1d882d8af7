"""A headless browser that opens a page: what its console says, and how wide the page is."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PHONE: Final = 375
"""CSS pixels of a common phone's width."""

# A page in a frame of a given width; the title tells how wide its contents are.
_FRAME: Final = """<!doctype html><title>not loaded</title><body style="margin:0">
<iframe id="page" src="{page}" style="border:0;width:{width}px;height:800px"></iframe>
<script>onload = () => {{
  const root = document.getElementById("page").contentDocument.documentElement;
  document.title = `${{root.clientWidth}} ${{root.scrollWidth}} ${{root.innerText.length}}`;
}}</script>"""


@dataclass(frozen=True)
class Visit:
    """What a browser found on a page."""

    console: list[str]
    """Messages of the console, errors of loading among them."""
    width: int
    """CSS pixels that the page had."""
    needed: int
    """CSS pixels that the page would need, so that nothing has to be scrolled sideways."""
    characters: int
    """Characters that a reader sees."""


def find_browser() -> str | None:
    """The path of a browser; None where none is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def visit(browser: str, page: Path, width: int) -> Visit:
    """Open a page in a window of some width."""
    frame = page.with_name("frame.html")
    frame.write_text(_FRAME.format(page=page.name, width=width), encoding="utf-8")
    done = subprocess.run(
        [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--allow-file-access-from-files",
            "--enable-logging=stderr",
            f"--user-data-dir={page.parent / 'browser'}",
            f"--window-size={max(width, 800)},900",
            "--dump-dom",
            frame.as_uri(),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    found = re.search(r"<title>(\d+) (\d+) (\d+)</title>", done.stdout)
    assert found is not None, done.stdout[:500] + done.stderr
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Visit(console, *map(int, found.groups()))


def loads_from(text: str) -> list[str]:
    """Everything that an HTML text would load: sources, links and URLs of styles."""
    found = re.findall(r"""(?:src|href|srcset)\s*=\s*["']([^"']*)|url\(([^)]*)\)|@import""", text)
    named = [first or second for first, second in found]
    return [one for one in named if not one.strip("'\"").startswith(("#", "data:"))]

"""A headless Chromium for tests of pages; without one they are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTHS = (1400, 390)
SMALLEST = 12.0
"""Pixels of the smallest text on a phone."""
TEXT_SIZES = """() => {
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const parent = walker.currentNode.parentElement, text = walker.currentNode.textContent.trim();
    if (!text || !parent.checkVisibility() || parent.closest(".visually-hidden, script, style, .paper")) continue;
    let size = parseFloat(getComputedStyle(parent).fontSize);
    const svg = parent.closest("svg");
    if (svg) size *= svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
    found.push([size, text.slice(0, 60)]);
  }
  return found;
}"""


def chromium() -> str:
    """The browser's path; skips the test where there is none, or no playwright to drive it."""
    pytest.importorskip("playwright", reason="playwright is not installed: pip install -e '.[browser]'")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    return path


@contextmanager
def browser() -> Iterator[Any]:
    """The running browser."""
    path = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield started
        finally:
            started.close()


@contextmanager
def opened(started: Any, page: Path | str, *, width: int, dark: bool = False) -> Iterator[Any]:
    """A page in a window of this width, every part of it unfolded."""
    url = page if isinstance(page, str) else page.resolve().as_uri()
    tab = started.new_page(viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light")
    try:
        tab.goto(url)
        tab.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
        yield tab
    finally:
        tab.close()


def problems_everywhere(started: Any, page: Path | str) -> list[str]:
    """What is wrong with a page at any width, light or dark."""
    found = []
    for width in WIDTHS:
        for dark in (False, True):
            with opened(started, page, width=width, dark=dark) as tab:
                where = f"{width} px, {'dark' if dark else 'light'}"
                found += [f"{where}: {problem}" for problem in problems(tab, width=width)]
    return found


def problems(tab: Any, *, width: int) -> list[str]:
    """What is wrong with a page: faults that axe-core finds, overflow, and text too small for a phone."""
    from axe_playwright_python.sync_playwright import Axe

    found = [
        f"{fault['id']}: {node['html'][:150]} ({node['failureSummary'].splitlines()[-1].strip()[:200]})"
        for fault in Axe().run(tab).response["violations"]
        for node in fault["nodes"]
    ]
    wide = tab.evaluate("document.documentElement.scrollWidth")
    if wide > width:
        found.append(f"the page is {wide} pixels wide in a window of {width}")
    if width < 500:
        found += [
            f"text of {size:.1f} px: {text!r}" for size, text in tab.evaluate(TEXT_SIZES) if size < SMALLEST - 0.05
        ]
    return found

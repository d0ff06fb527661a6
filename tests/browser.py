"""A headless Chromium for page tests, which are skipped if it is not installed."""

import shutil
from contextlib import contextmanager

import pytest

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


@contextmanager
def browser():
    """Start the browser, and close it at the end; skip the test if it or playwright is not installed."""
    api = pytest.importorskip("playwright.sync_api", reason="not installed: pip install -e '.[browser]'")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield started
        finally:
            started.close()


@contextmanager
def opened(started, page, *, width, dark=False):
    """Open a page in a window of this width, with all collapsible parts expanded."""
    url = page if isinstance(page, str) else page.resolve().as_uri()
    tab = started.new_page(viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light")
    try:
        tab.goto(url)
        tab.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
        yield tab
    finally:
        tab.close()


def problems_everywhere(started, page):
    """Return the problems of a page at every tested width, in light and dark mode."""
    found = []
    for width in WIDTHS:
        for dark in (False, True):
            with opened(started, page, width=width, dark=dark) as tab:
                where = f"{width} px, {'dark' if dark else 'light'}"
                found += [f"{where}: {problem}" for problem in problems(tab, width=width)]
    return found


def problems(tab, *, width):
    """Return the problems of a page: axe-core violations, overflow, and text too small for a phone."""
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

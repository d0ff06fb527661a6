"""The documentation site builds without warnings, renders its formulas, and makes no network requests."""

import re

import pytest

import neuclip
from tests.launch import python

pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install -e '.[docs]'")
LOADED = re.compile(r'<(?:script|img|iframe|source|link)[^>]*?(?:src|srcset|href)="(https?://[^"]+)"')

FIGURE_WIDTHS = """Array.from(document.querySelectorAll('article img[src$=".svg"]:not([src*="badge-"])'))
  .map((image) => image.getBoundingClientRect().width)"""
BROKEN_NAMES = """Array.from(document.querySelectorAll("article td code"))
  .map((code) => [code.textContent, code.getClientRects().length])
  .filter(([text, lines]) => /^[a-z_.]+$/.test(text) && lines > 1)"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    build = ("-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder))
    done = python(*build, timeout=500, NO_MKDOCS_2_WARNING="1")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_makes_no_requests(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not LOADED.findall(text), page
        assert 'class="arithmatex"' not in text, f"{page}: a formula was not rendered"
    assert (site / "methods.html").read_text(encoding="utf-8").count("<math") > 50
    assert "build_objective" in (site / "reference/pipeline.objectives.html").read_text(encoding="utf-8")
    interface = (site / "reference/neuclip.html").read_text(encoding="utf-8")
    for name in neuclip._PUBLIC:
        assert f'id="neuclip{name.lower()}"' in interface, f"neuclip.{name} is not documented"
        assert f'id="{".".join(neuclip._PUBLIC[name])}"' in interface
    home = (site / "index.html").read_text(encoding="utf-8")
    assert home.index("reference/neuclip.html") < home.index("reference/pipeline"), "the public interface comes first"


@pytest.mark.slow
def test_every_page_fits_a_phone_screen(site):
    from tests.browser import browser, opened

    with browser() as started:
        for page in sorted(site.glob("*.html")):
            with opened(started, page, width=390) as tab:
                assert tab.evaluate("document.documentElement.scrollWidth") <= 390, page
                # Figures scroll, since their text would be 5 pixels high; no name in a table is broken.
                assert [width for width in tab.evaluate(FIGURE_WIDTHS) if width < 700] == [], page
                assert tab.evaluate(BROKEN_NAMES) == [], page

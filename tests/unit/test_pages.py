"""Reports in a browser: accessible by axe-core's rules, and fit for a phone."""

import pytest

from pipeline.report import write_report
from tests.browser import browser, opened, problems_everywhere
from tests.report_runs import make_run

pytestmark = pytest.mark.daily


@pytest.fixture(scope="module")
def started():
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def pages(started, tmp_path_factory):
    """Of a run, and of a comparison."""
    folder = tmp_path_factory.mktemp("pages")
    runs = [make_run(folder / "one"), make_run(folder / "another", name="openclip", right=90)]
    return [write_report(runs[:1]), write_report(runs, output=folder / "comparison")]


def test_pages_are_accessible_and_fit_the_screen(started, pages):
    for page in pages:
        assert problems_everywhere(started, page) == []


def test_known_faults_are_detected(started, tmp_path):
    page = tmp_path / "bad.html"
    page.write_text('<img src="data:,"><p style="color: #bbb; font-size: 8px; width: 900px">faint and small</p>')
    found = " ".join(problems_everywhere(started, page))
    for fault in ("image-alt", "color-contrast", "900", "8.0 px"):
        assert fault in found, fault


def test_plots_fill_their_cards_and_pages_make_no_requests(started, pages):
    requests = list[str]()
    for width in (1300, 800, 390):
        with opened(started, pages[0], width=width) as tab:
            sizes = tab.evaluate("""() => [...document.querySelectorAll(".plot")].map(plot => {
                const style = getComputedStyle(plot.parentElement), card = plot.parentElement.clientWidth;
                const room = card - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
                return [plot.querySelector("svg").getBoundingClientRect().width, room]; })""")
            tab.on("request", lambda request: requests.append(request.url))
            tab.reload()
        assert sizes
        assert all(drawn == pytest.approx(room, abs=1) for drawn, room in sizes)
    assert {url.partition(":")[0] for url in requests} <= {"file", "data"}

"""The ingestion report in a browser: it is accessible and fits the width of a phone."""

# ruff: noqa: F811 (imported fixtures are requested by name)
from __future__ import annotations

from pathlib import Path

from data_prep.dataset.ingest_report import write_report
from tests.browser import browser, problems_everywhere
from tests.ingested import ROWS, copied, made, own_opener, site  # noqa: F401


def test_the_report_is_accessible_and_fits_a_phone_screen(copied: Path) -> None:
    named = copied.rename(copied.with_name("a-data-set-with-rather-a-long-name-and-no-blank-in-it"))
    page = write_report(named)
    assert 'alt=""' not in page.read_text()
    assert f'alt="picture {ROWS - 1}"' in page.read_text()
    with browser() as started:
        assert problems_everywhere(started, page) == []

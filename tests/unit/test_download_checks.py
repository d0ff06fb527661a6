"""A wrong table, column or hash is detected before the download starts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.fetching import source_checks
from data_prep.settings.download_config import DownloadConfig, FetchConfig, GuardConfig
from pipeline.errors import UserError
from tests.downloads import download_config
from tests.web import Site, jpeg, serve


@pytest.fixture
def site() -> Iterator[Site]:
    with serve() as site:
        yield site


def config_for(folder: Path, columns: dict[str, list], **source: object) -> DownloadConfig:
    pq.write_table(pa.table(columns), folder / "urls.parquet")
    return download_config(folder / "out", folder / "urls.parquet", source=source)


def good(count: int = 20) -> dict[str, list]:
    return {
        "url": [f"https://example.org/{k}.jpg" for k in range(count)],
        "caption": [f"a picture of {k} cats" for k in range(count)],
        "sha256": [hashlib.sha256(bytes([k])).hexdigest() for k in range(count)],
    }


def served(site: Site) -> dict[str, list]:
    """A table of twelve images with their hashes."""
    bodies = [jpeg(side=16 + k) for k in range(12)]
    return {
        "url": [site.image(f"/{k}.jpg", body) for k, body in enumerate(bodies)],
        "caption": ["a cat"] * 12,
        "digest": [hashlib.sha256(body).hexdigest() for body in bodies],
    }


def test_wrong_settings_are_refused_with_the_remedy(tmp_path):
    assert source_checks.check_source(config_for(tmp_path, good(), hash="sha256", rows=20)) == []
    for source, words in (
        ({"url": "link"}, "has no column 'link'. Its columns are 'url', 'caption', 'sha256'"),
        ({"url": "caption", "caption": "url"}, "Column 'url' does: set source.url=url"),
        ({"caption": "sha256"}, "so it is not the captions"),
        ({"hash": "sha256", "hash_kind": "md5"}, "It looks like sha256: set source.hash_kind"),
        ({"rows": 21}, "The table has 20 rows, but table is published with 21"),
        ({"sha256": {"urls.parquet": "0" * 64}}, "it is damaged or another version"),
        ({"sha256": {"other.parquet": "0" * 64}}, "names other.parquet, which is not among urls.parquet"),
    ):
        with pytest.raises(UserError) as caught:
            source_checks.check_source(config_for(tmp_path, good(), **source))
        assert words in str(caught.value)


def test_some_empty_captions_are_noted(tmp_path):
    texts = ["", None] * 5 + ["a cat"] * 90
    lists = [None, [], ["", None], [" "], []] * 2 + [["", "a cat"]] * 90
    for captions in (texts, lists):
        config = config_for(tmp_path, {**good(100), "caption": captions})
        assert source_checks.check_source(config) == ["10% of the first 100 captions are empty."]


def test_hashes_of_the_first_images_are_compared(tmp_path, site):
    columns = served(site)
    right, urls = columns["digest"], columns["url"]

    def check(digest, **others):
        columns["digest"] = digest
        return source_checks.check_hashes(replace(config_for(tmp_path, columns, hash="digest"), **others))

    assert check(right) == []
    assert check(right, guard=GuardConfig()) == [
        "Only 0 of 12 probed URLs gave an image (mostly 'refused address'), too few to check column 'digest'."
    ]
    assert check(["0" * 64] * 3 + right[3:]) == ["25% of 12 probed images have changed since their hash was taken."]
    with pytest.raises(UserError, match="does not hold the sha256 of the bytes as served: 12 of 12 probed images"):
        check([hashlib.sha256(url.encode()).hexdigest() for url in urls])
    urls[3] = None  # regression test: a row without a URL used to end the download with an AttributeError
    assert check(right) == []


def test_unavailable_distributor_is_refused(monkeypatch):
    monkeypatch.setattr(source_checks.importlib.util, "find_spec", lambda name: None)
    source_checks.check_distributor(FetchConfig())
    for name in ("pyspark", "ray"):
        with pytest.raises(UserError, match=r"not installed here.*\.\[scale\]"):
            source_checks.check_distributor(FetchConfig(distributor=name))
    monkeypatch.setattr(source_checks.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    source_checks.check_distributor(FetchConfig(distributor="ray"))
    with pytest.raises(UserError, match="needs a Java"):
        source_checks.check_distributor(FetchConfig(distributor="pyspark"))

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


def test_good_table_passes_without_notes(tmp_path):
    assert source_checks.check_source(config_for(tmp_path, good(), hash="sha256", rows=20)) == []


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"url": "link"}, "has no column 'link'. Its columns are 'url', 'caption', 'sha256'"),
        ({"url": "caption", "caption": "url"}, "Column 'url' does: set source.url=url"),
        ({"caption": "sha256"}, "so it is not the captions"),
        ({"hash": "sha256", "hash_kind": "md5"}, "It looks like sha256: set source.hash_kind"),
        ({"rows": 21}, "The table has 20 rows, but table is published with 21"),
        ({"sha256": {"urls.parquet": "0" * 64}}, "it is damaged or another version"),
        ({"sha256": {"other.parquet": "0" * 64}}, "names other.parquet, which is not among urls.parquet"),
    ],
)
def test_wrong_settings_are_refused_with_the_remedy(tmp_path, source, words):
    with pytest.raises(UserError) as caught:
        source_checks.check_source(config_for(tmp_path, good(), **source))
    assert words in str(caught.value)


def test_some_empty_captions_are_noted(tmp_path):
    texts = ["", None] * 5 + ["a cat"] * 90
    lists = [None, [], ["", None], [" "], []] * 2 + [["", "a cat"]] * 90
    for captions in (texts, lists):
        config = config_for(tmp_path, {**good(100), "caption": captions})
        assert source_checks.check_source(config) == ["10% of the first 100 captions are empty."]


def test_a_column_of_other_hashes_is_refused(tmp_path, site):
    columns = served(site)
    columns["digest"] = [hashlib.sha256(url.encode()).hexdigest() for url in columns["url"]]
    config = config_for(tmp_path, columns, hash="digest")
    source_checks.check_source(config)
    with pytest.raises(UserError, match="does not hold the sha256 of the bytes as served: 12 of 12 probed images"):
        source_checks.check_hashes(config)


def test_correct_hash_passes_and_changed_images_are_noted(tmp_path, site):
    columns = served(site)
    assert source_checks.check_hashes(config_for(tmp_path, columns, hash="digest")) == []
    refused = replace(config_for(tmp_path, columns, hash="digest"), guard=GuardConfig())
    assert source_checks.check_hashes(refused) == [
        "Only 0 of 12 probed URLs gave an image (mostly 'refused address'), too few to check column 'digest'."
    ]
    columns["digest"][:3] = ["0" * 64] * 3
    notes = source_checks.check_hashes(config_for(tmp_path, columns, hash="digest"))
    assert notes == ["25% of 12 probed images have changed since their hash was taken."]


def test_probed_rows_without_a_url_give_no_image(tmp_path, site):
    """Regression test: they used to end the download with an AttributeError."""
    columns = served(site)
    columns["url"][3] = None
    assert source_checks.check_hashes(config_for(tmp_path, columns, hash="digest")) == []


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

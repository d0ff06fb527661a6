"""How unusual rows are handled: blank captions, unreadable lines, other kinds of hashes, repeated URLs."""

# ruff: noqa: F811 (imported fixtures are requested by name)
import hashlib
from dataclasses import replace
from unittest import mock

import pyarrow as pa
import pytest

from data_prep.dataset import canonical_tar
from data_prep.dataset.dataset_folder import Folder
from data_prep.dataset.ingest_report import write_report
from data_prep.dataset.verification import verify
from data_prep.download_config import GuardConfig
from data_prep.fetching import shard_writer
from data_prep.fetching.downloader import ShardDownloader
from data_prep.ingest import prepare
from pipeline.errors import UserError
from tests.ingested import fetch_here, made, own_opener, prepared, site  # noqa: F401
from tests.web import jpeg


def test_removing_one_of_two_rows_with_the_same_url_keeps_the_other(site, tmp_path):
    url = site.image("/twice.jpg", jpeg(side=33))
    columns = {"url": [url, url], "caption": ["first", "second"], "uid": ["a", "b"]}
    config, plan = prepared(tmp_path, columns, uid="uid")
    folder = Folder(tmp_path / "data")
    folder.removed.write_text("0000000001\n")
    assert fetch_here(config, plan, [0]).failures == {"removed": 1}
    assert [key for key, _ in canonical_tar.samples(folder.tar(0))] == ["0000000000"]


def test_a_failed_write_stops_the_requests_of_its_shard(site, tmp_path, monkeypatch):
    """Servers are not asked in vain when the disk is full."""
    urls = [site.image(f"/full-{k}", jpeg(side=30 + k % 5)) for k in range(300)]
    config, plan = prepared(tmp_path, {"url": urls, "caption": ["a cat"] * 300})
    config = replace(config, fetch=replace(config.fetch, threads=4))
    folder, asked = Folder(tmp_path / "data"), len(site.agents)
    monkeypatch.setattr(shard_writer, "facts_text", mock.Mock(side_effect=OSError(28, "No space left on device")))
    assert not ShardDownloader(config, folder, plan)((0, str(folder.staging / "0.arrow")))[0]
    assert folder.finished() == []
    assert len(site.agents) - asked < 100, "a few that were under way"
    monkeypatch.undo()
    assert fetch_here(config, plan, [0]).n == 300


def test_unreadable_lines_are_counted(site, tmp_path):
    urls = [site.image(f"/line-{k}", jpeg(side=30 + k)) for k in range(20)]
    lines = ["caption\turl", *(f"a cat {k}\t{url}" for k, url in enumerate(urls)), "a stray line"]
    (tmp_path / "urls.tsv").write_text("\n".join(lines) + "\n")
    config, plan = prepared(tmp_path, tmp_path / "urls.tsv")
    facts = fetch_here(config, plan, [0]).facts
    assert (facts["source_rows"], facts["source_rows_skipped"], facts["urls"]) == (21, 1, 20)
    assert "source_rows_skipped</td><td><code>1<" in write_report(tmp_path / "data").read_text()


def test_a_dataset_without_samples_is_rejected_with_the_reason(made, tmp_path):
    config = replace(
        made, output=str(tmp_path / "none"), guard=GuardConfig(), source=replace(made.source, name="table")
    )
    config, plan = prepare(config)
    with pytest.raises(
        UserError, match=r"None of 24 URLs gave a sample \(refused address: 24\).*guard\.allow_addresses"
    ):
        fetch_here(config, plan, range(plan.shards))


def test_hashes_of_any_kind_are_verified_and_rows_without_one_or_a_caption_counted(site, tmp_path):
    """Regression test: rows without a hash were fetched, and counted as mismatches."""
    bodies = [jpeg(side=30 + k % 5) for k in range(8)]
    digests = [hashlib.md5(body).hexdigest() for body in bodies]
    digests[:4] = [None, "", "0" * 32, digests[3].upper()]
    columns = {
        "url": [site.image(f"/odd-{k}", body) for k, body in enumerate(bodies)],
        "caption": ["a cat"] * 5 + ["", None, " \t"],
        "digest": pa.array(digests).dictionary_encode(),
    }
    config, plan = prepared(tmp_path, columns, hash="digest", hash_kind="md5")
    asked = len(site.agents)
    manifest = fetch_here(config, plan, [0])
    assert (manifest.n, manifest.failures) == (2, {"no hash": 2, "hash mismatch": 1, "no caption": 3})
    assert len(site.agents) - asked == 6
    assert verify(config.output) == []

"""How unusual rows are handled: blank captions, unreadable lines, other kinds of hashes, repeated URLs."""

# ruff: noqa: F811 (imported fixtures are requested by name)
from __future__ import annotations

import hashlib
from dataclasses import replace

import pyarrow as pa
import pytest

from data_prep.dataset import canonical_tar, duplicates
from data_prep.dataset.dataset_folder import Folder
from data_prep.dataset.ingest_report import write_report
from data_prep.dataset.verification import verify
from data_prep.download_config import GuardConfig
from data_prep.ingest import prepare
from data_prep.reasons import is_transient
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


def test_unreadable_lines_are_counted(site, tmp_path):
    urls = [site.image(f"/line-{k}", jpeg(side=30 + k)) for k in range(20)]
    lines = ["caption\turl", *(f"a cat {k}\t{url}" for k, url in enumerate(urls)), "a stray line"]
    (tmp_path / "urls.tsv").write_text("\n".join(lines) + "\n")
    config, plan = prepared(tmp_path, tmp_path / "urls.tsv")
    facts = fetch_here(config, plan, [0]).facts
    assert (facts["source_rows"], facts["source_rows_skipped"], facts["urls"]) == (21, 1, 20)
    assert "source_rows_skipped</td><td><code>1<" in write_report(tmp_path / "data").read_text()


BODIES = [jpeg(side=30 + k) for k in range(4)]
SHA256 = [hashlib.sha256(body).hexdigest() for body in BODIES]
UPPER = pa.array([*(digest.upper() for digest in SHA256[:2]), "0" * 64, SHA256[3]]).dictionary_encode()
ROWS = {
    "blank captions": ({"caption": ["a cat", "", None, " \t"]}, {"no caption": 3}, 4),
    "uppercase hashes": ({"digest": UPPER}, {"hash mismatch": 1}, 4),
    # Regression test: they were fetched, and counted as mismatches.
    "no hash": ({"digest": [None, "", *SHA256[2:]]}, {"no hash": 2}, 2),
}


@pytest.mark.parametrize("name", ROWS)
def test_odd_values_are_failures_with_a_reason(name, site, tmp_path):
    columns, failures, requests = ROWS[name]
    urls = [site.image(f"/{name.replace(' ', '-')}-{k}", body) for k, body in enumerate(BODIES)]
    asked = len(site.agents)
    named = {"hash": "digest"} if "digest" in columns else {}
    manifest = fetch_here(*prepared(tmp_path, {"url": urls, "caption": ["a cat"] * 4, **columns}, **named), [0])
    assert (manifest.n, manifest.failures) == (4 - sum(failures.values()), failures)
    assert len(site.agents) - asked == requests
    assert verify(tmp_path / "data") == []
    assert not is_transient("no caption")


def test_a_dataset_without_samples_is_rejected_with_the_reason(made, tmp_path):
    config = replace(
        made, output=str(tmp_path / "none"), guard=GuardConfig(), source=replace(made.source, name="table")
    )
    config, plan = prepare(config)
    with pytest.raises(
        UserError, match=r"None of 24 URLs gave a sample \(refused address: 24\).*guard\.allow_addresses"
    ):
        fetch_here(config, plan, range(plan.shards))


def test_exact_duplicates_with_another_kind_of_hash(site, tmp_path):
    bodies = [jpeg(side=30), jpeg(side=31), jpeg(side=30)]
    columns = {
        "url": [site.image(f"/md5-{k}", body) for k, body in enumerate(bodies)],
        "caption": ["one picture", "another", "the first again"],
        "digest": [hashlib.md5(body).hexdigest() for body in bodies],
    }
    config, plan = prepared(tmp_path, columns, hash="digest", hash_kind="md5")
    assert fetch_here(config, plan, [0]).n == 3
    assert duplicates.exact_groups(Folder(tmp_path / "data"), {}) == [["0000000000", "0000000002"]]

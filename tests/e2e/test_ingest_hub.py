"""Metadata from the hub: pinned, streamed, and read offline from the cache; tested in separate processes."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.hub import COMMIT, Hub
from tests.launch import python
from tests.pair_files import parquet
from tests.web import jpeg, serve

ROWS = 60
REPO = "mlfoundations/datacomp_pools"


def parquet_of(start, stop):
    return parquet(pa.Table.from_pylist([
        {"uid": f"{k:032x}", "url": f"http://example.org/{k}.jpg", "text": f"a cat {k}", "sha256": f"{k:064x}",
         "face_bboxes": [[0.1, 0.1, 0.2, 0.2]], "clip_l14_similarity_score": 0.3} for k in range(start, stop)
    ]))  # fmt: skip


@pytest.fixture
def hub():
    files = {
        "README.md": b"---\nlicense: cc-by-4.0\n---\n",
        "small/a.parquet": parquet_of(0, 40),
        "small/b.parquet": parquet_of(40, ROWS),
        "medium/a.parquet": parquet_of(0, 5),
    }
    with serve() as site:
        yield Hub(site, {REPO: files})


def plan_only(hub, folder, *words, offline=False):
    words += ("source.name=datacomp-small", f"source.rows={ROWS}", "fetch.shard_size=25", f"output={folder / 'out'}")
    return at_hub(hub, folder, "-m", "jobs.download", "--plan-only", *words, offline=offline)


def at_hub(hub, folder, *words, offline=False):
    """Run Python with this hub and a cache of its own."""
    return python(*words, timeout=240, HF_ENDPOINT=hub.base, HF_HOME=str(folder / "hf"), HF_HUB_DISABLE_TELEMETRY="1",
                  HF_HUB_OFFLINE="1" if offline else "0")  # fmt: skip


def test_metadata_is_streamed_at_a_pinned_commit(hub, tmp_path):
    ended = plan_only(hub, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "60 of 60 rows in 3 shards" in ended.stdout
    assert f"is read at revision {COMMIT}" in ended.stderr
    plan = json.loads((tmp_path / "out/plan/plan.json").read_text())
    assert plan["settings"]["source"]["revision"] == COMMIT
    table = pq.read_table(tmp_path / "out/plan/part-00000.parquet")
    assert table.column_names == ["row", "url", "caption", "uid", "sha256", "blur"]
    assert table["uid"].to_pylist() == [f"{k:032x}" for k in range(ROWS)]
    assert not any("medium" in path for path in hub.downloads())

    hub.asked.clear()
    again = plan_only(hub, tmp_path)
    assert again.stdout == ended.stdout
    assert hub.asked == [], "the plan exists: no requests are sent to the hub"


@pytest.mark.slow
def test_offline_mode_reads_the_cache_and_reports_when_it_is_empty(hub, tmp_path):
    missing = plan_only(hub, tmp_path, offline=True)
    assert missing.returncode == 2
    assert "A local copy is read with" in " ".join(missing.stderr.split())
    fill = f"from huggingface_hub import snapshot_download as s; s({REPO!r}, repo_type='dataset')"
    assert at_hub(hub, tmp_path, "-c", fill).returncode == 0
    hub.asked.clear()
    ended = plan_only(hub, tmp_path, "source.files=small/*.parquet", offline=True)
    assert ended.returncode == 0, ended.stderr
    assert "60 of 60 rows in 3 shards" in ended.stdout
    assert hub.asked == []


def test_pages_of_pairs_on_the_hub_are_compared_with_their_checksums(hub, tmp_path):
    """Regression test: a changed byte in a column became another caption."""
    columns = {"image": [jpeg(side=40 + k) for k in range(4)], "caption": [f"a cat {k}" for k in range(4)]}
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    body, ends = parquet(**columns, options=options), {}
    for repo, served in (("my/pairs", body), ("my/damaged", body.replace(b"a cat 2", b"a car 2", 1))):
        hub.files[repo] = hub.stated[repo] = {"train.parquet": served}
        ends[repo] = at_hub(
            hub, tmp_path, "-m", "jobs.pairs", repo, "--output", str(tmp_path / repo), "--processes", "1"
        )
    assert "4 of 4 rows gave a sample" in ends["my/pairs"].stdout, ends["my/pairs"].stderr
    assert ends["my/damaged"].returncode == 2, ends["my/damaged"].stdout
    assert "CRC checksum verification failed" in " ".join(ends["my/damaged"].stderr.split())

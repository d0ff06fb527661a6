"""Every URL table format yields the same rows."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.dataset.dataset_folder import Folder
from data_prep.dataset.shard_plan import load_plan
from data_prep.ingest import prepare
from data_prep.settings.source_config import SourceConfig
from data_prep.sources.metadata_tables import count_known, files_of, read
from pipeline.errors import UserError
from tests.downloads import download_config

# Captions as found on the web: unbalanced quotes, commas, umlauts.
CAPTIONS = ['a "cat', "b, c", "köter 犬", "it's 5' tall"]
ROWS = [{"url": f"http://example.org/{k}.jpg", "caption": caption} for k, caption in enumerate(CAPTIONS)]


def rows_of(source: SourceConfig) -> list[dict[str, str]]:
    return [row for batch in read(source) for row in batch.to_pylist()]


def test_parquet_folder_is_read_in_name_order(tmp_path):
    for k in (1, 0):
        pq.write_table(pa.Table.from_pylist(ROWS[2 * k : 2 * k + 2]), tmp_path / f"part-{k}.parquet")
    source = SourceConfig(table=str(tmp_path))
    assert rows_of(source) == ROWS
    assert count_known(source) == 4


def test_local_copy_may_be_one_folder_or_the_whole_repository(tmp_path):
    for scale in ("medium", "small"):
        (tmp_path / scale).mkdir()
        pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / scale / "a.parquet")
    just, whole = (SourceConfig(name="datacomp-medium", table=str(path)) for path in (tmp_path / "medium", tmp_path))
    assert files_of(just) == files_of(whole) == [tmp_path / "medium/a.parquet"]
    with pytest.raises(UserError, match="matches large/"):
        files_of(replace(whole, files="large/*.parquet"))


@pytest.mark.parametrize("name", ["cc3m", "cc12m"])
def test_conceptual_captions_tsv_without_header_or_quoting(tmp_path, name):
    from data_prep.settings.source_config import SOURCES, resolve

    header = SOURCES[name].settings["header"]
    lines = ["\t".join(row[column] for column in header) for row in ROWS]
    (tmp_path / "list.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    source = resolve(SourceConfig(name=name, table=str(tmp_path / "list.tsv"), rows=4))
    assert rows_of(source) == ROWS
    assert count_known(source) is None


@pytest.mark.parametrize("kind", ["tsv", "csv"])
def test_lines_with_a_wrong_number_of_fields_are_skipped_and_counted(tmp_path, kind):
    mark = {"tsv": "\t", "csv": ","}[kind]
    lines = [f"a cat {k}{mark}http://example.org/{k}.jpg" for k in range(40)]
    lines[7], lines[20] = f"one{mark}two{mark}three", "alone"
    (tmp_path / f"list.{kind}").write_text("\n".join(lines) + "\n")
    source, notes = {"header": ["caption", "url"], "rows": 40}, list[str]()
    config = download_config(tmp_path / "out", tmp_path / f"list.{kind}", source=source)
    _, plan = prepare(config, on_note=notes.append)
    assert (plan.rows, plan.skipped, plan.seen) == (38, 2, 40)
    assert notes == [
        "2 of 40 rows cannot be read (a wrong number of fields, or text that is not UTF-8) and were left out."
    ]
    assert load_plan(Folder(tmp_path / "out")) == plan

    (tmp_path / f"list.{kind}").write_text("\n".join([lines[7]] * 40) + "\n")
    with pytest.raises(UserError, match=r"40 of 40 rows are none, such as 1 \(3 fields instead of 2\)"):
        rows_of(SourceConfig(table=str(tmp_path / f"list.{kind}"), header=("caption", "url")))


def test_gzipped_tsv_and_jsonl(tmp_path):
    tsv = "url\tcaption\n" + "".join(f"{row['url']}\t{row['caption']}\n" for row in ROWS)
    (tmp_path / "list.tsv.gz").write_bytes(gzip.compress(tsv.encode()))
    assert rows_of(SourceConfig(table=str(tmp_path / "list.tsv.gz"))) == ROWS
    (tmp_path / "list.jsonl").write_text("".join(json.dumps({**row, "x": 1}) + "\n" for row in ROWS))
    assert rows_of(SourceConfig(table=str(tmp_path / "list.jsonl"))) == ROWS


@pytest.mark.parametrize("keep", [(), ("likes",)])
def test_unused_jsonl_fields_may_hold_anything(tmp_path, keep):
    odd = [1, "many", None, {"a": 1}]
    rows = [{**row, "score": odd[k], "likes": None if k == 0 else k / 2} for k, row in enumerate(ROWS)]
    (tmp_path / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = rows_of(SourceConfig(table=str(tmp_path / "list.jsonl"), keep=keep))
    assert found == [{name: row[name] for name in ("url", "caption", *keep)} for row in rows]


def test_jsonl_boxes_and_missing_columns(tmp_path):
    path = tmp_path / "list.jsonl.gz"
    boxes = [[], None, [[0, 0, 1, 0.5]], [[0.1, 0.1, 0.2, 0.2]]]
    lines = [json.dumps({**row, "faces": boxes[k], "x": k or "none"}) + "\n" for k, row in enumerate(ROWS)]
    path.write_bytes(gzip.compress("".join(lines).encode()))
    assert [row["faces"] for row in rows_of(SourceConfig(table=str(path), blur="faces"))] == boxes
    (tmp_path / "list.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    with pytest.raises(UserError, match=r"no column 'faces'\. Its columns are 'url', 'caption'"):
        rows_of(SourceConfig(table=str(tmp_path / "list.jsonl"), blur="faces"))


def test_missing_files_are_refused(tmp_path):
    (tmp_path / "a.parquet").touch()
    with pytest.raises(UserError, match="neither a file nor a folder"):
        files_of(SourceConfig(table=str(tmp_path / "none")))
    with pytest.raises(UserError, match="holds no file that ends in"):
        files_of(SourceConfig(table=str(tmp_path), format="csv"))


def test_json_lists_mappings_and_columns_give_the_same_rows(tmp_path):
    """Their captions may be lists, as those of Karpathy's splits and SBU."""
    urls = [row["url"] for row in ROWS]
    lists = [[caption, "second"] for caption in CAPTIONS]
    for captions in (CAPTIONS, lists):
        rows = [{"url": url, "caption": caption} for url, caption in zip(urls, captions, strict=True)]
        forms: dict[str, str] = {
            "list": json.dumps(rows, indent=1),
            "mapping": json.dumps(dict(zip(urls, captions, strict=True))).replace("http://", "http:\\/\\/"),
            "mapping to objects": json.dumps({row["url"]: {"caption": row["caption"], "x": 1} for row in rows}),
            "columns": json.dumps({"caption": captions, "url": urls}),
            "lines": "".join(json.dumps(row) + "\n" for row in rows),
            "lines of lists": "".join(
                json.dumps({"caption": row["caption"], "url": row["url"]}) + "\n" for row in rows
            ),
        }
        for name, text in forms.items():
            (tmp_path / "list.json").write_text(text)
            assert rows_of(SourceConfig(table=str(tmp_path / "list.json"))) == rows, name
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "list.parquet")
        assert rows_of(SourceConfig(table=str(tmp_path / "list.parquet"))) == rows


def test_caption_lists_and_texts_do_not_mix(tmp_path):
    for name, caption in (("a", ["x"]), ("b", "y")):
        pq.write_table(
            pa.table({"url": ["http://a.org"], "caption": [caption], "captions": [2]}), tmp_path / f"{name}.parquet"
        )
    with pytest.raises(UserError, match=r"Column 'caption' of .*b\.parquet is of type string, which cannot be used as"):
        rows_of(SourceConfig(table=str(tmp_path)))
    (tmp_path / "b.parquet").unlink()
    with pytest.raises(UserError, match="The captions are lists, which are stored as `captions`"):
        prepare(download_config(tmp_path / "out", tmp_path, source={"keep": ["captions"]}))

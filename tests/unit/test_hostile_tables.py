"""Damaged or unusual tables are read correctly, or rejected with the file name and what to do."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.dataset.dataset_folder import Folder
from data_prep.dataset.shard_plan import read_shard
from data_prep.ingest import prepare
from data_prep.settings.download_config import DownloadConfig
from data_prep.settings.source_config import SourceConfig
from data_prep.sources.metadata_tables import count_known, read
from pipeline.config import parse
from pipeline.errors import UserError
from tests.downloads import download_config


def rows_of(source: SourceConfig, skipped: list[int] | None = None) -> list[dict]:
    on_skipped = (skipped if skipped is not None else []).append
    return [row for batch in read(source, on_skipped=on_skipped) for row in batch.to_pylist()]


def url(k: int) -> str:
    return f"http://example.org/{k}.jpg"


def columns(count: int, **more: object) -> dict[str, object]:
    return {"url": [url(k) for k in range(count)], "caption": [f"a cat {k}" for k in range(count)], **more}


@pytest.mark.parametrize("kind", [pa.int64(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())])
def test_uids_of_any_type_are_read_as_text(tmp_path, kind):
    uids = [10**12 + k for k in range(4)]
    values = pa.array(uids) if kind == pa.int64() else pa.array([str(uid) for uid in uids])
    values = values.dictionary_encode() if pa.types.is_dictionary(kind) else values.cast(kind)
    pq.write_table(pa.table(columns(4, SAMPLE_ID=values)), tmp_path / "a.parquet")
    named, subset = {"uid": "SAMPLE_ID"}, {"fraction": 0.999999}
    prepare(download_config(tmp_path / "out", tmp_path / "a.parquet", source=named, subset=subset))
    assert read_shard(Folder(tmp_path / "out"), 0)["uid"].to_pylist() == [str(uid) for uid in uids]


@pytest.mark.parametrize(
    ("more", "settings", "words"),
    [
        (
            {"id": [b"\xff\xfe"] * 3},
            {"uid": "id"},
            "has 3 rows, none of which can be read: .* the columns url, caption, id",
        ),
        ({"k": pa.array([[b"\xff"]] * 3).cast(pa.list_(pa.binary()))}, {"keep": ["k"]}, "Column 'k'.*Invalid UTF8"),
    ],
)
def test_a_column_without_readable_text_is_named(tmp_path, more, settings, words):
    table = pa.table(columns(3, **more))
    if "k" in more:  # files may declare bytes to be text, which pyarrow does not check
        text = pa.Array.from_buffers(pa.string(), 3, pa.array([b"\xff"] * 3).buffers())
        table = table.set_column(2, "k", pa.ListArray.from_arrays([0, 1, 2, 3], text))
    pq.write_table(table, tmp_path / "a.parquet")
    tree = {"output": str(tmp_path / "out"), "source": {"table": str(tmp_path / "a.parquet"), **settings}}
    with pytest.raises(UserError, match=words):
        prepare(parse(DownloadConfig, tree))
    assert not (tmp_path / "out").exists()


def test_hidden_copies_of_a_table_are_not_read(tmp_path):
    for name in ("part.parquet", ".ipynb_checkpoints/part.parquet", ".part.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pq.write_table(pa.table(columns(2)), tmp_path / name)
    assert len(rows_of(SourceConfig(table=str(tmp_path)))) == 2


def parquet(content: pa.Table, **options: Any) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(content, buffer, **options)
    return buffer.getvalue()


def tree(value: object) -> bytes:
    return json.dumps(value).encode()


def jsonl(*rows: Mapping[str, object]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


LINES = ["url,caption", *(f"{url(k)},a cat {k}" for k in range(5))]
PLAIN = [{"url": url(k), "caption": f"a cat {k}"} for k in range(3)]
SBU = {"image_urls": [url(k) for k in range(3)], "user_ids": ["x"] * 3, "captions": ["a", "b", "c"]}
SBU_ROWS = [{"image_urls": url(k), "captions": "abc"[k]} for k in range(3)]
SBU_COLUMNS = {"url": "image_urls", "caption": "captions"}
MULTILINE = (
    b'caption,url\n"one, ""two""\nsee http://a.org, and more\nthree",http://b.org/1.jpg\n5" tall,http://b.org/2.jpg\n'
)
READ: dict[str, tuple[str, bytes, dict[str, str], str, list[Any]]] = {
    "integer uids in a column of floats": (
        "a.parquet", parquet(pa.table(columns(3, id=[1e12, None, 1e12 + 2]))), {"uid": "id"},
        "id", ["1000000000000", None, "1000000000002"],
    ),
    "integer uids in lines of JSON": ("a.jsonl", jsonl(*({**PLAIN[k], "id": k} for k in range(3))), {"uid": "id"},
                                      "id", ["0", "1", "2"]),
    "NaN, which pandas writes for a missing caption": (
        "a.parquet", parquet(pa.table(columns(3, caption=pa.array([1.5, float("nan"), None])))), {},
        "caption", ["1.5", None, None],
    ),
    "lines, commas and URLs in quotes": ("a.csv", MULTILINE, {},
                                         "caption", ['one, "two"\nsee http://a.org, and more\nthree', '5" tall']),
    "a line of a caption that is a URL": (
        "a.csv", b'url,caption\nhttp://b.org/1.jpg,"seen at\nhttp://a.org\nin May"\nhttp://b.org/2.jpg,two\n', {},
        "caption", ["seen at\nhttp://a.org\nin May", "two"],
    ),
    "carriage returns alone": ("a.csv", "\r".join(LINES).encode(), {}, "caption", [f"a cat {k}" for k in range(5)]),
    "a line of names where none should be": (
        "a.tsv", "".join(f"{a}\t{b}\n" for a, b in [("url", "caption"), *(row.values() for row in PLAIN)]).encode(),
        {"name": "cc3m"}, "", PLAIN,
    ),
    "the same, with the caption first": (
        "a.tsv", "".join(f"{b}\t{a}\n" for a, b in [("url", "caption"), *(row.values() for row in PLAIN)]).encode(),
        {"name": "cc3m"}, "", PLAIN,
    ),
    "one JSON object of columns": ("sbu.json", json.dumps(SBU).encode(), SBU_COLUMNS, "", SBU_ROWS),
    "lines in a .json file": ("sbu.json", jsonl(*({"box": [k], **row} for k, row in enumerate(SBU_ROWS))), SBU_COLUMNS,
                              "", SBU_ROWS),
}  # fmt: skip


@pytest.mark.parametrize(("name", "body", "settings", "column", "expected"), READ.values(), ids=list(READ))
def test_unusual_tables_are_read(tmp_path, name, body, settings, column, expected):
    (tmp_path / name).write_bytes(body)
    rows = rows_of(SourceConfig(table=str(tmp_path / name), **settings))
    assert [row[column] if column else row for row in rows] == expected


def test_jsonl_with_a_byte_order_mark_and_an_early_bad_line(tmp_path):
    line, skipped = jsonl(PLAIN[0]), []
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + line + line.replace(b"cat", b"\xff") + line)
    assert len(rows_of(SourceConfig(table=str(tmp_path / "a.jsonl")), skipped)) == 2
    assert sum(skipped) == 1


WHOLE = parquet(pa.table(columns(500)))
TWICE = pa.Table.from_arrays([pa.array([url(1)]), pa.array(["x"]), pa.array(["y"])], names=["url", *["caption"] * 2])
CHECKED = parquet(pa.table(columns(3)), compression="none", use_dictionary=False, write_page_checksum=True)
SWALLOWS = [LINES[0], LINES[1], f'{url(1)},"a quote that is not closed', LINES[3], f'{url(3)},a dog" or two']


@pytest.mark.parametrize(
    ("name", "body", "words"),
    [
        ("a.csv", b"url,caption,caption\nhttp://a/1,x,y\n", "a.csv has several columns named 'caption'"),
        ("a.parquet", parquet(TWICE), "a.parquet has several columns named 'caption'"),
        ("a.jsonl", jsonl(*({**PLAIN[0], "id": x} for x in (1, "two"))), "Field 'id' of .*a.jsonl has no single type"),
        ("a.jsonl", jsonl(*({**PLAIN[0], "id": x} for x in (2**70, 1))), "Field 'id' of .*a.jsonl has no single type"),
        ("a.parquet", parquet(pa.table(columns(2, id=[[1], [2]]))),
         r"Column 'id' of .*a.parquet is of type list<.*cannot be used as string"),
        ("a.csv", "\r".join(SWALLOWS).encode(), r"a.csv: a quote is not closed .* would swallow \d+ lines"),
        ("a.parquet", CHECKED.replace(b"a cat 1", b"a rat 1", 1), r"a\.parquet cannot be read as parquet: .*CRC"),
        ("sbu.json", b'{"url": ["a"], "caption": 3}', r"Column 'url' of .*sbu\.json is of type list"),
        ("sbu.json", b'{"url": ["a"], "caption": ["a", "b"]}', r"columns of different lengths, .*: url 1, caption 2"),
        ("text.parquet", parquet(pa.table({"url": ["x"], "text": ["y"]})),
         r"no column 'caption'\. Its columns are 'url', 'text'"),
        ("cut.parquet", WHOLE[:-200], "cut.parquet"),
        ("page.parquet", b"<!doctype html><title>Sign in</title>" * 9, r"page\.parquet is not a complete.*a web page"),
        ("empty.parquet", b"", "empty.parquet"),
        ("middle.parquet", WHOLE[:300] + bytes(2_000) + WHOLE[2_300:], "middle.parquet"),
        ("cut.tsv.gz", gzip.compress(b"url\tcaption\n" + b"http://a.org/1\ta cat\n" * 9_000)[:-50], "cut.tsv.gz"),
        ("bad.jsonl", jsonl(PLAIN[0]) + b'{"url": "http://a.o', "bad.jsonl"),
        ("lists.jsonl", b"[1, 2]\n", "cannot be read as jsonl"),
        ("quotes.jsonl", b"{'url': 1}\n", "cannot be read as jsonl"),
        ("odd.json", tree([PLAIN[0], 3]), r"1 of 2 rows are none, such as 1 \(a int, not an object"),
        ("map.json", b'{"http://a.org": "x", "b": "y"}', "neither an object a line, nor a list of objects"),
        ("mixed.json", tree([PLAIN[0], {"url": 1, "caption": ["y"]}]), "has no single type"),
        ("text.json", tree([{"url": url(1), "text": "x"}]), r"no column 'caption'\. Its columns are 'url', 'text'"),
        ("deep.json", b"[" * 100_000, "cannot be read as jsonl"),
    ],
)  # fmt: skip
def test_the_error_names_the_damaged_table(tmp_path, name, body, words):
    (tmp_path / name).write_bytes(body)
    source = SourceConfig(table=str(tmp_path / name), uid="id" if "'id'" in words else None)
    with pytest.raises(UserError, match=words):
        _ = count_known(source), rows_of(source)


@pytest.mark.parametrize("kind", ["parquet", "csv", "tsv"])
def test_rows_that_are_not_utf8_are_skipped_and_counted(tmp_path, kind):
    captions = [f"a cat {k}".encode() for k in range(200)]
    captions[150] = b"caf\xe9"
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        offsets = [0]
        for caption in captions:
            offsets.append(offsets[-1] + len(caption))
        buffers = [None, pa.py_buffer(pa.array(offsets, pa.int32()).buffers()[1]), pa.py_buffer(b"".join(captions))]
        text = pa.Array.from_buffers(pa.string(), 200, buffers)
        pq.write_table(pa.table({"url": [url(k) for k in range(200)], "caption": text}), path)
    else:
        mark = {"csv": b",", "tsv": b"\t"}[kind]
        lines = [b"url" + mark + b"caption", *(url(k).encode() + mark + captions[k] for k in range(200))]
        path.write_bytes(b"\n".join(lines) + b"\n")
    tree = {"output": str(tmp_path / "out"), "source": {"table": str(path), "rows": 200}, "guard": {"contact": "x@y.z"}}
    notes: list[str] = []
    _, plan = prepare(parse(DownloadConfig, tree), on_note=notes.append)
    assert (plan.rows, plan.seen, plan.skipped) == (199, 200, 1)
    assert notes == [
        "1 of 200 rows cannot be read (a wrong number of fields, or text that is not UTF-8) and were left out."
    ]
    assert [row["url"] for row in read_shard(Folder(tmp_path / "out"), 0).to_pylist()] == [
        url(k) for k in range(200) if k != 150
    ]


@pytest.mark.parametrize("where", ["caption", "url", "ignored"])
@pytest.mark.parametrize("closed_by", [None, 40])
def test_an_unclosed_quote_is_rejected(tmp_path, where, closed_by):
    names = ["ignored", "caption", "url"]
    rows = [{"ignored": "x", "caption": f"a cat {k}", "url": url(k)} for k in range(60)]
    rows[8][where] = '"' + rows[8][where]
    if closed_by:
        rows[closed_by]["caption"] = 'a dog" or two'
    lines = [",".join(names), *(",".join(row[name] for name in names) for row in rows)]
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=r"a.csv: a quote is not closed .* would swallow \d+ lines"):
        rows_of(SourceConfig(table=str(tmp_path / "a.csv")))


def test_parts_with_different_column_types_are_unified(tmp_path):
    """As in LAION's parts: floats of two widths, and a column that is null in one part and integer in another."""
    parts = [
        columns(3, similarity=pa.array([0.5, None, 0.25], pa.float32()), NSFW=pa.array([None] * 3, pa.null())),
        columns(3, similarity=pa.array([0.1, 0.2, 0.3], pa.float64()), NSFW=pa.array(["NSFW"] * 3, pa.large_string())),
        columns(3, similarity=pa.array([1, 0, 1], pa.int64()), NSFW=pa.array(["UNLIKELY"] * 3).dictionary_encode()),
    ]
    for k, part in enumerate(parts):
        pq.write_table(pa.table(part), tmp_path / f"{k}.parquet")
    source = {"files": "?.parquet", "keep": ["similarity", "NSFW"]}
    _, plan = prepare(download_config(tmp_path / "out", tmp_path, source=source, fetch={"shard_size": 4}))
    tables = [read_shard(Folder(tmp_path / "out"), shard) for shard in range(plan.shards)]
    assert {str(table.schema.field("similarity").type) for table in tables} == {"double"}
    assert [row["NSFW"] for table in tables for row in table.to_pylist()] == [None] * 3 + ["NSFW"] * 3 + [
        "UNLIKELY"
    ] * 3


def test_the_error_names_the_part_with_an_incompatible_type(tmp_path):
    pq.write_table(pa.table(columns(2, score=[1.5, 2.5])), tmp_path / "0.parquet")
    pq.write_table(pa.table(columns(2, score=[[1], [2]])), tmp_path / "1.parquet")
    with pytest.raises(UserError, match=r"Column 'score' is of type list<.*1.parquet and of type double in the files"):
        rows_of(SourceConfig(table=str(tmp_path), keep=("score",)))


def test_a_table_without_read_permission_is_not_taken_for_a_damaged_one(tmp_path, monkeypatch):
    def refuse(path: Path, **options: object) -> None:
        raise PermissionError(13, "Failed to open local file")  # as pyarrow does; root may read everything

    pq.write_table(pa.table(columns(3)), tmp_path / "a.parquet")
    monkeypatch.setattr(pq, "ParquetFile", refuse)
    with pytest.raises(UserError, match=r"a\.parquet cannot be read: permission denied"):
        count_known(SourceConfig(table=str(tmp_path / "a.parquet")))

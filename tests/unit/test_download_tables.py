"""URL tables in every format give the same rows; damaged or unusual ones are read, counted or refused by name."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.dataset.dataset_folder import Folder
from data_prep.dataset.shard_plan import load_plan, read_shard
from data_prep.download_config import SOURCES, SourceConfig
from data_prep.ingest import prepare
from data_prep.sources.metadata_tables import count_known, files_of, read
from pipeline.errors import UserError
from pipeline.evaluation.datasets.task_data import files_below
from tests.downloads import download_config
from tests.pair_files import write_files


def rows_of(source, skipped=None):
    on_skipped = (skipped if skipped is not None else []).append
    return [row for batch in read(source, on_skipped=on_skipped) for row in batch.to_pylist()]


def url(k):
    return f"http://example.org/{k}.jpg"


def columns(count, **more):
    return {"url": [url(k) for k in range(count)], "caption": [f"a cat {k}" for k in range(count)], **more}


def parquet(content, **options):
    buffer = io.BytesIO()
    pq.write_table(content if isinstance(content, pa.Table) else pa.table(content), buffer, **options)
    return buffer.getvalue()


def tree(value):
    return json.dumps(value).encode()


def jsonl(*rows):
    return b"".join(tree(row) + b"\n" for row in rows)


def separated(mark, *rows):
    return "".join(mark.join(row) + "\n" for row in rows).encode()


# Captions as found on the web: unbalanced quotes, commas, umlauts.
ROWS = [{"url": url(k), "caption": text} for k, text in enumerate(['a "cat', "b, c", "köter 犬", "it's 5' tall"])]
URLS, CAPTIONS = ([row[name] for row in ROWS] for name in ("url", "caption"))
LISTS = [{**row, "caption": [row["caption"], "second"]} for row in ROWS]
LINES = ["url,caption", *(f"{url(k)},a cat {k}" for k in range(5))]
PLAIN = [{"url": url(k), "caption": f"a cat {k}"} for k in range(3)]
SBU = {"image_urls": [url(k) for k in range(3)], "user_ids": ["x"] * 3, "captions": ["a", "b", "c"]}
SBU_ROWS = [{"image_urls": url(k), "captions": "abc"[k]} for k in range(3)]
SBU_COLUMNS = {"url": "image_urls", "caption": "captions"}
MULTILINE = (
    b'caption,url\n"one, ""two""\nsee http://a.org, and more\nthree",http://b.org/1.jpg\n5" tall,http://b.org/2.jpg\n'
)
BOXES = [[], None, [[0, 0, 1, 0.5]], [[0.1, 0.1, 0.2, 0.2]]]
# As in LAION's parts: floats of two widths, and a column that is null in one part and text in another.
PARTS = [
    columns(3, similarity=pa.array([0.5, None, 0.25], pa.float32()), NSFW=pa.array([None] * 3, pa.null())),
    columns(3, similarity=pa.array([0.1, 0.2, 0.3], pa.float64()), NSFW=pa.array(["NSFW"] * 3, pa.large_string())),
    columns(3, similarity=pa.array([1, 0, 1], pa.int64()), NSFW=pa.array(["UNLIKELY"] * 3).dictionary_encode()),
]
READ: dict[str, tuple[dict[str, bytes], dict[str, Any], str, list[Any]]] = {
    "parquet files by name": ({"1.parquet": parquet(pa.Table.from_pylist(ROWS[2:])),
                               "0.parquet": parquet(pa.Table.from_pylist(ROWS[:2]))}, {}, "", ROWS),
    "hidden copies": ({name: parquet(columns(3)) for name in (
        "part.parquet", ".ipynb_checkpoints/part.parquet", ".part.parquet")}, {}, "", PLAIN),
    "integer uids in a column of floats": ({"a.parquet": parquet(columns(3, id=[1e12, None, 1e12 + 2]))},
                                           {"uid": "id"}, "id", ["1000000000000", None, "1000000000002"]),
    **{f"uids as {kind}": ({"a.parquet": parquet(columns(3, id=pa.array(["7", "8", "9"]).cast(kind)))}, {"uid": "id"},
                           "id", ["7", "8", "9"]) for kind in (pa.int64(), pa.large_string(), pa.binary())},
    "uids as categories": ({"a.parquet": parquet(columns(3, id=pa.array(["7", "8", "9"]).dictionary_encode()))},
                           {"uid": "id"}, "id", ["7", "8", "9"]),
    "integer uids in lines of JSON": ({"a.jsonl": jsonl(*({**PLAIN[k], "id": k} for k in range(3)))}, {"uid": "id"},
                                      "id", ["0", "1", "2"]),
    "NaN, which pandas writes for a missing caption": (
        {"a.parquet": parquet(columns(3, caption=pa.array([1.5, float("nan"), None])))}, {},
        "caption", ["1.5", None, None]),
    "lists in parquet": ({"a.parquet": parquet(pa.Table.from_pylist(LISTS))}, {}, "", LISTS),
    "lines, commas and URLs in quotes": ({"a.csv": MULTILINE}, {}, "caption",
                                         ['one, "two"\nsee http://a.org, and more\nthree', '5" tall']),
    "a line of a caption that is a URL": (
        {"a.csv": b'url,caption\nhttp://b.org/1.jpg,"seen at\nhttp://a.org\nin May"\nhttp://b.org/2.jpg,two\n'}, {},
        "caption", ["seen at\nhttp://a.org\nin May", "two"]),
    "carriage returns alone": ({"a.csv": "\r".join(LINES).encode()}, {}, "caption", [f"a cat {k}" for k in range(5)]),
    "a compressed TSV": ({"a.tsv.gz": gzip.compress(separated("\t", ROWS[0], *(row.values() for row in ROWS)))}, {},
                         "", ROWS),
    **{f"{name}'s list, without names or quotes": ({"a.tsv": separated("\t", *(
        [row[column] for column in SOURCES[name]["header"]] for row in ROWS))}, {"name": name, "rows": 4},
        "", ROWS) for name in ("cc3m", "cc12m")},
    "a line of names where none should be": ({"a.tsv": separated("\t", PLAIN[0], *(row.values() for row in PLAIN))},
                                             {"name": "cc3m"}, "", PLAIN),
    "the same, with the caption first": ({"a.tsv": separated("\t", ("caption", "url"), *(
        (row["caption"], row["url"]) for row in PLAIN))}, {"name": "cc3m"}, "", PLAIN),
    "unused fields of any type": ({"a.jsonl": jsonl(*(
        {**row, "score": odd} for row, odd in zip(ROWS, [1, "many", None, {"a": 1}], strict=True)))}, {}, "", ROWS),
    "a kept field without its first value": ({"a.jsonl": jsonl(*(
        {**row, "likes": None if k == 0 else k / 2} for k, row in enumerate(ROWS)))}, {"keep": ("likes",)},
        "likes", [None, 0.5, 1.0, 1.5]),
    "boxes": ({"a.jsonl.gz": gzip.compress(jsonl(*(
        {**row, "faces": boxes, "x": k or "none"} for k, (row, boxes) in enumerate(zip(ROWS, BOXES, strict=True)))))},
        {"blur": "faces"}, "faces", BOXES),
    "one JSON object of columns": ({"sbu.json": tree(SBU)}, SBU_COLUMNS, "", SBU_ROWS),
    "lines in a .json file": ({"sbu.json": jsonl(*({"box": [k], **row} for k, row in enumerate(SBU_ROWS)))},
                              SBU_COLUMNS, "", SBU_ROWS),
    "a mapping with escaped URLs": (
        {"a.json": tree(dict(zip(URLS, CAPTIONS, strict=True))).replace(b"http://", b"http:\\/\\/")}, {}, "", ROWS),
    **{f"{form} of {kind}": ({"a.json": body}, {}, "", rows) for kind, rows in (("texts", ROWS), ("lists", LISTS))
       for form, body in (("a list", json.dumps(rows, indent=1).encode()), ("lines", jsonl(*rows)),
                          ("a mapping", tree({row["url"]: row["caption"] for row in rows})),
                          ("objects by URL", tree({row["url"]: {"caption": row["caption"], "x": 1} for row in rows})),
                          ("columns", tree({"caption": [row["caption"] for row in rows], "url": URLS})))},
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_rows_of_every_format(name, tmp_path):
    files, settings, column, expected = READ[name]
    write_files(tmp_path, files)
    table = tmp_path if len(files) > 1 else tmp_path / next(iter(files))
    rows = rows_of(SourceConfig(table=str(table), **settings))
    assert [row[column] if column else row for row in rows] == expected


def test_no_file_of_a_table_is_passed_over(tmp_path, monkeypatch):
    """Regression test: files in linked folders, links to nothing and folders that cannot be listed gave no rows."""
    write_files(tmp_path, {"table/a.parquet": parquet(columns(4)), "disk/b.parquet": parquet(columns(4))})
    source = SourceConfig(table=str(tmp_path / "table"))
    (tmp_path / "table/linked").symlink_to(tmp_path / "disk")
    assert [path.name for path in files_of(source)] == ["a.parquet", "b.parquet"]
    (tmp_path / "table/c.parquet").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"c\.parquet is not a file, nor a link to one"):
        files_of(source)
    (tmp_path / "table/c.parquet").unlink()
    real = os.scandir

    def scandir(path):
        if Path(path).name == "linked":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(PermissionError):
        files_of(source)
    with pytest.raises(PermissionError):
        files_below(tmp_path / "table")


def test_files_of_a_table(tmp_path):
    for scale in ("medium", "small"):  # a local copy may be one folder or the whole repository
        write_files(tmp_path, {f"{scale}/a.parquet": parquet(columns(4))})
    just, whole = (SourceConfig(name="datacomp-medium", table=str(path)) for path in (tmp_path / "medium", tmp_path))
    assert files_of(just) == files_of(whole) == [tmp_path / "medium/a.parquet"]
    assert (count_known(just), count_known(SourceConfig(table=str(tmp_path)))) == (4, 8)
    for source, words in (
        (replace(whole, files="large/*.parquet"), "matches large/"),
        (SourceConfig(table=str(tmp_path / "none")), "neither a file nor a folder"),
        (SourceConfig(table=str(tmp_path), format="csv"), "holds no file that ends in"),
    ):
        with pytest.raises(UserError, match=words):
            files_of(source)


def test_parts_with_different_types_are_stored_with_one(tmp_path):
    write_files(tmp_path, {f"{k}.parquet": parquet(part) for k, part in enumerate(PARTS)})
    source = {"files": "?.parquet", "keep": ["similarity", "NSFW"]}
    _, plan = prepare(download_config(tmp_path / "out", tmp_path, source=source, fetch={"shard_size": 4}))
    tables = [read_shard(Folder(tmp_path / "out"), shard) for shard in range(plan.shards)]
    assert {str(table.schema.field("similarity").type) for table in tables} == {"double"}
    kept = [value for table in tables for value in table["NSFW"].to_pylist()]
    assert kept == [None] * 3 + ["NSFW"] * 3 + ["UNLIKELY"] * 3


UNREADABLE = "of {} rows cannot be read (a wrong number of fields, or text that is not UTF-8) and were left out."


@pytest.mark.parametrize("kind", ["parquet", "csv", "tsv"])
def test_rows_that_cannot_be_read_are_skipped_and_counted(tmp_path, kind):
    mark, path = {"csv": b",", "tsv": b"\t"}.get(kind, b""), tmp_path / f"a.{kind}"
    captions = [f"a cat {k}".encode() for k in range(200)]
    captions[150], bad = b"caf\xe9", {150}
    if kind == "parquet":
        raw = pa.array(captions, pa.binary())
        path.write_bytes(parquet(columns(200, caption=pa.Array.from_buffers(pa.string(), 200, raw.buffers()))))
    else:
        lines = [url(k).encode() + mark + caption for k, caption in enumerate(captions)]
        lines[7], lines[20], bad = mark.join([b"one", b"two", b"three"]), b"alone", {7, 20, 150}
        path.write_bytes(b"\n".join([b"url" + mark + b"caption", *lines]))
    notes: list[str] = []
    _, plan = prepare(download_config(tmp_path / "out", path, source={"rows": 200}), on_note=notes.append)
    assert (plan.rows, plan.seen, plan.skipped) == (200 - len(bad), 200, len(bad))
    assert notes == [f"{len(bad)} {UNREADABLE.format(200)}"]
    kept = [url(k) for k in range(200) if k not in bad]
    assert [row["url"] for row in read_shard(Folder(tmp_path / "out"), 0).to_pylist()] == kept
    assert load_plan(Folder(tmp_path / "out")) == plan


def test_jsonl_with_a_byte_order_mark_and_an_early_bad_line(tmp_path):
    line, skipped = jsonl(PLAIN[0]), []
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + line + line.replace(b"cat", b"\xff") + line)
    assert len(rows_of(SourceConfig(table=str(tmp_path / "a.jsonl")), skipped)) == 2
    assert sum(skipped) == 1


def unclosed(where, closed_by):
    names = ["ignored", "caption", "url"]
    rows = [{"ignored": "x", "caption": f"a cat {k}", "url": url(k)} for k in range(60)]
    rows[8][where] = '"' + rows[8][where]
    if closed_by:
        rows[closed_by]["caption"] = 'a dog" or two'
    return separated(",", names, *([row[name] for name in names] for row in rows))


WHOLE = parquet(columns(500))
TWICE = pa.Table.from_arrays([pa.array([url(1)]), pa.array(["x"]), pa.array(["y"])], names=["url", *["caption"] * 2])
CHECKED = parquet(columns(3), compression="none", use_dictionary=False, write_page_checksum=True)
SWALLOWS = [LINES[0], LINES[1], f'{url(1)},"a quote that is not closed', LINES[3], f'{url(3)},a dog" or two']
OPEN = r"a.csv: a quote is not closed .* would swallow \d+ lines"
# Files may declare bytes to be text, which pyarrow does not check.
NO_TEXT = pa.ListArray.from_arrays([0, 1, 2, 3], pa.Array.from_buffers(
    pa.string(), 3, pa.array([b"\xff"] * 3).buffers()))  # fmt: skip
ID, KEEP = {"uid": "id"}, {"keep": ("k",)}
REFUSED: list[tuple[dict[str, bytes], dict[str, Any], str]] = [
    ({"a.csv": b"url,caption,caption\nhttp://a/1,x,y\n"}, {}, "a.csv has several columns named 'caption'"),
    ({"a.parquet": parquet(TWICE)}, {}, "a.parquet has several columns named 'caption'"),
    *(({"a.jsonl": jsonl(*({**PLAIN[0], "id": x} for x in values))}, ID, "Field 'id' of .*a.jsonl has no single type")
      for values in ((1, "two"), (2**70, 1))),
    ({"a.parquet": parquet(columns(2, id=[[1], [2]]))}, ID,
     r"Column 'id' of .*a.parquet is of type list<.*cannot be used as string"),
    ({"a.csv": "\r".join(SWALLOWS).encode()}, {}, OPEN),
    *(({"a.csv": unclosed(where, closed_by)}, {}, OPEN) for where in ("caption", "url", "ignored")
      for closed_by in (None, 40)),
    ({"a.tsv": separated("\t", *["abc"] * 40)}, {"header": ("url", "caption")},
     r"40 of 40 rows are none, such as 1 \(3 fields instead of 2\)"),
    ({"a.parquet": CHECKED.replace(b"a cat 1", b"a rat 1", 1)}, {}, r"a\.parquet cannot be read as parquet: .*CRC"),
    ({"sbu.json": b'{"url": ["a"], "caption": 3}'}, {}, r"Column 'url' of .*sbu\.json is of type list"),
    ({"sbu.json": b'{"url": ["a"], "caption": ["a", "b"]}'}, {},
     r"columns of different lengths, .*: url 1, caption 2"),
    ({"text.parquet": parquet({"url": ["x"], "text": ["y"]})}, {},
     r"no column 'caption'\. Its columns are 'url', 'text'"),
    ({"cut.parquet": WHOLE[:-200]}, {}, "cut.parquet"),
    ({"page.parquet": b"<!doctype html><title>Sign in</title>" * 9}, {}, r"page\.parquet is not a complete.*a web pag"),
    ({"empty.parquet": b""}, {}, "empty.parquet"),
    ({"middle.parquet": WHOLE[:300] + bytes(2_000) + WHOLE[2_300:]}, {}, "middle.parquet"),
    ({"cut.tsv.gz": gzip.compress(b"url\tcaption\n" + b"http://a.org/1\ta cat\n" * 9_000)[:-50]}, {}, "cut.tsv.gz"),
    ({"bad.jsonl": jsonl(PLAIN[0]) + b'{"url": "http://a.o'}, {}, "bad.jsonl"),
    ({"lists.jsonl": b"[1, 2]\n"}, {}, "cannot be read as jsonl"),
    ({"quotes.jsonl": b"{'url': 1}\n"}, {}, "cannot be read as jsonl"),
    ({"a.jsonl": jsonl(ROWS[0])}, {"blur": "faces"}, r"no column 'faces'\. Its columns are 'url', 'caption'"),
    ({"odd.json": tree([PLAIN[0], 3])}, {}, r"1 of 2 rows are none, such as 1 \(a int, not an object"),
    ({"map.json": b'{"http://a.org": "x", "b": "y"}'}, {}, "neither an object a line, nor a list of objects"),
    ({"mixed.json": tree([PLAIN[0], {"url": 1, "caption": ["y"]}])}, {}, "has no single type"),
    ({"text.json": tree([{"url": url(1), "text": "x"}])}, {}, r"no column 'caption'\. Its columns are 'url', 'text'"),
    ({"deep.json": b"[" * 100_000}, {}, "is not valid JSON"),
    ({"0.parquet": parquet(columns(2, k=[1.5, 2.5])), "1.parquet": parquet(columns(2, k=[[1], [2]]))}, KEEP,
     r"Column 'k' is of type list<.*1.parquet and of type double in the files"),
    ({f"{name}.parquet": parquet(columns(1, caption=[caption])) for name, caption in (("a", ["x"]), ("b", "y"))}, {},
     r"Column 'caption' of .*b\.parquet is of type string, which cannot be used as"),
    ({"a.parquet": parquet(columns(3, k=NO_TEXT))}, KEEP, "Column 'k'.*Invalid UTF8"),
]  # fmt: skip


def test_the_error_names_the_table(tmp_path, monkeypatch):
    for number, (files, settings, words) in enumerate(REFUSED):
        folder = tmp_path / str(number)
        write_files(folder, files)
        source = SourceConfig(table=str(folder if len(files) > 1 else folder / next(iter(files))), **settings)
        with pytest.raises(UserError, match=words):
            _ = count_known(source), rows_of(source)

    def refuse(path, **options):
        raise PermissionError(13, "Failed to open local file")  # as pyarrow does; root may read everything

    monkeypatch.setattr(pq, "ParquetFile", refuse)
    with pytest.raises(UserError, match=r"a\.parquet cannot be read: permission denied"):
        count_known(SourceConfig(table=str(tmp_path / "1/a.parquet")))


def test_a_plan_needs_readable_uids_and_one_meaning_of_captions(tmp_path):
    for more, settings, words in (
        ({"id": [b"\xff\xfe"] * 3}, ID, "has 3 rows, none of which can be read: .* the columns url, caption, id"),
        ({"caption": [["x"]] * 3, "captions": [2] * 3}, {"keep": ["captions"]},
         "The captions are lists, which are stored as `captions`"),
    ):  # fmt: skip
        (tmp_path / "a.parquet").write_bytes(parquet(columns(3, **more)))
        with pytest.raises(UserError, match=words):
            prepare(download_config(tmp_path / "out", tmp_path / "a.parquet", source=settings))
        assert not (tmp_path / "out").exists()

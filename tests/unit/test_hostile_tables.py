"""Damaged or unusual tables are read correctly, or rejected with the file name and what to do."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.dataset.dataset_folder import Folder
from data_prep.dataset.shard_plan import read_shard
from data_prep.fetching import source_checks
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
def test_uids_of_any_type_are_read_as_text(tmp_path: Path, kind: pa.DataType) -> None:
    uids = [10**12 + k for k in range(4)]
    values = pa.array(uids) if kind == pa.int64() else pa.array([str(uid) for uid in uids])
    values = values.dictionary_encode() if pa.types.is_dictionary(kind) else values.cast(kind)
    pq.write_table(pa.table(columns(4, SAMPLE_ID=values)), tmp_path / "a.parquet")
    named, subset = {"uid": "SAMPLE_ID"}, {"fraction": 0.999999}
    prepare(download_config(tmp_path / "out", tmp_path / "a.parquet", source=named, subset=subset))
    assert read_shard(Folder(tmp_path / "out"), 0)["uid"].to_pylist() == [str(uid) for uid in uids]


def test_integer_uids_in_a_column_of_floats_are_read_as_integers(tmp_path: Path) -> None:
    pq.write_table(pa.table(columns(3, SAMPLE_ID=[1e12, None, 1e12 + 2])), tmp_path / "a.parquet")
    rows = rows_of(SourceConfig(table=str(tmp_path / "a.parquet"), uid="SAMPLE_ID"))
    assert [row["SAMPLE_ID"] for row in rows] == ["1000000000000", None, "1000000000002"]


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
def test_a_column_without_readable_text_is_named(
    tmp_path: Path, more: dict[str, object], settings: dict[str, object], words: str
) -> None:
    table = pa.table(columns(3, **more))
    if "k" in more:  # files may declare bytes to be text, which pyarrow does not check
        text = pa.Array.from_buffers(pa.string(), 3, pa.array([b"\xff"] * 3).buffers())
        table = table.set_column(2, "k", pa.ListArray.from_arrays([0, 1, 2, 3], text))
    pq.write_table(table, tmp_path / "a.parquet")
    tree = {"output": str(tmp_path / "out"), "source": {"table": str(tmp_path / "a.parquet"), **settings}}
    with pytest.raises(UserError, match=words):
        prepare(parse(DownloadConfig, tree))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_two_columns_of_one_name_are_rejected(tmp_path: Path, name: str) -> None:
    if name == "a.csv":
        (tmp_path / name).write_text("url,caption,caption\nhttp://a/1,x,y\n")
    else:
        arrays = [pa.array([url(1)]), pa.array(["x"]), pa.array(["y"])]
        pq.write_table(pa.Table.from_arrays(arrays, names=["url", "caption", "caption"]), tmp_path / name)
    with pytest.raises(UserError, match=f"{name} has several columns named 'caption'"):
        rows_of(SourceConfig(table=str(tmp_path / name)))


def test_hidden_copies_of_a_table_are_not_read(tmp_path: Path) -> None:
    for name in ("part.parquet", ".ipynb_checkpoints/part.parquet", ".part.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pq.write_table(pa.table(columns(2)), tmp_path / name)
    assert len(rows_of(SourceConfig(table=str(tmp_path)))) == 2


@pytest.mark.parametrize(
    ("values", "words"),
    [([1, "two"], "Field 'id' of .*a.jsonl has no single type"), ([2**70, 1], "Field 'id' of .*a.jsonl has no single")],
)
def test_the_error_names_a_jsonl_field_of_several_types(tmp_path: Path, values: list[object], words: str) -> None:
    rows = [{"url": url(k), "caption": "a cat", "id": value} for k, value in enumerate(values)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=words):
        rows_of(SourceConfig(table=str(tmp_path / "a.jsonl"), uid="id"))


def test_jsonl_with_a_byte_order_mark_and_an_early_bad_line(tmp_path: Path) -> None:
    line = b'{"url": "http://a/1", "caption": "x"}\n'
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + line + line.replace(b"x", b"\xff") + line)
    skipped: list[int] = []
    assert len(rows_of(SourceConfig(table=str(tmp_path / "a.jsonl")), skipped)) == 2
    assert sum(skipped) == 1


def test_integer_uids_in_jsonl_are_read_as_text(tmp_path: Path) -> None:
    rows = [{"url": url(k), "caption": "a cat", "id": k} for k in range(3)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["id"] for row in rows_of(SourceConfig(table=str(tmp_path / "a.jsonl"), uid="id"))] == ["0", "1", "2"]


def test_a_non_text_column_is_rejected_with_its_type(tmp_path: Path) -> None:
    pq.write_table(pa.table(columns(2, id=[[1], [2]])), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"Column 'id' of .*a.parquet is of type list<.*cannot be used as string"):
        rows_of(SourceConfig(table=str(tmp_path / "a.parquet"), uid="id"))


@pytest.mark.parametrize("kind", ["parquet", "csv", "tsv"])
def test_rows_that_are_not_utf8_are_skipped_and_counted(tmp_path: Path, kind: str) -> None:
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
def test_an_unclosed_quote_is_rejected(tmp_path: Path, where: str, closed_by: int | None) -> None:
    names = ["ignored", "caption", "url"]
    rows = [{"ignored": "x", "caption": f"a cat {k}", "url": url(k)} for k in range(60)]
    rows[8][where] = '"' + rows[8][where]
    if closed_by:
        rows[closed_by]["caption"] = 'a dog" or two'
    lines = [",".join(names), *(",".join(row[name] for name in names) for row in rows)]
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=r"a.csv: a quote is not closed .* would swallow \d+ lines"):
        rows_of(SourceConfig(table=str(tmp_path / "a.csv")))


def test_multiline_captions_with_commas_and_urls_are_accepted(tmp_path: Path) -> None:
    text = 'caption,url\n"one, two\nsee http://a.org, and more\nthree",http://b.org/1.jpg\n5" tall,http://b.org/2.jpg\n'
    (tmp_path / "a.csv").write_text(text)
    found = rows_of(SourceConfig(table=str(tmp_path / "a.csv")))
    assert [row["caption"] for row in found] == ["one, two\nsee http://a.org, and more\nthree", '5" tall']


def test_a_line_of_a_caption_may_be_a_url(tmp_path: Path) -> None:
    text = 'url,caption\nhttp://b.org/1.jpg,"seen at\nhttp://a.org\nin May"\nhttp://b.org/2.jpg,two\n'
    (tmp_path / "a.csv").write_text(text)
    found = rows_of(SourceConfig(table=str(tmp_path / "a.csv")))
    assert [row["caption"] for row in found] == ["seen at\nhttp://a.org\nin May", "two"]


def parquet_bytes(count: int = 500) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns(count)), buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("cut.parquet", parquet_bytes()[:-200]),
        ("page.parquet", b"<!doctype html><title>Sign in</title>" * 9),
        ("empty.parquet", b""),
        ("middle.parquet", parquet_bytes()[:300] + bytes(2_000) + parquet_bytes()[2_300:]),
        ("cut.tsv.gz", gzip.compress(b"url\tcaption\n" + b"http://a.org/1\ta cat\n" * 9_000)[:-50]),
        ("bad.jsonl", b'{"url": "http://a.org/1", "caption": "a cat"}\n{"url": "http://a.o'),
    ],
)
def test_the_error_names_the_damaged_table(tmp_path: Path, name: str, body: bytes) -> None:
    (tmp_path / name).write_bytes(body)
    source = SourceConfig(table=str(tmp_path / name))
    with pytest.raises(UserError, match=name):
        _ = count_known(source), rows_of(source)


def test_parts_with_different_column_types_are_unified(tmp_path: Path) -> None:
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


def test_the_error_names_the_part_with_an_incompatible_type(tmp_path: Path) -> None:
    pq.write_table(pa.table(columns(2, score=[1.5, 2.5])), tmp_path / "0.parquet")
    pq.write_table(pa.table(columns(2, score=[[1], [2]])), tmp_path / "1.parquet")
    with pytest.raises(UserError, match=r"Column 'score' is of type list<.*1.parquet and of type double in the files"):
        rows_of(SourceConfig(table=str(tmp_path), keep=("score",)))


@pytest.mark.parametrize(
    ("good", "bad", "words"),
    [
        ("a" * 64, "b" * 40, r"'b+' of length 40. It looks like sha1, which cannot be verified here"),
        ("a" * 64, "c" * 32, r"'c+' of length 32. It looks like md5: set source.hash_kind=md5"),
        ("a" * 64, "no hash", r"'no hash' of length 7. It is not a hash of a known kind"),
        ("a" * 64, None, r"because they are empty"),
    ],
)
def test_the_error_quotes_an_invalid_hash(tmp_path: Path, good: str, bad: str | None, words: str) -> None:
    pq.write_table(pa.table(columns(10, digest=[good] * 5 + [bad] * 5)), tmp_path / "a.parquet")
    tree = {"output": "x", "source": {"table": str(tmp_path / "a.parquet"), "hash": "digest"}}
    with pytest.raises(UserError, match=words):
        source_checks.check_source(parse(DownloadConfig, tree))


def test_a_table_without_read_permission_is_not_taken_for_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, **options: object) -> None:
        raise PermissionError(13, "Failed to open local file")  # as pyarrow does; root may read everything

    pq.write_table(pa.table(columns(3)), tmp_path / "a.parquet")
    monkeypatch.setattr(pq, "ParquetFile", refuse)
    with pytest.raises(UserError, match=r"a\.parquet cannot be read: permission denied"):
        count_known(SourceConfig(table=str(tmp_path / "a.parquet")))


def test_missing_captions_in_a_column_of_floats_are_no_captions(tmp_path: Path) -> None:
    """Regression test: NaN, which pandas writes for a missing value, became the caption `nan`."""
    captions = pa.array([1.5, float("nan"), None])
    pq.write_table(pa.table(columns(3, caption=captions)), tmp_path / "a.parquet")
    rows = rows_of(SourceConfig(table=str(tmp_path / "a.parquet")))
    assert [row["caption"] for row in rows] == ["1.5", None, None]


def test_lines_of_csv_may_end_with_carriage_returns_alone(tmp_path: Path) -> None:
    lines = ["url,caption", *(f"{url(k)},a cat {k}" for k in range(5))]
    path = tmp_path / "a.csv"
    path.write_bytes("\r".join(lines).encode())
    assert len(rows_of(SourceConfig(table=str(path)))) == 5
    lines[2] = f'{url(1)},"a quote that is not closed'
    lines[4] = f'{url(3)},a dog" or two'
    path.write_bytes("\r".join(lines).encode())
    with pytest.raises(UserError, match=r"a.csv: a quote is not closed .* would swallow \d+ lines"):
        rows_of(SourceConfig(table=str(path)))


def test_parquet_pages_are_compared_with_their_checksums(tmp_path: Path) -> None:
    """Regression test: a changed byte in a column was read as another caption."""
    path = tmp_path / "a.parquet"
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pq.write_table(pa.table(columns(3)), path, **options)
    assert len(rows_of(SourceConfig(table=str(path)))) == 3
    path.write_bytes(path.read_bytes().replace(b"a cat 1", b"a rat 1", 1))
    with pytest.raises(UserError, match=r"a\.parquet cannot be read as parquet: .*CRC"):
        rows_of(SourceConfig(table=str(path)))


def test_a_line_of_names_in_a_table_that_should_have_none_is_no_row(tmp_path: Path) -> None:
    for names in (("caption", "url"), ("url", "caption")):
        lines = [names, *((url(k), f"a cat {k}") if names[0] == "url" else (f"a cat {k}", url(k)) for k in range(3))]
        (tmp_path / "a.tsv").write_text("".join("\t".join(line) + "\n" for line in lines))
        rows = rows_of(SourceConfig(name="cc3m", table=str(tmp_path / "a.tsv")))
        assert rows == [{"url": url(k), "caption": f"a cat {k}"} for k in range(3)]


def test_a_json_file_of_columns_is_read(tmp_path: Path) -> None:
    tree = {"image_urls": [url(k) for k in range(3)], "user_ids": ["x"] * 3, "captions": ["a", "b", "c"]}
    path = tmp_path / "sbu.json"
    path.write_text(json.dumps(tree))
    source = SourceConfig(table=str(path), url="image_urls", caption="captions")
    assert rows_of(source) == [{"image_urls": url(k), "captions": "abc"[k]} for k in range(3)]
    path.write_text("".join(json.dumps({"box": [k], "image_urls": url(k), "captions": "x"}) + "\n" for k in range(3)))
    assert len(rows_of(source)) == 3, "lines"
    for damaged in ('{"image_urls": ["a"], "captions": 3}', '{"image_urls": ["a"], "captions": ["a", "b"]}'):
        path.write_text(damaged)
        with pytest.raises(UserError, match=r"sbu\.json (cannot be read as json|has columns of different lengths)"):
            rows_of(source)

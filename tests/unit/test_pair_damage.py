"""Damaged and ambiguous sources cost their own rows, or are refused by name."""

# ruff: noqa: F811 (imported fixtures are requested by name)
from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.dataset import canonical_tar
from data_prep.pairs import pair_tables
from data_prep.pairs.pair import SourceOptions
from data_prep.settings.source_config import SourceConfig
from data_prep.sources.metadata_tables import read
from pipeline.errors import UserError
from tests.pair_files import dropped, make, picture, stored, table, texts, write_csv, write_images  # noqa: F401


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.jsonl"])
def test_tables_in_utf_16_are_refused_with_what_is_allowed(name, encoding, tmp_path):
    path = tmp_path / name
    path.write_bytes('{"image": "a.jpg", "caption": "a dog"}\n'.encode(encoding))
    with pytest.raises(UserError, match=r"is not UTF-8, which it must be, but looks like UTF-16 .*iconv"):
        pair_tables.open_table(path, SourceOptions())
    compressed = tmp_path / f"{name}.gz"
    compressed.write_bytes(gzip.compress(path.read_bytes()))
    for file in (path, compressed):
        with pytest.raises(UserError, match=rf"{file.name} is not UTF-8, .*looks like UTF-16 .*iconv"):
            next(read(SourceConfig(table=str(file))))


def test_names_of_devices_pipes_and_huge_files_are_not_read(table, tmp_path):
    """Regression test: `/dev/zero` in a table took all memory of the machine, and a pipe waited for ever."""
    os.mkfifo(tmp_path / "pipe.jpg")
    with (tmp_path / "huge.jpg").open("wb") as file:
        file.truncate(2**31 + 1)
    names = [f"{table.parent}/images/000.jpg", "/dev/null", f"{tmp_path}/pipe.jpg", f"{tmp_path}/huge.jpg"]
    path = write_csv(table.parent / "odd.csv", [("image", "caption"), *((name, "x") for name in names)])
    outcome = make(path, tmp_path / "out", allow_outside=True)
    assert (outcome.manifest.n, outcome.manifest.failures) == (1, {"image file missing": 3})
    assert [detail.rpartition(": ")[2] for _, _, detail in dropped(tmp_path / "out")] == [
        "not a regular file", "not a regular file", "2,147,483,649 bytes, more than an image has"]  # fmt: skip


def test_one_odd_row_costs_no_other(table, tmp_path):
    """Regression test: each of these ended the conversion as a bug."""
    first = f"{table.parent}/images/000.jpg"
    names = [first, "y" * 5000, f"{'z' * 5000}.jpg#1", "a\0b.jpg"]
    rows = [json.dumps({"image": name, "caption": "x"}) for name in names]
    (table.parent / "odd.jsonl").write_text("\n".join(rows))
    assert make(table.parent / "odd.jsonl", tmp_path / "table").manifest.failures == {"image file missing": 3}
    body = Path(first).read_bytes()
    members = [("a.jpg", body), ("a.json", b'{"caption": "x"}'), ("b.jpg", body), ("b.json", b"[" * 100_000)]
    (tmp_path / "tars").mkdir()
    canonical_tar.write(tmp_path / "tars/a.tar", members)
    assert make(tmp_path / "tars", tmp_path / "tar").manifest.failures == {"malformed row": 1}
    odd = {"images": [{"id": [1], "file_name": first}], "annotations": [{"image_id": [1], "caption": "x"}]}
    (tmp_path / "captions_odd.json").write_text(json.dumps(odd))
    assert make(tmp_path / "captions_odd.json", tmp_path / "coco", allow_outside=True).manifest.n == 1
    (tmp_path / "captions_deep.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="is not valid JSON"):
        make(tmp_path / "captions_deep.json", tmp_path / "deep")


def test_damage_to_the_plan_is_named_and_never_used(table, tmp_path):
    """Regression test: it was reported as a bug, or other rows were converted."""
    make(table.parent, tmp_path / "out")
    path = tmp_path / "out/plan/pairs.json"
    body, shards = path.read_bytes(), {p: p.read_bytes() for p in (tmp_path / "out/shards").iterdir()}
    (tmp_path / "out/meta/00001.json").unlink()
    tree = json.loads(body)
    lacking = [json.dumps({key: tree[key] for key in tree if key != name}).encode() for name in tree]
    for wrong in (body[:-9], b"[]", body.replace(b"stamp", b"stomp"), *lacking):
        path.write_bytes(wrong)
        with pytest.raises(UserError, match=rf"{path} is damaged: delete {tmp_path / 'out'} and run"):
            make(table.parent, tmp_path / "out")
    path.write_bytes(body)
    make(table.parent, tmp_path / "out")
    assert {p: p.read_bytes() for p in shards} == shards


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("name", ["odd.csv", "odd.tsv"])
def test_an_unclosed_quote_is_an_error_instead_of_a_long_caption(table, tmp_path, name, order):
    """Regression test: the following rows used to become part of the caption, and none of them was counted."""
    rows = [("image", "text"), *((f"images/{n:03d}.jpg", f"{chr(34) * (n == 6)}picture {n}") for n in range(10))]
    lines = [("\t" if name.endswith("tsv") else ",").join(row[i] for i in order) for row in rows]
    path = table.parent / name
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(
        UserError, match=rf"{name}: a quote is not closed in the row that begins at line 8, which would"
    ):
        make(path, tmp_path / "out")
    path.write_text("\n".join([*lines, *lines[1:]]) + "\n")  # the second such quote closes the first
    with pytest.raises(UserError, match="would swallow 10 lines"):
        make(path, tmp_path / "out")


def test_a_bad_caption_costs_no_other_of_its_image(table, tmp_path):
    """Regression test: one caption that was not UTF-8 used to drop all captions of the image, counted as one."""
    path = table.parent / "several.csv"
    path.write_bytes(b"image,caption\nimages/000.jpg,good\nimages/000.jpg,caf\xe9\nimages/000.jpg,fine\n")
    outcome = make(path, tmp_path / "out")
    assert (outcome.manifest.n, dict(outcome.manifest.failures)) == (1, {"caption is not UTF-8": 1})
    assert stored(tmp_path / "out")[0][2]["captions"] == ["good", "fine"]
    assert [place for place, _, _ in dropped(tmp_path / "out")] == ["several.csv:3"]


def test_what_is_ambiguous_in_tables_and_tars(tmp_path):
    names = write_images(tmp_path, 3)
    twice = write_csv(tmp_path / "twice.csv", [("image", "caption", "caption"), (names[0], "a", "b")])
    with pytest.raises(UserError, match="several columns called 'caption'"):
        make(twice, tmp_path / "x")
    rows = "".join(f"{name};a, b, c and {k}\n" for k, name in enumerate(names))
    (tmp_path / "semicolons.csv").write_text("image;caption, in English, or not, as it came, untouched\n" + rows)
    make(tmp_path / "semicolons.csv", tmp_path / "y", caption="caption, in English, or not, as it came, untouched")
    assert texts(tmp_path / "y") == [[f"a, b, c and {k}"] for k in range(3)]
    members = [("a.jpg", picture(0)), ("a.txt", b"a"), ("b.jpg", picture(1)), ("b.txt", b"b"), ("a.jpg", picture(2))]
    members += [("c.jpg", picture(3)), ("c.JPG", picture(4)), ("c.txt", b"c"), ("d.jpg", picture(5)), ("d.txt", b"d")]
    canonical_tar.write(tmp_path / "t.tar", members)
    make(tmp_path / "t.tar", tmp_path / "z")
    assert texts(tmp_path / "z") == [["a"], ["b"], ["d"]]
    found = dropped(tmp_path / "z")
    assert [(place, reason) for place, reason, _ in found] == [
        ("t.tar:a (again)", "no caption"), ("t.tar:c", "malformed row")]  # fmt: skip
    assert "two members of its sample have the same suffix: c.JPG" in found[1][2]
    canonical_tar.write(tmp_path / "first.tar", members[5:])
    make(tmp_path / "first.tar", tmp_path / "only d")
    assert (texts(tmp_path / "only d"), len(dropped(tmp_path / "only d"))) == ([["d"]], 1)
    canonical_tar.write(tmp_path / "none.tar", members[5:8])
    with pytest.raises(UserError, match=r"None of the 1 rows .*the same suffix: c\.JPG\)\.$"):
        make(tmp_path / "none.tar", tmp_path / "none")
    whole = (tmp_path / "t.tar").read_bytes()
    for name, body, words in (
        ("joined", whole + whole, "or two archives were joined"),
        ("header", whole[:3072] + b"x" + whole[3073:], "wrong checksum"),
    ):
        (tmp_path / f"{name}.tar").write_bytes(body)
        with pytest.raises(UserError, match=rf"{name}\.tar is not a complete tar, after \d+ samples .*{words}"):
            make(tmp_path / f"{name}.tar", tmp_path / name)


def test_texts_that_are_not_utf8_cost_their_own_row_only(tmp_path):
    bodies = [picture(k) for k in range(4)]
    raw = pa.array([b"one", b"caf\xe9", b"three", b"four"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 4, raw.buffers())
    pq.write_table(pa.table({"image": pa.array(bodies, pa.binary()), "caption": text}), tmp_path / "t.parquet")
    make(tmp_path / "t.parquet", tmp_path / "out")
    assert texts(tmp_path / "out") == [["one"], ["three"], ["four"]]
    ((place, reason, detail),) = dropped(tmp_path / "out")
    assert (place, reason) == ("t.parquet row 1", "caption is not UTF-8")
    assert detail == "byte 0xE9; if the text is in Latin-1: iconv -f latin1 -t utf-8 FILE"
    names = write_images(tmp_path / "csv", 2)
    (tmp_path / "csv" / "t.csv").write_bytes(f"image,caption\n{names[0]},caf".encode() + b"\xe9\n" + b"001.jpg,two\n")
    make(tmp_path / "csv" / "t.csv", tmp_path / "other")
    assert dropped(tmp_path / "other")[0][2] == detail
    rows = ['{"image": "000.jpg", "caption": "half \\ud83d"}', '{"image": "001.jpg", "caption": ["two", 3, 4.5, null]}']
    (tmp_path / "csv" / "t.jsonl").write_text("\n".join(rows))
    make(tmp_path / "csv" / "t.jsonl", tmp_path / "half")
    assert texts(tmp_path / "half") == [["two", "3", "4.5"]]
    odd = [json.dumps({"image": "000.jpg", "caption": text}) for text in ("\u200b", "\1", "a\0b")]
    (tmp_path / "csv" / "t.jsonl").write_text("\n".join([*odd, rows[1]]))
    make(tmp_path / "csv" / "t.jsonl", tmp_path / "blank")
    assert [reason for _, reason, _ in dropped(tmp_path / "blank")] == ["no caption", "no caption", reason]
    rows[0] = '{"image": "\\ud83d.jpg", "caption": "one"}'
    (tmp_path / "csv" / "t.jsonl").write_text("\n".join(rows))
    make(tmp_path / "csv" / "t.jsonl", tmp_path / "name")
    assert texts(tmp_path / "name") == [["two", "3", "4.5"]]
    assert dropped(tmp_path / "name")[0][2].startswith("the image's name has the surrogate U+D83D")
    ((_, _, detail),) = dropped(tmp_path / "half")
    assert detail == "the surrogate U+D83D, which is half of a character: the program that wrote it cut one"


def test_a_parquet_page_with_a_wrong_checksum_is_refused(tmp_path):
    """Regression test: its pixels or captions were taken as they were."""
    table = pa.table({"image": pa.array([b"x" * 99] * 4, pa.binary()), "caption": [f"a cat {k}" for k in range(4)]})
    path = tmp_path / "t.parquet"
    pq.write_table(table, path, compression="none", use_dictionary=False, write_page_checksum=True)
    path.write_bytes(path.read_bytes().replace(b"a cat 2", b"a car 2", 1))
    numbers = table.set_column(1, "caption", pa.array([1.5] * 4))
    pq.write_table(numbers, tmp_path / "numbers.parquet")
    with pytest.raises(UserError, match=r"usual name for the caption.*Columns: image, caption \(not text\)\."):
        make(tmp_path / "numbers.parquet", tmp_path / "out")
    with pytest.raises(UserError, match=r"t\.parquet is damaged .*fetch it again"):
        make(path, tmp_path / "out")
    path.write_bytes(path.read_bytes()[:-108] + bytes(100) + path.read_bytes()[-8:])  # the end of its footer
    with pytest.raises(UserError, match=r"t\.parquet is not a parquet file that can be read"):
        make(path, tmp_path / "out")

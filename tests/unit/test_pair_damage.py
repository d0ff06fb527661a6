"""Damaged and ambiguous sources of `neuclip pairs` cost their own rows, or are refused with what to do."""

# ruff: noqa: F811 (imported fixtures are requested by name)
from __future__ import annotations

import gzip
import json
import os
import random
import re
import shutil
import subprocess
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from data_prep.download_config import SourceConfig
from data_prep.pairs.members import open_tars
from data_prep.pairs.pair import NOT_UTF8, PairOptions
from data_prep.sources.metadata_tables import read
from pipeline.data.shards.make_manifest import index_shards
from pipeline.errors import UserError
from tests.pair_files import (  # noqa: F401
    NAMES,
    PICTURES,
    digests,
    dropped,
    make,
    parquet,
    picture,
    run,
    stored,
    table,
    tar,
    texts,
    tree,
    write_csv,
    write_files,
    write_images,
)
from tests.shards import write_members, write_tar

NO_TEXT, NO_IMAGE, BAD_ROW = "no caption", "image file missing", "malformed row"
LATIN = "byte 0xE9; if the text is in Latin-1: iconv -f latin1 -t utf-8 FILE"
HALF = "the surrogate U+D83D, which is half of a character: the program that wrote it cut one"


def lines(*rows):
    return b"\n".join(row if isinstance(row, bytes) else tree(row) for row in rows)


LATIN_BYTES = pa.array([b"one", b"caf\xe9", b"three", b"four"], pa.binary())
LATIN_TEXTS = pa.Array.from_buffers(pa.string(), 4, LATIN_BYTES.buffers())


def coco(ids, *annotations):
    images = [{"id": each, "file_name": name} for each, name in zip(ids, NAMES, strict=False)]
    return tree({"images": images, "annotations": [{"image_id": each, "caption": text} for each, text in annotations]})


TWICE = [
    *((f"{name}.{suffix}", body) for name in "ab" for suffix, body in (("jpg", picture(0)), ("txt", name.encode()))),
    *(("a.jpg", picture(2)), ("c.jpg", picture(3)), ("c.JPG", picture(4)), ("c.txt", b"c")),
    *(("d.jpg", picture(5)), ("d.txt", b"d")),
]
Lost = list[tuple[str, str, str]]
DAMAGED: dict[str, tuple[str, bytes | dict[str, bytes], list[str], Lost]] = {
    "lines that are no objects": ("t.jsonl", lines(
        {"image": "000.jpg", "captions": ["a", "b"]}, b"{broken", [1], {"image": 3, "captions": "x"}), ["a"],
        [("t.jsonl:2", BAD_ROW, "not JSON: Exp"), ("t.jsonl:3", BAD_ROW, "a list, not an object"),
         ("t.jsonl:4", BAD_ROW, "no image path in 'image'")]),
    "names that no file has": ("t.jsonl", lines(*({"image": name, "caption": "x"} for name in (
        "000.jpg", "y" * 5000, f"{'z' * 5000}.jpg#1", "a\0b.jpg", "\ud83d.jpg"))), ["x"],
        [("t.jsonl:2", NO_IMAGE, "...yyy"), ("t.jsonl:3", NO_IMAGE, "...zzz"), ("t.jsonl:4", NO_IMAGE, "'/"),
         ("t.jsonl:5", BAD_ROW, f"the image's name has {HALF}")]),
    "captions of numbers, halves and nothing": ("t.jsonl", lines(
        {"image": "000.jpg", "caption": ["two", 3, 4.5, None]}, *({"image": "001.jpg", "caption": text} for text in (
            "half \ud83d", "\u200b", "\1", "a\0b"))), ["two"],
        [("t.jsonl:2", NOT_UTF8, HALF), ("t.jsonl:3", NO_TEXT, ""), ("t.jsonl:4", NO_TEXT, ""),
         ("t.jsonl:5", NOT_UTF8, "a zero byte; if")]),
    "one bad caption of an image": ("t.csv", (
        b"image,caption\n000.jpg,good\n000.jpg,caf\xe9\n000.jpg,fine\ncaf\xe9.jpg,x\n"), ["good"],
        [("t.csv:3", NOT_UTF8, LATIN), ("t.csv:5", NO_IMAGE, "/")]),
    "a caption in parquet that is not UTF-8": (
        "t.parquet", parquet(image=[*PICTURES.values()], caption=LATIN_TEXTS), ["one", "three", "four"],
        [("t.parquet row 1", NOT_UTF8, LATIN)]),
    "images that are none": ("t.csv", {
        **PICTURES, "empty.jpg": b"", "page.jpg": b"<html>no</html>",
        "cut.jpg": picture(1)[:-200], "noise.png": picture(2, kind="PNG")[:60] + bytes(200) + b"IEND",
        "t.csv": b"image,caption\n000.jpg,fine\nlost.jpg,x\nempty.jpg,x\ncut.jpg,x\npage.jpg,x\nnoise.png,x\n"
                   b"001.jpg,  \n002.jpg,three,fields\n"}, ["fine"],
        [("t.csv:3", NO_IMAGE, "/"), ("t.csv:4", "empty", ""), ("t.csv:5", "truncated", "JPEG of"),
         ("t.csv:6", "not an image", "text where"), ("t.csv:7", "truncated", "PNG of"), ("t.csv:8", NO_TEXT, ""),
         ("t.csv:9", BAD_ROW, "3 fields instead of 2")]),
    "COCO's ids": ("t.json", coco([[1], 2, 3, 3], ([1], "x"), (9, "lost")), ["x"],
        [("t.json images[1]", NO_TEXT, ""), ("t.json images[2]", BAD_ROW, "2 images have the id '3'"),
         ("t.json images[3]", BAD_ROW, "2 images have the id '3'"),
         ("t.json annotations[1]", NO_IMAGE, "no image has the id '9'")]),
    "members that are there twice": ("t.tar", tar(TWICE), ["a", "b", "d"],
        [("t.tar:a (again)", NO_TEXT, ""), ("t.tar:c", BAD_ROW, "two members of its sample have the same suffix")]),
    "such members first": ("t.tar", tar(TWICE[5:]), ["d"], [("t.tar:c", BAD_ROW, "two members of")]),
    "deep JSON": ("tars", {"tars/t.tar": tar([
        ("a.jpg", picture(0)), ("a.json", b'{"caption": "x"}'), ("b.jpg", picture(0)), ("b.json", b"[" * 100_000)])},
        ["x"], [("t.tar:b", BAD_ROW, "its caption cannot be read (max")]),
    "texts and images alone": ("in", {
        "in/000.jpg": picture(0), "in/000.txt": b"a", "in/2.txt": b"b", "in/alone.png": picture(1, kind="PNG")}, ["a"],
        [("alone.png", NO_TEXT, "it has no txt, or nothing in it"),
         ("2.txt", NO_IMAGE, "no image of this name beside it")]),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_one_odd_row_costs_no_other(name, tmp_path):
    """Regression test: several of these ended the conversion as a bug, or cost the rows of other captions."""
    source, files, captions, lost = DAMAGED[name]
    write_files(tmp_path / "x", files if isinstance(files, dict) else {**PICTURES, source: files})
    make(tmp_path / "x" / source, tmp_path / "out")
    assert [text for _, text, _ in stored(tmp_path / "out")] == captions
    shown = dropped(tmp_path / "out")
    assert [tuple(row[:2]) for row in shown] == [row[:2] for row in lost]
    assert all(row[2].startswith(start) for row, (*_, start) in zip(shown, lost, strict=True)), shown


def test_damaged_arrow_files(tmp_path):
    """Regression test: a segmentation fault."""
    import datasets

    columns = {"image": [picture(k) for k in range(10)], "caption": [f"picture {k}" for k in range(10)]}
    data, ends = datasets.Dataset.from_dict(columns), np.arange(0, 91, 9, dtype=np.int32).tobytes()  # of the captions
    for name, was, now in (("anywhere", ends, ends[:8] + b"\x7f" * 4 + ends[12:]), ("latin", b"re 4", b"r\xff 4")):
        data.cast_column("image", datasets.Image()).save_to_disk(tmp_path / name)
        file = next((tmp_path / name).glob("*.arrow"))
        file.write_bytes(file.read_bytes().replace(was, now))
    with pytest.raises(UserError, match=r"A file of .*anywhere is damaged .*: copy it again"):
        make(tmp_path / "anywhere", tmp_path / "f")
    assert make(tmp_path / "latin", tmp_path / "g").manifest.failures == {NOT_UTF8: 1}


X = pa.table({"image": pa.array([b"x" * 99] * 4, pa.binary()), "caption": [f"a cat {k}" for k in range(4)]})
CHECKED = parquet(X, options={"compression": "none", "use_dictionary": False, "write_page_checksum": True})
TWO_TEXTS = pa.Table.from_arrays([["0.jpg"], ["a"], ["b"]], names=["image", "text", "text"])
OUTSIDE = r"names '.*', which is not in .*--images.*--allow-outside"
URLS = "has URLs .*neuclip download output=FOLDER source.table=FILE source.url="
NOT_WHOLE = r"is not a complete tar, after \d+ samples .*(joined|wrong checksum)"
PAIR = [("0.jpg", picture(0)), ("0.txt", b"x")]
REFUSED: list[tuple[str, bytes, dict[str, Any], str]] = [
    ("up.csv", b"image,caption\n000.jpg,a\n../secret.jpg,b\n", {}, OUTSIDE),
    ("absolute.csv", b"image,caption\n000.jpg,a\n/secret.jpg,b\n", {}, OUTSIDE),
    ("coco.json", coco([1], (1, "x")).replace(b"000", b"../000"), {},
     r"None of the first 1 images of .*coco\.json, such as '../000\.jpg', exists in .*: name with --images"),
    ("up.parquet", parquet(image=["000.jpg", "../secret.jpg"], caption=["a", "b"]), {}, OUTSIDE),
    ("urls.csv", b"image,caption\nhttp://x/1.jpg,a\n", {}, URLS + "image"),
    ("url.csv", b"url,caption\nhttp://x/1.jpg,a\n", {}, URLS + "url"),
    ("urls.parquet", parquet(image=["http://x/1.jpg"], caption=["a"]), {}, URLS),
    ("sbu.json", tree({"image_urls": ["http://x"], "captions": ["a"], "user_ids": ["1"]}), {}, URLS),
    ("cell.csv", b"image,caption\n" + b"x" * 20_000 + b",a\n", {}, r"such as 'x{77}\.\.\.', exists"),
    ("uneven.json", tree({"image": ["000.jpg", "001.jpg"], "caption": ["a"]}), {},
     r"columns of different lengths, .*: image 2, caption 1\."),
    ("twice.json", b'{"000.jpg": "a", "000.jpg": "c"}', {}, "an object has the name '000.jpg' twice"),
    ("deep.json", b"[" * 100_000, {}, "is not valid JSON"),
    ("twice.csv", b"image,caption,caption\n000.jpg,a,b\n", {}, "several columns called 'caption'"),
    ("twice.parquet", parquet(TWO_TEXTS), {}, "has several columns called 'text'"),
    ("numbers.parquet", parquet(X.set_column(1, "caption", pa.array([1.5] * 4))), {},
     r"usual name for the caption.*Columns: image, caption \(not text\)\."),
    ("page.parquet", CHECKED.replace(b"a cat 2", b"a car 2", 1), {}, r"page\.parquet is damaged .*fetch it"),
    ("foot.parquet", CHECKED[:-108] + bytes(100) + CHECKED[-8:], {}, "is not a parquet file that can"),
    ("bad.tar", tar([("0.jpg", picture(0)), ("0.json", b"{broken \xe9")]), {},
     r"no caption under a usual name: .*Members of 1 samples: jpg 1, json 1\."),
    ("joined.tar", 2 * tar(TWICE), {}, NOT_WHOLE),
    ("header.tar", (body := tar(TWICE))[:3072] + b"x" + body[3073:], {}, NOT_WHOLE),
    ("none.tar", tar(TWICE[5:8]), {}, r"None of the 1 rows .*the same suffix: c\.JPG\)\.$"),
    ("bad.tgz", gzip.compress(tar(TWICE))[:-100], {}, r"bad\.tgz .*not a complete gzip"),
    ("bomb.tgz", gzip.compress(bytes(1 << 24)), {}, r"bomb\.tgz .*more than 50 times"),
    ("nowhere", b"", {}, "There is no file or folder .*A source is a CSV"),
    ("t.csv", b"image,text\n000.jpg,a\n", {"caption": "txet"}, r"'txet' \(--caption\).*The nearest is text"),
    ("odd.csv", b"a,b\n1,2\n", {},
     "usual name for the image: name it with --image.*no line of names, give them: --header image,caption"),
    ("", b"", {}, "has images, but no captions"),
    ("", b"", {"caption_template": ("a {klass}",)}, r"'a \{klass\}' has no \{class\}"),
    ("", b"", {"caption_template": ("a {class}",)}, "has no folders with images"),
    ("t.csv", b"image,text\n000.jpg,a\n", {"caption_template": ("a {class}",)},
     "--caption-template does not apply to this source, which is of kind table, but to images"),
    *((name, body, {"split": "train"}, r"--split does not apply to ") for name, body in (
        ("t.csv", b"image,text\n000.jpg,a\n"), ("coco.json", coco([1], (1, "x"))),
        ("list.json", tree([{"image": "000.jpg", "caption": "x"}])), ("t.tar", tar(PAIR)),
        ("a.parquet", parquet(image=[picture(1)], caption=["a"])))),
]  # fmt: skip


def test_what_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    write_files(tmp_path / "in", PICTURES)
    for name, body, options, message in REFUSED:
        path = tmp_path / "in" / name
        if body:
            path.write_bytes(body)
        with pytest.raises(UserError, match=message) as error:
            make(path, tmp_path / "out", **options)
        assert len(str(error.value)) < 1_000
        assert (tmp_path / "out").exists() == (name == "none.tar")
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        if body:
            path.unlink()
    monkeypatch.chdir(tmp_path)
    for name in ("tables/t.csv", "in/t"):
        with pytest.raises(UserError, match=f"There is no file or folder {name}"):
            make(name, tmp_path / "out")
    write_files(tmp_path, {"secret.jpg": picture(9), "in/up.csv": b"image,caption\n000.jpg,a\n../secret.jpg,b\n"})
    assert "2 of 2 rows" in run(tmp_path / "in/up.csv", tmp_path / "allowed", "--allow-outside")


def test_a_folder_that_is_not_what_it_was(table, tmp_path):
    """Also regression tests: damage to the plan was reported as a bug, or other rows were converted."""
    write_files(tmp_path / "in", {"a.parquet": parquet(jpg=[picture(1)], texts=["x"]), "c.parquet": parquet(other=[1])})
    with pytest.raises(UserError, match=r"c.parquet lacks columns of .*a.parquet: jpg, texts"):
        make(tmp_path / "in", tmp_path / "again")
    with pytest.raises(UserError, match="was not made by `neuclip pairs`"):
        make(table, table.parent / "images")
    out = tmp_path / "out"
    make(table, out)
    with pytest.raises(UserError, match=r"other settings \(size was None and is now 32\)"):
        make(table, out, size=32)
    whole, path = digests(out), out / "plan/pairs.json"
    body = path.read_bytes()
    path.write_bytes(body.replace(b'"raw": false', b'"raw": true'))  # of an earlier version, with an option that left
    with pytest.raises(UserError, match=r"other settings \(raw was True and is now False\)"):
        make(table, out)
    (out / "meta/00001.json").unlink()
    plan = json.loads(body)
    lacking = [tree({key: plan[key] for key in plan if key != name}) for name in plan]
    for wrong in (body[:-9], b"[]", body.replace(b"stamp", b"stomp"), *lacking):
        path.write_bytes(wrong)
        with pytest.raises(UserError, match=rf"{path} is damaged: delete {out} and run"):
            make(table, out)
    path.write_bytes(body)
    make(table, out)
    assert digests(out) == whole
    table.write_text(table.read_text().replace("picture 3", "picture three"))
    with pytest.raises(UserError, match=r"has changed since .* was begun: it had 10 rows and has 10, or"):
        make(table, out)


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.jsonl"])
def test_tables_in_utf_16_are_refused_with_what_is_allowed(name, tmp_path):
    words = r"is not UTF-8, which it must be, but looks like UTF-16 .*iconv"
    for encoding in ("utf-16", "utf-16-be", "utf-32"):
        body = '{"image": "a.jpg", "caption": "a dog"}\n'.encode(encoding)
        write_files(tmp_path, {name: body, f"{name}.gz": gzip.compress(body)})
        with pytest.raises(UserError, match=rf"{name} {words}"):
            make(tmp_path / name, tmp_path / "out")
        for file in (name, f"{name}.gz"):
            with pytest.raises(UserError, match=rf"{file} {words}"):
                next(read(SourceConfig(table=str(tmp_path / file))))


def test_names_of_devices_pipes_and_huge_files_are_not_read(table, tmp_path):
    """Regression test: `/dev/zero` in a table took all memory of the machine, and a pipe waited for ever."""
    os.mkfifo(tmp_path / "pipe.jpg")
    with (tmp_path / "huge.jpg").open("wb") as file:
        file.truncate(2**31 + 1)
    names = [f"{table.parent}/images/000.jpg", "/dev/null", f"{tmp_path}/pipe.jpg", f"{tmp_path}/huge.jpg"]
    path = write_csv(table.parent / "odd.csv", [("image", "caption"), *((name, "x") for name in names)])
    outcome = make(path, tmp_path / "out", allow_outside=True)
    assert (outcome.manifest.n, outcome.manifest.failures) == (1, {NO_IMAGE: 3})
    assert [detail.rpartition(": ")[2] for _, _, detail in dropped(tmp_path / "out")] == [
        "not a regular file", "not a regular file", "2,147,483,649 bytes, more than an image has"]  # fmt: skip


def test_captions_and_images_that_are_no_files_cost_their_sample_only(tmp_path):
    """Regression test: a pipe beside an image was waited for without an end; a link to nothing refused the folder."""
    folder = tmp_path / "in"
    write_images(folder, 3)
    (folder / "003.jpg").symlink_to("nothing")
    (folder / "003.txt").write_text("lost")
    os.mkfifo(folder / "000.txt")
    (folder / "001.txt").symlink_to("/dev/zero")
    (folder / "002.txt").write_text("good")
    make(folder, tmp_path / "out")
    assert texts(tmp_path / "out") == [["good"]]
    assert [row[:2] for row in dropped(tmp_path / "out")] == [
        ["000.jpg", BAD_ROW], ["001.jpg", BAD_ROW], ["003.jpg", NO_IMAGE]]  # fmt: skip
    (folder / "3.tar").symlink_to("nothing")
    with pytest.raises(UserError, match=r"3\.tar is not a file, nor a link to one"):
        make(folder, tmp_path / "other")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("name", ["odd.csv", "odd.tsv"])
def test_an_unclosed_quote_is_an_error_instead_of_a_long_caption(table, tmp_path, name, order):
    """Regression test: the following rows used to become part of the caption, and none of them was counted."""
    rows = [("image", "text"), *((f"images/{n:03d}.jpg", f"{chr(34) * (n == 6)}picture {n}") for n in range(10))]
    text = [("\t" if name.endswith("tsv") else ",").join(row[i] for i in order) for row in rows]
    path = table.parent / name
    for some, words in ((text, "begins at line 8, which would"), ([*text, *text[1:]], "would swallow 10 lines")):
        path.write_text("\n".join(some) + "\n")  # the second such quote closes the first
        with pytest.raises(UserError, match=rf"{name}: a quote is not closed in the row that .*{words}"):
            make(path, tmp_path / "out")


def test_every_cut_of_a_tar_is_noticed(tmp_path):
    """Regression test: 19 of 40 samples were lost in no count, since seeking past the end of a file is no error."""
    write_tar(tmp_path / "w.tar", [{"jpg": picture(k), "txt": b"x"} for k in range(8)])
    body = (tmp_path / "w.tar").read_bytes()
    end = len(body.rstrip(b"\0"))
    path = tmp_path / "cut.tar"
    for cut in [*range(0, end, 512), *(random.Random(0).randrange(end) for _ in range(40))]:
        path.write_bytes(body[:cut])
        with pytest.raises(UserError, match=r"cut\.tar (is not a complete tar|holds no samples)"):
            open_tars(tmp_path, [path], PairOptions(), tmp_path)
    write_tar(tmp_path / "a.tar", [{"jpg": picture(k), "txt": b"x"} for k in range(2)])
    os.truncate(tmp_path / "a.tar", 1 << 16)  # programs that reserve a file's size first leave such zeros
    with pytest.raises(UserError, match=r"more (zeros end it )?than any padding"):
        open_tars(tmp_path, [tmp_path / "a.tar"], PairOptions(), tmp_path)
    with pytest.raises(UserError, match="more than any padding"):
        index_shards(tmp_path)


def test_sparse_members_and_links_cost_their_sample_only(tmp_path):
    """Regression test: a tar of 20 KB took 7 GB of memory, and gave a sample of 3 GB."""
    write_files(
        tmp_path, {**{f"{name}.txt": name.encode() for name in ("big", "link", "good")}, "good.jpg": picture(1)}
    )
    with (tmp_path / "big.jpg").open("wb") as file:
        file.truncate(5 << 30)
    (tmp_path / "link.jpg").symlink_to("good.jpg")
    members = [f"{name}.{suffix}" for name in ("big", "link", "good") for suffix in ("jpg", "txt")]
    subprocess.run(["tar", "--sparse", "-cf", "a.tar", *members], cwd=tmp_path, check=True)
    make(tmp_path / "a.tar", tmp_path / "out")
    assert texts(tmp_path / "out") == [["good"]]
    for (_, reason, detail), words in zip(
        dropped(tmp_path / "out"),
        (r"its member big\.jpg is (a )?sparse", r"its member link\.jpg is a .*link: store the file itself"),
        strict=True,
    ):
        assert reason == BAD_ROW
        assert re.match(words, detail)


def test_many_samples_decide_which_members_are_used(tmp_path):
    """Regression test: if the first sample alone had no .txt, all captions came from the JSON."""
    members = [("README.md", b"hello"), ("orphan.json", b"{}")]
    for k in range(20):
        members += [(f"{k}.jpg", picture(k)), (f"{k}.json", b'{"caption": "from json"}')]
        members += [(f"{k}.txt", b"from txt")] if k else []
    write_members(tmp_path / "a.tar", members)
    for options, count, lost in (((), 19, 3), (("--caption", "txt"), 19, 3),
                                 (("--caption", "txt", "--caption", "json:caption"), 20, 2)):  # fmt: skip
        output = tmp_path / str(len(options))
        said = run(tmp_path / "a.tar", output, *options)
        other = "" if count == 20 else "; 1 others have json:caption"
        assert f"images: jpg; captions: txt{', else json:caption' if count == 20 else ''} ({count} of 22 " in said
        assert f"have both{other};" in said
        assert (len(stored(output)), len(dropped(output))) == (count, lost)
    with pytest.raises(UserError, match=r"--caption 'nope' is in no sample of .*of 22 samples: json 21, jpg 20,"):
        run(tmp_path / "a.tar", tmp_path / "x", "--caption", "nope")

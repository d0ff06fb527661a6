"""`neuclip pairs` reads every kind of source into the same kind of shards."""

# ruff: noqa: F811 (imported fixtures are requested by name)
from __future__ import annotations

import gzip
import json
import shutil
import tarfile
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.pairs.pair import NOT_UTF8, ImageOptions, captions_of_list
from pipeline.data.shards.manifest_format import load_manifest
from pipeline.errors import UserError
from tests.pair_files import (  # noqa: F401
    check_ten,
    convert_all,
    dropped,
    make,
    picture,
    stored,
    table,
    texts,
    write_csv,
    write_images,
)
from tests.shards import write_members, write_tar

TABLES: list[tuple[str, str, tuple[str, ...] | None, dict[str, Any]]] = [
    ("a.tsv", "\t", ("where", "what"), {"image": "where", "caption": "what"}),
    ("b.csv", ";", ("where", "what, or more"), {"image": "where", "caption": "what, or more"}),
    ("c.csv", "|", ("Image Path", "Alt-Text"), {}),
    ("D.TSV", "\t", ("image", "caption"), {}),
    ("e.tsv", "\t", None, {"header": ("image", "caption")}),
    ("F.JSONL", "", ("image", "caption"), {}),
]


def test_tables_of_every_kind(table, tmp_path):
    outcome = convert_all(table.parent, tmp_path / "out")
    check_ten(tmp_path / "out", outcome)
    assert [shard.samples for shard in outcome.manifest.shards] == [4, 4, 2]
    assert stored(tmp_path / "out")[3][2] == {"captions": ["picture 3"], "source": "pairs.csv:5"}
    pairs = [(f"images/{n:03d}.jpg", f"picture {n}") for n in range(10)]
    for name, delimiter, names, options in TABLES:
        path = table.parent / name
        if delimiter:
            write_csv(path, [*([names] if names else []), *pairs], delimiter=delimiter)
        else:
            path.write_text("\n".join(json.dumps(dict(zip(names or (), pair, strict=True))) for pair in pairs))
        check_ten(tmp_path / name, make(path, tmp_path / name, **options))


LISTS = {
    '["a dog", "a brown dog"]': ("a dog", "a brown dog"),
    "['a dog', 'it\\'s brown']": ("a dog", "it's brown"),
    "['a cat' 'a dog']": ("a cat", "a dog"),
    "['a cat'\n \"a dog's\"]": ("a cat", "a dog's"),
    "[untitled]": ("[untitled]",),
    "[1, 2]": ("[1, 2]",),
    '["a dog"': ('["a dog"',),
    "[]": (),
    "['']": (),
}


def test_a_list_in_a_cell_is_several_captions(tmp_path):
    for text, captions in LISTS.items():
        assert captions_of_list(text) == captions
    cell = '["a dog", "a dog", "a cat"]'
    write_images(tmp_path, 1)
    source = write_csv(tmp_path / "t.csv", [("image", "caption"), ("000.jpg", cell)])
    for name, options, wanted in (("out", {}, ["a dog", "a cat"]), ("one", {"captions": "one"}, [cell])):
        make(source, tmp_path / name, **options)
        assert texts(tmp_path / name) == [wanted]


def test_a_link_to_its_own_folder_repeats_nothing(tmp_path):
    """Regression test: every image was taken forty times."""
    names = write_images(tmp_path / "photos", 2)
    for name in names:
        (tmp_path / "photos" / name).with_suffix(".txt").write_text("x")
    (tmp_path / "photos/again").symlink_to(tmp_path / "photos")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "photos" / names[1]).rename(tmp_path / "elsewhere" / names[1])
    (tmp_path / "photos" / names[1]).with_suffix(".txt").rename(tmp_path / "elsewhere" / f"{names[1][:-4]}.txt")
    (tmp_path / "photos/more").symlink_to(tmp_path / "elsewhere")
    assert convert_all(tmp_path / "photos", tmp_path / "out").manifest.n == 2


def test_jsonl_with_several_captions(table, tmp_path):
    path = table.parent / "pairs.jsonl"
    lines = [json.dumps({"image": f"images/{n:03d}.jpg", "captions": [f"picture {n}", f"no. {n}"]}) for n in range(10)]
    path.write_text("\n".join([*lines, "{broken", "[1]", '{"image": 3, "captions": "x"}']))
    outcome = make(path, tmp_path / "out")
    assert (outcome.manifest.n, outcome.manifest.facts["counts"]["several_captions"]) == (10, 10)
    assert stored(tmp_path / "out")[7][2]["captions"] == ["picture 7", "no. 7"]
    assert [(place, reason) for place, reason, _ in dropped(tmp_path / "out")] == [
        ("pairs.jsonl:11", "malformed row"), ("pairs.jsonl:12", "malformed row"), ("pairs.jsonl:13", "malformed row"),
    ]  # fmt: skip


def test_text_files_next_to_the_images(tmp_path):
    for number, name in enumerate(write_images(tmp_path / "in" / "sub", 10)):
        (tmp_path / "in" / "sub" / name).with_suffix(".txt").write_text(f" picture   {number}\n\n")
    (tmp_path / "in" / "alone.png").write_bytes(picture(0, kind="PNG"))
    outcome = convert_all(tmp_path / "in", tmp_path / "out")
    assert (outcome.manifest.n, dict(outcome.manifest.failures)) == (10, {"no caption": 1})
    assert dropped(tmp_path / "out") == [["alone.png", "no caption", "it has no txt, or nothing in it"]]
    assert stored(tmp_path / "out")[4][1] == "picture 4"


def test_coco(tmp_path):
    names = write_images(tmp_path / "coco" / "train2017", 10)
    images = [{"id": 100 + n, "file_name": name} for n, name in enumerate(names)]
    notes = [{"image_id": 100 + n, "caption": f"{word} {n}\n"} for word in ("picture", "other") for n in range(9)]
    (tmp_path / "coco" / "annotations").mkdir()
    path = tmp_path / "coco" / "annotations" / "captions_train2017.json"
    path.write_text(json.dumps({"images": images, "annotations": [*notes, {"image_id": 7, "caption": "lost"}]}))
    outcome = convert_all(path, tmp_path / "out")
    assert (outcome.manifest.n, outcome.manifest.facts["counts"]["several_captions"]) == (9, 9)
    assert dict(outcome.manifest.failures) == {"no caption": 1, "image file missing": 1}
    path.write_text(json.dumps({"images": [*images, {"id": 103, "file_name": names[9]}], "annotations": notes}))
    assert make(path, tmp_path / "twice").manifest.failures == {"no caption": 1, "malformed row": 2}
    assert [detail for _, reason, detail in dropped(tmp_path / "twice") if "row" in reason] == [
        "2 images have the id '103'"
    ] * 2
    assert stored(tmp_path / "out")[3][2]["captions"] == ["picture 3", "other 3"]
    with pytest.raises(UserError, match=r"name the annotations, such as .*captions_train2017.json"):
        convert_all(tmp_path / "coco", tmp_path / "other")


def test_parquet_and_datasets(tmp_path):
    import datasets

    images, captions = [picture(n) for n in range(10)], [f"picture {n}" for n in range(10)]
    rows = {"image": images, "caption": captions, "n": list(range(10))}
    data = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    data.to_parquet(tmp_path / "one.parquet", batch_size=3)
    data.save_to_disk(tmp_path / "disk")
    datasets.DatasetDict({"train": data, "test": data.select(range(3))}).save_to_disk(tmp_path / "splits")
    check_ten(tmp_path / "a", convert_all(tmp_path / "one.parquet", tmp_path / "a"))
    check_ten(tmp_path / "b", convert_all(tmp_path / "disk", tmp_path / "b"))
    check_ten(tmp_path / "c", convert_all(tmp_path / "splits", tmp_path / "c"))
    assert convert_all(tmp_path / "splits", tmp_path / "d", split="test").manifest.n == 3
    assert stored(tmp_path / "a")[8][2]["source"] == "one.parquet row 8"
    with pytest.raises(UserError, match=r"no split 'val': choose with --split\. It has: train, test"):
        convert_all(tmp_path / "splits", tmp_path / "e", split="val")
    body = next((tmp_path / "disk").glob("*.arrow")).read_bytes()
    ends = body.index(np.arange(0, 91, 9, dtype=np.int32).tobytes())  # of the captions
    for name, changed in (
        ("points anywhere", body[: ends + 8] + b"\x7f" * 4 + body[ends + 12 :]),
        ("not utf-8", body.replace(b"picture 4", b"pictur\xff 4")),
    ):
        shutil.copytree(tmp_path / "disk", tmp_path / name)
        next((tmp_path / name).glob("*.arrow")).write_bytes(changed)
    with pytest.raises(UserError, match=r"A file of .*points anywhere is damaged .*: copy it again"):
        convert_all(tmp_path / "points anywhere", tmp_path / "f")  # regression test: a segmentation fault
    assert convert_all(tmp_path / "not utf-8", tmp_path / "g").manifest.failures == {NOT_UTF8: 1}


def test_a_folder_of_parquet_files_with_lists_of_captions(tmp_path):
    (tmp_path / "in").mkdir()
    for part, numbers in (("a", range(6)), ("b", range(6, 10))):
        columns = {"jpg": [picture(n) for n in numbers], "texts": [[f"picture {n}", "", "more"] for n in numbers]}
        pq.write_table(pa.table(columns), tmp_path / "in" / f"{part}.parquet", row_group_size=4)
    outcome = convert_all(tmp_path / "in", tmp_path / "out", shard_size=3)
    assert (outcome.manifest.n, outcome.manifest.facts["counts"]["several_captions"]) == (10, 10)
    assert [text for _, text, _ in stored(tmp_path / "out")] == [f"picture {n}" for n in range(10)]
    pq.write_table(pa.table({"other": [1]}), tmp_path / "in" / "c.parquet")
    with pytest.raises(UserError, match=r"c.parquet lacks columns of .*a.parquet: jpg, texts"):
        convert_all(tmp_path / "in", tmp_path / "again")


@pytest.mark.parametrize("member", ["txt", "json"])
def test_webdataset_tars(tmp_path, member):
    (tmp_path / "in").mkdir()
    for part, numbers in enumerate((range(7), range(7, 10))):
        members = []
        for number in numbers:
            text, key = f"picture {number}", f"deep/{number:03d}é"
            body = text if member == "txt" else json.dumps({"caption": text, "n": number})
            members += [(f"{key}.jpg", picture(number)), (f"{key}.{member}", body.encode())]
        write_members(tmp_path / "in" / f"{part}.tar", members, format=tarfile.PAX_FORMAT)
    check_ten(tmp_path / "out", convert_all(tmp_path / "in", tmp_path / "out"))
    assert stored(tmp_path / "out")[8][2]["source"] == "1.tar:deep/008é"
    (tmp_path / "in/a").mkdir()
    write_tar(tmp_path / "in/a/0.tar", [])  # an empty one, in another folder
    check_ten(tmp_path / "empty", make(tmp_path / "in", tmp_path / "empty"))
    (tmp_path / "in" / "2.tar").write_bytes((tmp_path / "in" / "0.tar").read_bytes()[:30_000])
    with pytest.raises(UserError, match=r"2.tar is not a complete tar, after \d+ samples .*: fetch it again"):
        convert_all(tmp_path / "in", tmp_path / "again")


def test_invalid_sources_and_options_are_rejected_with_what_to_do(table, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    out = tmp_path / "out"
    twice = pa.Table.from_arrays(
        [pa.array([picture(1)]), pa.array(["a"]), pa.array(["b"])], names=["image", "text", "text"]
    )
    pq.write_table(twice, tmp_path / "twice.parquet")
    write_members(tmp_path / "bad.tar", [("0.jpg", picture(0)), ("0.json", b"{broken \xe9")])
    urls = write_csv(tmp_path / "urls.csv", [("url", "caption"), ("http://x/1.jpg", "one")])
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (tmp_path / "nowhere", {}, "There is no file or folder .*A source is a CSV"),
        ("tables/pairs.csv", {}, "There is no file or folder tables/pairs.csv"),  # not a name on the hub
        (f"{tmp_path.name}/pairs", {}, f"There is no pairs in the folder {tmp_path.name}, which exists here"),
        (urls, {}, "column 'url'.*neuclip download output=FOLDER source.table=FILE source.url=url"),
        (table, {"caption": "txet"}, r"no column 'txet' \(--caption\).*The nearest is text"),
        (
            table,
            {"image": "text", "caption": "file_name"},
            "The first 10 images .*, such as 'picture 0', do not exist in .* or near it",
        ),
        (tmp_path / "twice.parquet", {}, "has several columns called 'text'"),
        (tmp_path / "bad.tar", {}, r"no caption under a usual name: .*Members of 1 samples: jpg 1, json 1\."),
        (table, {"split": "train"}, "--split does not apply to this source"),
        (table.parent / "images", {}, "has images, but no captions"),
        (
            write_csv(tmp_path / "odd.csv", [("a", "b"), ("1", "2")]),
            {},
            "usual name for the image: name it with --image.*no line of names, give them: --header image,caption",
        ),
    ]
    for source, options, message in cases:
        with pytest.raises(UserError, match=message):
            make(source, out, **options)
    make(table, out)
    with pytest.raises(UserError, match=r"other settings \(size was None and is now 32\)"):
        convert_all(table, out, image=ImageOptions(size=32))
    with pytest.raises(UserError, match="was not made by `neuclip pairs`"):
        make(table, table.parent / "images")
    table.write_text(table.read_text().replace("picture 3", "picture three"))
    with pytest.raises(UserError, match=r"has changed since .* was begun: it had 10 rows and has 10, or"):
        make(table, out)


def test_training_on_a_source_names_the_command(table, tmp_path):
    (tmp_path / "coco.json").write_text('{"images": []}')
    for source in (table, table.parent, table.parent / "images", tmp_path / "coco.json"):
        with pytest.raises(UserError, match=rf"`neuclip pairs {source} --output FOLDER`") as error:
            load_manifest(source)
        assert str(error.value).count("FOLDER` makes") == 1
    (tmp_path / "tars").mkdir()
    (tmp_path / "tars" / "0.tar").touch()
    with pytest.raises(UserError, match=r"`neuclip manifest .*tars`"):
        load_manifest(tmp_path / "tars")
    with pytest.raises(UserError, match=r"no such file or folder.*`neuclip pairs SOURCE --output FOLDER`"):
        load_manifest("someone/pictures")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_captions_may_have_several_lines(table, tmp_path, order):
    rows = [("image", "text"), *((f"images/{n:03d}.jpg", f'picture\n"{n}",\nno. {n}') for n in range(10))]
    path = write_csv(table.parent / "lines.csv", [[row[i] for i in order] for row in rows])
    make(path, tmp_path / "out")
    assert [text for _, text, _ in stored(tmp_path / "out")] == [f'picture "{n}", no. {n}' for n in range(10)]


def test_a_compressed_tar_is_unpacked(tmp_path):
    write_tar(tmp_path / "a.tar", [{"jpg": picture(n), "txt": f"picture {n}".encode()} for n in range(10)])
    body = gzip.compress((tmp_path / "a.tar").read_bytes())
    for name in ("a.tgz", "b.tar.gz", "c.tar"):
        (tmp_path / name).write_bytes(body)
        check_ten(tmp_path / f"out {name}", make(tmp_path / name, tmp_path / f"out {name}"))
        assert not (tmp_path / f"out {name}" / "plan" / "work").exists()
    for damaged, said in ((body[:-100], "not a complete gzip"), (gzip.compress(bytes(1 << 26)), "more than 50 times")):
        (tmp_path / "bad.tgz").write_bytes(damaged)
        with pytest.raises(UserError, match=rf"bad\.tgz .*{said}"):
            make(tmp_path / "bad.tgz", tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


def test_lines_of_a_text_file_and_text_files_without_an_image(tmp_path):
    folder = tmp_path / "in"
    write_images(folder, 2)
    (folder / "000.txt").write_text("a dog\n\na brown dog\n")
    (folder / "001.txt").write_text("a cat")
    (folder / "002.txt").write_text("its picture is elsewhere")
    make(folder, tmp_path / "out")
    assert texts(tmp_path / "out") == [["a dog", "a brown dog"], ["a cat"]]
    assert dropped(tmp_path / "out") == [["002.txt", "image file missing", "no image of this name beside it"]]
    make(folder, tmp_path / "one", captions="one")
    assert texts(tmp_path / "one")[0] == ["a dog a brown dog"]


def test_the_captions_of_flickr8k_are_numbered(tmp_path):
    write_images(tmp_path / "Images", 3)
    rows = [(f"{k:03d}.jpg#{n}", f"caption {n} of {k}") for k in range(2) for n in range(5)]
    (tmp_path / "Images" / "002.jpg").rename(tmp_path / "Images" / "odd.jpg#1")
    source = write_csv(tmp_path / "Flickr8k.token.txt", [*rows, ("odd.jpg#1", "as named")], delimiter="\t")
    make(source, tmp_path / "out", header=("image", "caption"), images=tmp_path / "Images")
    assert texts(tmp_path / "out") == [[f"caption {n} of {k}" for n in range(5)] for k in range(2)] + [["as named"]]


def test_a_text_file_with_usual_columns_is_a_folder_s_table(tmp_path):
    """Flickr8k as Kaggle offers it: captions.txt, with a line of names, beside or above the images."""
    names = write_images(tmp_path / "beside", 2)
    rows = [("image", "caption"), *((name, f"{name}, {n}") for name in names for n in range(2))]
    write_csv(tmp_path / "beside" / "captions.txt", rows)
    make(tmp_path / "beside", tmp_path / "out")
    assert texts(tmp_path / "out") == [[f"{name}, {n}" for n in range(2)] for name in names]
    write_images(tmp_path / "above" / "Images", 2)
    write_csv(tmp_path / "above" / "captions.txt", rows)
    make(tmp_path / "above", tmp_path / "x")
    make(tmp_path / "above", tmp_path / "y", images=tmp_path / "above" / "Images")
    assert texts(tmp_path / "x") == texts(tmp_path / "y") == texts(tmp_path / "out")
    write_images(tmp_path / "above" / "Masks", 2)
    with pytest.raises(UserError, match=r"first 4 images of .*captions.txt.* are in several folders.*--images"):
        make(tmp_path / "above", tmp_path / "z")

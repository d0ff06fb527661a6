"""`neuclip pairs` on folders and tables as other tools write them: what is taken, what is counted, what is refused."""

from __future__ import annotations

import gzip
import json
import random
import re
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from PIL import Image, ImageFile

from data_prep.dataset.ingest_report import write_report
from data_prep.pairs.pair import captions_of_list
from jobs.pairs import command
from pipeline.data.shards.manifest_format import load_manifest
from pipeline.errors import UserError
from pipeline.pictures import pixels
from tests.pair_files import dropped, make, picture, stored, texts, write_csv, write_files, write_images
from tests.shards import write_members, write_tar

Files = dict[str, bytes]
NAMES = [f"{k:03d}.jpg" for k in range(4)]
PICTURES = {name: picture(k) for k, name in enumerate(NAMES)}
TEXTS = [[f"caption {k}"] for k in range(4)]
TWO = [["a 0", "b 0"], ["a 1", "b 1"]]
COMMAS = [["a, 0", "b, 0"], ["a, 1", "b, 1"]]


def run(source: Path, output: Path, *options: str) -> str:
    done = CliRunner().invoke(command, [str(source), "--output", str(output), "--processes", "1", *options])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def tree(value: Any) -> bytes:
    return json.dumps(value).encode()


def separated(mark: str, *names: str) -> bytes:
    """A table of the four pictures, with a line of these names if there are any."""
    rows = [*([names] if names else []), *((name, f"caption {k}") for k, name in enumerate(NAMES))]
    return "".join(f"{mark.join(row)}\n" for row in rows).encode()


def parquet(folder: Path, **columns: Any) -> bytes:
    pq.write_table(pa.table(columns), folder / "t")
    return (folder / "t").read_bytes()


def tar(folder: Path, members: list[tuple[str, bytes]], **options: Any) -> bytes:
    write_members(folder / "t", members, **options)
    return (folder / "t").read_bytes()


URLS = {"url": ["http://x/1"] * 4, "caption": ["of the table"] * 4}
SPLITS = ("train", "val", "train", "test")
KARPATHY = {
    "images": [
        {"filename": name, "split": SPLITS[k], "sentences": [{"raw": f"caption {k}"}]} for k, name in enumerate(NAMES)
    ]
}
LARGE_LISTS = pa.large_list(pa.large_string())
LABELS = ("bag", "cap", "hat", "red_shoe")
IN_CLASSES = {f"{label}/{name}": PICTURES[name] for label, name in zip(LABELS, NAMES, strict=True)}
CLASSES = [[f"a {label}", f"{label}, {label}"] for label in ("bag", "cap", "hat", "red shoe")]
STATS = {"stats.csv": b"count\n1\n", "log.jsonl": b'{"a": 1}\n', "00000_stats.json": b"{}"}
FORMS: dict[str, tuple[Callable[[Path], Files], dict[str, Any], list[list[str]]]] = {
    "img2dataset's tars": (lambda at: {
        "00000.tar": tar(at, [(f"{k}.{s}", b) for k in range(4) for s, b in (
            ("jpg", picture(k)), ("json", tree({"caption": "j"})), ("txt", b"caption %d" % k))]),
        "00000.parquet": parquet(at, **URLS), **STATS}, {}, TEXTS),
    "img2dataset's files": (lambda at: {
        **{f"00000/{name}": body for name, body in PICTURES.items()}, "00000.parquet": parquet(at, **URLS), **STATS,
        **{f"00000/{k:03d}.txt": b"caption %d" % k for k in range(4)}}, {}, TEXTS),
    "img2dataset's parquet": (lambda at: {"00000.parquet": parquet(
        at, url=["http://x"] * 5, caption=[*(f"caption {k}" for k in range(4)), "lost"],
        jpg=[*PICTURES.values(), None]), **STATS}, {}, TEXTS),
    "conversations": (lambda at: {**PICTURES, "x.json": tree(
        [{"image": name, "conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": f"caption {k}"}]}
         for k, name in enumerate(NAMES)])}, {}, TEXTS),
    "a mapping": (lambda at: {**PICTURES, "x.json": tree({n: f"caption {k}" for k, n in enumerate(NAMES)})}, {}, TEXTS),
    "a mapping of objects": (lambda at: {**PICTURES, "x.json": tree(
        {name: {"caption": f"caption {k}"} for k, name in enumerate(NAMES)})}, {}, TEXTS),
    "columns": (lambda at: {**PICTURES, "x.json": tree(
        {"image": NAMES, "caption": [f"caption {k}" for k in range(4)]})}, {}, TEXTS),
    "columns of rows by number": (lambda at: {**PICTURES, "x.json": tree(
        {"image": dict(enumerate(NAMES)), "caption": {k: f"caption {k}" for k in range(4)}})}, {}, TEXTS),
    "Karpathy's splits": (lambda at: {**PICTURES, "x.json": tree(KARPATHY)}, {}, TEXTS[::2]),
    "two of Karpathy's splits": (lambda at: {**PICTURES, "x.json": tree(KARPATHY)}, {"split": "train,val"}, TEXTS[:3]),
    "JSON beside images": (lambda at: {
        **PICTURES, **{f"{k:03d}.json": tree({"caption": f"caption {k}"}) for k in range(4)}}, {}, TEXTS),
    "an image folder's split": (lambda at: {
        **{f"{split}/{name}": body for split in ("train", "test") for name, body in PICTURES.items()},
        "train/metadata.csv": b"file_name,text\n" + b"".join(b"%03d.jpg,caption %d\n" % (k, k) for k in range(4)),
        "test/metadata.jsonl": tree({"file_name": "000.jpg", "text": "test"})}, {}, TEXTS),
    "input.jpg and output.txt": (lambda at: {"a.tar": tar(at, [(f"{k}.{s}", b) for k in range(4) for s, b in (
        ("input.jpg", picture(k)), ("mask.png", b"-"), ("output.txt", b"caption %d" % k))])},
        {"image": "input.jpg"}, TEXTS),
    "members apart": (lambda at: {"a.tar": tar(at, [
        *((f"{k}.jpg", picture(k)) for k in range(4)), *((f"{k}.txt", b"caption %d" % k) for k in range(4))])},
        {}, TEXTS),
    "LLaVA's metadata": (lambda at: {**PICTURES, "x.json": tree([
        {"id": str(k), "image": name, "blip_caption": f"caption {k}", "url": "http://x"} for k, name in enumerate(NAMES)
    ])}, {}, TEXTS),
    "lists of labels": (lambda at: {**PICTURES, "x.json": tree({n: [f"caption {k}"] for k, n in enumerate(NAMES)})},
        {}, TEXTS),
    "captions named like the whole image": (lambda at: {
        **PICTURES, **{f"{name}.json": tree({"caption": f"caption {k}"}) for k, name in enumerate(NAMES)}}, {}, TEXTS),
    "splits of parquet files": (lambda at: {f"data/{split}-00000-of-00001.parquet": parquet(
        at, image=[*PICTURES.values()], text=[f"{word} {k}" for k in range(4)])
        for split, word in (("train", "caption"), ("test", "other"))}, {}, TEXTS),
    "another split of parquet files": (lambda at: {f"{split}.parquet": parquet(
        at, image=[*PICTURES.values()], text=[f"{word} {k}" for k in range(4)])
        for split, word in (("train", "other"), ("test", "caption"))}, {"split": "test"}, TEXTS),
    "folders that are no splits": (lambda at: {
        **{f"{at_}/{name}": PICTURES[name] for at_, name in zip("abcd", NAMES, strict=True)},
        **{f"{at_}/metadata.csv": b"file_name,text\n%s,caption %d\n" % (name.encode(), k)
           for k, (at_, name) in enumerate(zip("abcd", NAMES, strict=True))}}, {}, TEXTS),
    "folders of classes": (lambda at: {
        **IN_CLASSES, "t.csv": b"a,b\n1,2\n", ".ipynb_checkpoints/x.jpg": picture(8),
        "cap/.ipynb_checkpoints/001-checkpoint.jpg": picture(1)},
        {"caption_template": ("a {class}", "{class}, {class}")}, CLASSES),
    "a split of folders of classes": (lambda at: {
        **{f"train/{name}": body for name, body in IN_CLASSES.items()},
        "test/x/y.jpg": picture(9)}, {"caption_template": ("a {class}", "{class}, {class}")}, CLASSES),
    "folders of classes below others": (lambda at: {
        f"big_ones/{name}": body for name, body in IN_CLASSES.items()}, {"caption_template": ("{parent} {class}",)},
        [[f"big ones {texts[0][2:]}"] for texts in CLASSES]),
    "parquet of Spark and polars": (lambda at: {
        "a.parquet": parquet(at, image=pa.array([], pa.binary()), caption=pa.array([], LARGE_LISTS)),
        "b.parquet": parquet(at, image=[*PICTURES.values()], caption=pa.array(TEXTS, LARGE_LISTS)),
        }, {}, TEXTS),
    "shuffled rows in parquet": (lambda at: {"a.parquet": parquet(
        at, image=[picture(k % 2) for k in range(4)], caption=["a", "b", "c", "d"])}, {}, [["a", "c"], ["b", "d"]]),
    "parquet files with lists of captions": (lambda at: {f"{part}.parquet": parquet(
        at, jpg=[picture(k) for k in numbers], texts=[[f"a {k}", "", f"b {k}"] for k in numbers])
        for part, numbers in (("x", [0]), ("y", [1]))}, {}, TWO),
    "TSV with names of its own": (lambda at: {**PICTURES, "a.tsv": separated("\t", "where", "what")},
        {"image": "where", "caption": "what"}, TEXTS),
    "semicolons, and commas in a name": (lambda at: {**PICTURES, "b.csv": separated(";", "where", "what, or more")},
        {"image": "where", "caption": "what, or more"}, TEXTS),
    "commas, and a semicolon in a name": (lambda at: {**PICTURES, "b.csv": separated(",", "image", "what; or more")},
        {"caption": "what; or more"}, TEXTS),
    "usual names written otherwise": (lambda at: {**PICTURES, "c.csv": separated(";", "Image Path", "Alt-Text")},
        {}, TEXTS),
    "upper case": (lambda at: {**PICTURES, "D.TSV": separated("\t", "image", "caption")}, {}, TEXTS),
    "no line of names": (lambda at: {**PICTURES, "e.tsv": separated("\t")}, {"header": ("image", "caption")}, TEXTS),
    "an object a line": (lambda at: {**PICTURES, "F.JSONL": b"".join(
        tree({"image": name, "captions": [f"caption {k}"]}) + b"\n" for k, name in enumerate(NAMES))}, {}, TEXTS),
    "an object a line in a .json file": (lambda at: {**PICTURES, "x.json": b"".join(
        tree({"image": name, "captions": [f"caption {k}"]}) + b"\n" for k, name in enumerate(NAMES))}, {}, TEXTS),
    "captions of several lines": (lambda at: {**PICTURES, "g.csv": b"image,text\n" + b"".join(
        b'%03d.jpg,"a\n""%d"",\nb %d"\n' % (k, k, k) for k in range(2))}, {}, [['a "0", b 0'], ['a "1", b 1']]),
    "captions of several lines, first": (lambda at: {**PICTURES, "g.csv": b"text,image\n" + b"".join(
        b'"a\n""%d"",\nb %d",%03d.jpg\n' % (k, k, k) for k in range(2))}, {}, [['a "0", b 0'], ['a "1", b 1']]),
    "a list in a cell": (lambda at: {
        **PICTURES, "t.csv": b'image,caption\n000.jpg,"[""a 0"", ""a 0"", ""b 0""]"\n001.jpg,"[\'a 1\' \'b 1\']"\n'},
        {}, TWO),
    "a list in a cell that is one caption": (lambda at: {
        **PICTURES, "t.csv": b'image,caption\n000.jpg,"[""a"", ""b""]"\n'}, {"captions": "one"}, [['["a", "b"]']]),
    "lines of text files": (lambda at: {
        "s/000.jpg": picture(0), "s/000.txt": b" a   0\n\nb 0\n\n", "001.png": picture(1, kind="PNG"),
        "001.txt": b"a 1\nb 1"}, {}, TWO[::-1]),
    "lines of text files that are one caption": (lambda at: {"000.jpg": picture(0), "000.txt": b"a 0\nb 0"},
        {"captions": "one"}, [["a 0 b 0"]]),
    "COCO's captions": (lambda at: {
        **{f"train2017/{name}": body for name, body in PICTURES.items()}, "annotations/captions_train2017.json": tree({
            "images": [{"id": 10 + k, "file_name": name} for k, name in enumerate(NAMES[:2])],
            "annotations": [{"image_id": 10 + k, "caption": f"{word} {k}\n"} for word in "ab" for k in range(2)]})},
        {"source": "annotations/captions_train2017.json", "images": "train2017"}, TWO),
    "COCO's captions, an image a line": (lambda at: {**PICTURES, "x.json": b"".join((
        b'{"images": [\n', b",\n".join(tree({"id": k, "file_name": name}) for k, name in enumerate(NAMES)),
        b'\n], "annotations": [\n',
        b",\n".join(tree({"image_id": k, "caption": text}) for k, (text,) in enumerate(TEXTS)), b"\n]}"))}, {}, TEXTS),
    "Flickr8k as Kaggle offers it": (lambda at: {
        **{f"Images/{name}": body for name, body in PICTURES.items()}, "captions.txt": b"image,caption\n" + b"".join(
            b"%03d.jpg,%s %d\n" % (k, word, k) for k in range(2) for word in (b"a", b"b"))},
        {"source": "captions.txt", "images": "Images"}, TWO),
    "Flickr30k's results.csv": (lambda at: {
        **PICTURES, "results.csv": b"image_name| comment_number| comment\n" + b"".join(
        b"%03d.jpg| %d| %s, %d\n" % (k, n, word, k) for k in range(2) for n, word in enumerate((b"a", b"b")))},
        {}, COMMAS),
    "Flickr's numbered captions": (lambda at: {**PICTURES, "odd.jpg#1": picture(8), "results.token": b"".join(
        b"%03d.jpg#%d\t%s, %d\n" % (k, n, word, k) for k in range(2) for n, word in enumerate((b"a", b"b")))
        + b"odd.jpg#1\tas named, so\n"}, {"header": ("image", "caption"), "source": "results.token"},
        [*COMMAS, ["as named, so"]]),
    "tars with long names and captions in JSON": (lambda at: {"a/0.tar": tar(at, []), **{f"{part}.tar": tar(at, [
        (f"deep/{k}é.{suffix}", body) for k in numbers
        for suffix, body in (("jpg", picture(k)), ("json", tree({"caption": f"caption {k}"})))],
        format=tarfile.PAX_FORMAT) for part, numbers in ((1, range(3)), (2, range(3, 4)))}}, {}, TEXTS),
    "compressed tars": (lambda at: {f"a{suffix}": gzip.compress(tar(at, [
        (f"{k}.{suffix}", body) for suffix, body in (("jpg", picture(k)), ("txt", b"caption %d" % k))]))
        for k, suffix in enumerate((".tar", ".tar.gz", ".tgz"))}, {}, TEXTS[:3]),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_other_tools_work_as_they_are(name, tmp_path):
    files, options, wanted = FORMS[name]
    folder, options, notes = tmp_path / "in", dict(options), list[str]()
    write_files(folder, files(tmp_path))
    source = folder / options.pop("source", "x.json")
    if "images" in options:
        options["images"] = folder / options["images"]
    make(source if source.exists() else folder, tmp_path / "out", notes=notes, **options)
    assert "not read" not in " ".join(notes)
    assert texts(tmp_path / "out") == wanted
    bodies = [image for image, _, _ in stored(tmp_path / "out")]
    assert set(bodies) <= {*(picture(k) for k in range(9)), picture(1, kind="PNG")}
    lost = ["00000.parquet row 4", "image file missing", "no image in this row"]
    assert dropped(tmp_path / "out") == [lost] * (name == "img2dataset's parquet")


def test_a_repeated_command_notices_what_has_changed(tmp_path):
    """Regression test: it reported the old result again."""
    for name in write_images(tmp_path / "in", 4):
        (tmp_path / "in" / name).with_suffix(".txt").write_text("a cat")

    def contents() -> dict[Path, bytes]:
        files = (path for path in (tmp_path / "out").rglob("*") if path.is_file())
        return {path: path.read_bytes() for path in files if path.parent.name != "staging"}  # which has the locks

    run(tmp_path / "in", tmp_path / "out")
    before = contents()
    assert "Nothing has changed since the last time" in run(tmp_path / "in", tmp_path / "out")
    changes: list[Callable[[], object]] = [
        lambda: (tmp_path / "in/000.jpg").write_bytes(picture(9)),
        lambda: (tmp_path / "in/001.txt").write_text("a dog"),
        lambda: (tmp_path / "in/002.jpg").unlink(),
    ]
    for change in changes:
        change()
        with pytest.raises(UserError, match=r"has changed since .* Delete .* to convert it anew, or name another"):
            run(tmp_path / "in", tmp_path / "out")
    assert contents() == before


def test_rows_of_an_image_are_one_sample_wherever_they_are(tmp_path):
    """Regression test: 24 images with five shuffled captions became 119 samples, each other's negatives."""
    names = write_images(tmp_path, 24)
    rows = [(name, f"{name} {k}") for k in range(5) for name in names]
    random.Random(1).shuffle(rows)
    write_csv(tmp_path / "t.csv", [("image", "caption"), *rows, (names[0], "")])
    said = run(tmp_path / "t.csv", tmp_path / "out")
    assert "\n96 more rows repeat an image: one sample, with all distinct captions\n" in said
    assert "Captions: 120, of which 120 are distinct.\nSamples with several captions: 24;" in said
    assert [about["captions"] for _, _, about in stored(tmp_path / "out")] == [
        [text for name, text in rows if name == first] for first in dict.fromkeys(name for name, _ in rows)
    ]
    assert dropped(tmp_path / "out") == [["t.csv:122", "no caption", ""]]


def test_long_and_equal_captions_and_odd_images_are_counted(tmp_path):
    folder = tmp_path / "in"
    for k, text in enumerate(("word " * 120, "一个男人在海边跑步" * 6, "word " * 75, "short", "short")):
        folder.mkdir(exist_ok=True)
        (folder / f"{k}.png").write_bytes(picture(k, kind="PNG"))
        (folder / f"{k}.txt").write_text(text)
    Image.new("RGBA", (9, 9), (1, 2, 3, 0)).save(folder / "0.png")
    (folder / "bad.jpg").write_bytes(b"no image")  # whose caption is not counted
    (folder / "bad.txt").write_text("dog " * 99)
    said = run(folder, tmp_path / "out")
    assert "Captions: 5, of which 4 are distinct.\n  20% repeat another" in said
    assert "  2 (40.0%) have more than 77 tokens" in said
    assert "Images with transparency: 1, put" in said
    assert "Images of a single colour: 1 of 5" in said
    write_report(tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    for count, words in (
        (4, "Distinct captions"),
        (2, "Captions of more than 77 tokens"),
        (1, "Images with transparency"),
    ):
        assert re.search(rf">{words}</\w+>\s*<[^>]+>{count}<", page), words


def test_what_else_a_folder_has_is_named(tmp_path):
    """Regression test: one of these sources was taken, and the others were passed over without a word."""
    table = {**PICTURES, "t.csv": b"image,caption\n000.jpg,a\n", "b/0.tar": b"", "b/1.zip": b"", ".x/2.tar": b""}
    tars = {"0.tar": tar(tmp_path, [("a.jpg", picture(1)), ("a.txt", b"x")]), "b/1.jpg": picture(2), "1.tar.xz": b""}
    for name, files, note in (
        ("table", {**table, "no_images.csv": b"a,b\n"}, "1 tables, 1 tars, 1 archives"),
        ("tars", {**tars, "b/1.txt": b"y"}, "1 archives, 1 images"),
    ):
        for path, body in files.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_bytes(body)
        assert f"\nnot read, besides: {note}; to convert" in run(tmp_path / name, tmp_path / f"{name} out")


def test_gaps_between_tars_are_named(tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("0", "2", "20240131"):
        write_tar(tmp_path / f"in/{name}.tar", [{"jpg": picture(1), "txt": b"x"}])
    assert "are missing among the tars" not in run(tmp_path / "in", tmp_path / "dates")
    (tmp_path / "in/20240131.tar").unlink()
    assert "numbers are missing among the tars, from 0 to 2: 1" in run(tmp_path / "in", tmp_path / "gap")


def test_saved_data_sets_and_their_splits(tmp_path):
    import datasets

    columns = {"image": [*PICTURES.values()], "caption": [text for (text,) in TEXTS], "n": list(range(4))}
    data = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    data.to_parquet(tmp_path / "one.parquet", batch_size=3)
    data.save_to_disk(tmp_path / "disk")
    splits = datasets.DatasetDict({"train": data, "test": data.select(range(3))})
    splits.save_to_disk(tmp_path / "splits")
    for name, options, count in (("one.parquet", (), 4), ("disk", (), 4), ("splits", (), 4),
                                 ("splits", ("--split", "test"), 3)):  # fmt: skip
        output = tmp_path / f"{name} {count}"
        run(tmp_path / name, output, *options)
        assert stored(output) == [
            (picture(k), f"caption {k}", {"captions": [f"caption {k}"], "source": f"{name} row {k}"})
            for k in range(count)
        ]
    with pytest.raises(UserError, match=r"no split 'val': choose with --split\. It has: train, test"):
        run(tmp_path / "splits", tmp_path / "e", "--split", "val")


def test_folders_and_files_that_are_links(tmp_path):
    """Regression tests: tars below them were passed over; an image was taken forty times, or was its own negative."""
    for name in ("in", "elsewhere"):
        (tmp_path / name).mkdir()
    write_tar(tmp_path / "elsewhere/0.tar", [{"jpg": picture(k), "txt": b"x"} for k in range(3)])
    (tmp_path / "in/sub").symlink_to(tmp_path / "elsewhere")
    run(tmp_path / "in", tmp_path / "out")
    assert len(stored(tmp_path / "out")) == 3
    for name in write_images(tmp_path / "photos/real", 2):
        (tmp_path / "photos/real" / name).with_suffix(".txt").write_text(f"of {name}")
    (tmp_path / "photos/alias").symlink_to(tmp_path / "photos/real")
    (tmp_path / "photos/again").symlink_to(tmp_path / "photos")
    run(tmp_path / "photos", tmp_path / "images")
    assert texts(tmp_path / "images") == [["of 000.jpg"], ["of 001.jpg"]]
    rows = [("image", "caption"), ("real/000.jpg", "a"), ("alias/000.jpg", "b"), ("real/001.jpg", "c")]
    run(write_csv(tmp_path / "photos/t.csv", rows), tmp_path / "table")
    assert texts(tmp_path / "table") == [["a", "b"], ["c"]]


def test_folders_of_classes_are_named(tmp_path):
    write_files(tmp_path, {"in/1.jpg": picture(0), "in/cat/2.jpg": picture(1)})
    assert "classes: 1 (cat)" in run(tmp_path / "in", tmp_path / "out", "--caption-template", "a {class}")
    assert dropped(tmp_path / "out") == [["1.jpg", "no caption", "it is in no folder of a class"]]


def test_heic_needs_a_package_which_is_named(tmp_path, monkeypatch):
    heic = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(99)
    write_files(tmp_path / "in", {"0.heic": heic, "1.avif": picture(1, kind="AVIF"), "0.txt": b"x", "1.txt": b"x"})
    opener = SimpleNamespace(register_heif_opener=lambda: register_stub(monkeypatch))
    for package, count in ((None, 1), (opener, 2)):
        monkeypatch.setitem(sys.modules, "pillow_heif", package)
        pixels._formats.cache_clear()
        said = run(tmp_path / "in", tmp_path / str(count))
        words = "unsupported format: 0.heic (HEIC, which needs: pip install 'neuclip[heif]')"
        assert (words in said) == (count == 1)
        assert len(stored(tmp_path / str(count))) == count
    pixels._formats.cache_clear()


def register_stub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register an opener that shows every HEIC as a red square, as the package registers its own."""

    class Heif(ImageFile.ImageFile):
        format = "HEIF"

        def _open(self) -> None:
            self._mode, self._size, self.tile = "RGB", (20, 20), []
            self.im = Image.new("RGB", (20, 20), "red").im

        def load(self) -> Any:
            return None

    monkeypatch.setitem(Image.OPEN, "HEIF", (Heif, lambda head: head[4:12] == b"ftypheic"))
    monkeypatch.setattr(Image, "ID", [*Image.ID, "HEIF"])


LISTS = {
    '["a dog", "a brown dog"]': ("a dog", "a brown dog"),
    "['a dog', 'it\\'s brown']": ("a dog", "it's brown"),
    "['a cat' 'a dog']": ("a cat", "a dog"),
    "['a cat'\n \"a dog's\"]": ("a cat", "a dog's"),
    "[u'a cat', u'a dog']": ("a cat", "a dog"),  # as Python 2 writes them
    **{text: (text,) for text in ("[untitled]", "[1, 2]", '["a dog"', "[a dog's]", "[b'x']", "[['a'], ['b']]")},
    "[]": (),
    "['']": (),
}


def test_what_a_list_of_captions_is():
    assert {text: captions_of_list(text) for text in LISTS} == LISTS


def test_training_on_a_source_names_the_command(tmp_path):
    write_images(tmp_path / "my own/images", 1)
    table = write_csv(tmp_path / "my own/pairs.csv", [("image", "caption"), ("images/000.jpg", "x")])
    (tmp_path / "coco.json").write_text('{"images": []}')
    (tmp_path / "tars").mkdir()
    (tmp_path / "tars/0.tar").touch()
    for source, words in (
        *(
            (path, f"`neuclip pairs '{path}' --output FOLDER`")
            for path in (table, table.parent, table.parent / "images")
        ),
        (tmp_path / "coco.json", f"`neuclip pairs {tmp_path / 'coco.json'} --output FOLDER`"),
        (tmp_path / "tars", r"`neuclip manifest .*tars`"),
        ("someone/pictures", r"no such file or folder.*`neuclip pairs SOURCE --output FOLDER`"),
    ):
        with pytest.raises(UserError, match=words) as error:
            load_manifest(source)
        assert str(error.value).count("FOLDER`") <= 1

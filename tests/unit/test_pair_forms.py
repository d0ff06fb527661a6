"""`neuclip pairs` on folders and tables as other tools write them: what is taken, what is counted, what is refused."""

from __future__ import annotations

import gzip
import random
import re
import shlex
import sys
import tarfile
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image, ImageFile

from data_prep.dataset.ingest_report import write_report
from data_prep.fetching.served_image import check_image, decode
from data_prep.pairs.pair import captions_of_list
from data_prep.reasons import FetchError
from pipeline.data.shards.manifest_format import load_manifest
from pipeline.errors import UserError
from pipeline.pictures import pixels
from tests.images import HEIC
from tests.pair_files import (
    NAMES,
    PICTURES,
    digests,
    dropped,
    make,
    parquet,
    picture,
    run,
    stored,
    tar,
    texts,
    tree,
    write_csv,
    write_files,
    write_images,
)
from tests.shards import write_tar

CAPTIONS = [f"caption {k}" for k in range(4)]
TEXTS = [[text] for text in CAPTIONS]
ROWS = dict(zip(NAMES, CAPTIONS, strict=True))
TWO = [["a 0", "b 0"], ["a 1", "b 1"]]
COMMAS = [["a, 0", "b, 0"], ["a, 1", "b, 1"]]


def beside(name, *lines):
    """The pictures with a table of these lines."""
    return {**PICTURES, name: b"\n".join(lines) + b"\n"}


def separated(name, mark, *header):
    """The pictures with a table of them."""
    return beside(name, *(mark.join(row).encode() for row in ([header] if header else []) + [*ROWS.items()]))


def members(image, text):
    return [(f"{k}.{s}", b) for k in range(4) for s, b in ((image, picture(k)), (text, CAPTIONS[k].encode()))]


URLS = {"url": ["http://x/1"] * 4, "caption": ["of the table"] * 4}
KARPATHY = tree({"images": [
    {"filename": name, "split": split, "sentences": [{"raw": text}]}
    for (name, text), split in zip(ROWS.items(), ("train", "val", "train", "test"), strict=True)]})  # fmt: skip
LARGE_LISTS = pa.large_list(pa.large_string())
LABELS = ("bag", "cap", "hat", "red_shoe")
IN_CLASSES = {f"{label}/{name}": PICTURES[name] for label, name in zip(LABELS, NAMES, strict=True)}
CLASSES = [[f"a {label}", f"{label}, {label}"] for label in ("bag", "cap", "hat", "red shoe")]
STATS = {"stats.csv": b"count\n1\n", "log.jsonl": b'{"a": 1}\n', "00000_stats.json": b"{}"}
IMAGES = [*PICTURES.values()]
OF_CLASSES = {"caption_template": ("a {class}", "{class}, {class}")}


def numbered(form):
    return [form % (k, n, word, k) for k in range(2) for n, word in enumerate((b"a", b"b"))]


FORMS: dict[str, tuple[dict[str, bytes], dict[str, Any], list[list[str]]]] = {
    "img2dataset's tars": ({"00000.parquet": parquet(**URLS), **STATS, "00000.tar": tar(
        sorted([*members("jpg", "txt"), *((f"{k}.json", tree({"caption": "j"})) for k in range(4))]))}, {}, TEXTS),
    "img2dataset's files": ({
        **{f"00000/{name}": body for name, body in PICTURES.items()}, "00000.parquet": parquet(**URLS), **STATS,
        **{f"00000/{k:03d}.txt": b"caption %d" % k for k in range(4)}}, {}, TEXTS),
    "img2dataset's parquet": ({"00000.parquet": parquet(
        url=["http://x"] * 5, caption=[*CAPTIONS, "lost"], jpg=[*IMAGES, None]), **STATS}, {}, TEXTS),
    "conversations": (beside("x.json", tree([
        {"image": name, "conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": text}]}
        for name, text in ROWS.items()])), {}, TEXTS),
    "LLaVA's metadata": (beside("x.json", tree([
        {"image": name, "blip_caption": text, "url": "http://x"} for name, text in ROWS.items()])), {}, TEXTS),
    "a mapping": (beside("x.json", tree(ROWS)), {}, TEXTS),
    "a mapping of objects": (beside("x.json", tree({n: {"caption": text} for n, text in ROWS.items()})), {}, TEXTS),
    "lists of labels": (beside("x.json", tree({name: [text] for name, text in ROWS.items()})), {}, TEXTS),
    "columns": (beside("x.json", tree({"image": NAMES, "caption": CAPTIONS})), {}, TEXTS),
    "columns of rows by number": (beside("x.json", tree(
        {"image": dict(enumerate(NAMES)), "caption": dict(enumerate(CAPTIONS))})), {}, TEXTS),
    "Karpathy's splits": (beside("x.json", KARPATHY), {}, TEXTS[::2]),
    "two of Karpathy's splits": (beside("x.json", KARPATHY), {"split": "train,val"}, TEXTS[:3]),
    "JSON beside images": ({
        **PICTURES, **{f"{k:03d}.json": tree({"caption": text}) for k, text in enumerate(CAPTIONS)}}, {}, TEXTS),
    "captions named like the whole image": ({
        **PICTURES, **{f"{name}.json": tree({"caption": text}) for name, text in ROWS.items()}}, {}, TEXTS),
    "an image folder's split": ({
        **{f"{split}/{name}": body for split in ("train", "test") for name, body in PICTURES.items()},
        "train/metadata.csv": separated("t", ",", "file_name", "text")["t"],
        "test/metadata.jsonl": tree({"file_name": "000.jpg", "text": "test"})}, {}, TEXTS),
    "folders that are no splits": ({
        **{f"{at}/{name}": PICTURES[name] for at, name in zip("abcd", NAMES, strict=True)},
        **{f"{at}/metadata.csv": f"file_name,text\n{name},{text}\n".encode()
           for at, (name, text) in zip("abcd", ROWS.items(), strict=True)}}, {}, TEXTS),
    "input.jpg and output.txt": ({"a.tar": tar(sorted([
        *members("input.jpg", "output.txt"), *((f"{k}.mask.png", b"-") for k in range(4))]))},
        {"image": "input.jpg"}, TEXTS),
    "members apart": ({"a.tar": tar(sorted(members("jpg", "txt"), key=lambda one: one[0][2:]))}, {}, TEXTS),
    "splits of parquet files": ({f"data/{split}-00000-of-00001.parquet": parquet(
        image=IMAGES, text=[f"{word} {k}" for k in range(4)])
        for split, word in (("train", "caption"), ("test", "other"))}, {}, TEXTS),
    "another split of parquet files": ({f"{split}.parquet": parquet(
        image=IMAGES, text=[f"{word} {k}" for k in range(4)])
        for split, word in (("train", "other"), ("test", "caption"))}, {"split": "test"}, TEXTS),
    "folders of classes": ({
        **IN_CLASSES, "t.csv": b"a,b\n1,2\n", ".ipynb_checkpoints/x.jpg": picture(8),
        "cap/.ipynb_checkpoints/001-checkpoint.jpg": picture(1)}, OF_CLASSES, CLASSES),
    "a split of folders of classes": ({"test/x/y.jpg": picture(9), **{
        f"train/{name}": body for name, body in IN_CLASSES.items()}}, OF_CLASSES, CLASSES),
    "folders of classes below others": ({
        f"big_ones/{name}": body for name, body in IN_CLASSES.items()}, {"caption_template": ("{parent} {class}",)},
        [[f"big ones {texts[0][2:]}"] for texts in CLASSES]),
    "parquet of Spark and polars": ({
        "a.parquet": parquet(image=pa.array([], pa.binary()), caption=pa.array([], LARGE_LISTS)),
        "b.parquet": parquet(image=IMAGES, caption=pa.array(TEXTS, LARGE_LISTS))}, {}, TEXTS),
    "shuffled rows in parquet": ({"a.parquet": parquet(
        image=[picture(k % 2) for k in range(4)], caption=["a", "b", "c", "d"])}, {}, [["a", "c"], ["b", "d"]]),
    "parquet files with lists of captions": ({f"{k}.parquet": parquet(
        jpg=[picture(k)], texts=[[f"a {k}", "", f"b {k}"]]) for k in range(2)}, {}, TWO),
    "semicolons, and commas in a name": (
        separated("b.csv", ";", "where", "what, or more"), {"image": "where", "caption": "what, or more"}, TEXTS),
    "commas, and a semicolon in a name": (
        separated("b.csv", ",", "image", "what; or more"), {"caption": "what; or more"}, TEXTS),
    "usual names written otherwise": (separated("D.TSV", "\t", "Image Path", "Alt-Text"), {}, TEXTS),
    "no line of names": (separated("e.tsv", "\t"), {"header": ("image", "caption")}, TEXTS),
    **{f"an object a line in {name}": (
        beside(name, *(tree({"image": n, "captions": [text]}) for n, text in ROWS.items())), {}, TEXTS)
        for name in ("F.JSONL", "x.json")},
    "captions of several lines": (beside("g.csv", b"image,text", *(
        b'%03d.jpg,"a\n""%d"",\nb %d"' % (k, k, k) for k in range(2))), {}, [['a "0", b 0'], ['a "1", b 1']]),
    "captions of several lines, first": (beside("g.csv", b"text,image", *(
        b'"a\n""%d"",\nb %d",%03d.jpg' % (k, k, k) for k in range(2))), {}, [['a "0", b 0'], ['a "1", b 1']]),
    "a list in a cell": (beside(
        "t.csv", b'image,caption\n000.jpg,"[""a 0"", ""a 0"", ""b 0""]"\n001.jpg,"[\'a 1\' \'b 1\']"'), {}, TWO),
    "a list in a cell that is one caption": (
        beside("t.csv", b'image,caption\n000.jpg,"[""a"", ""b""]"'), {"captions": "one"}, [['["a", "b"]']]),
    "lines of text files": ({
        "s/000.jpg": picture(0), "s/000.txt": b" a   0\n\nb 0\n\n", "001.png": picture(1, kind="PNG"),
        "001.txt": b"a 1\nb 1"}, {}, TWO[::-1]),
    "lines of text files that are one caption": (
        {"000.jpg": picture(0), "000.txt": b"a 0\nb 0"}, {"captions": "one"}, [["a 0 b 0"]]),
    "COCO's captions": ({
        **{f"train2017/{name}": body for name, body in PICTURES.items()}, "annotations/captions_train2017.json": tree({
            "images": [{"id": 10 + k, "file_name": name} for k, name in enumerate(NAMES[:2])],
            "annotations": [{"image_id": 10 + k, "caption": f"{word} {k}\n"} for word in "ab" for k in range(2)]})},
        {"source": "annotations/captions_train2017.json", "images": "train2017"}, TWO),
    "COCO's captions, an image a line": (beside(
        "x.json", b'{"images": [', b",\n".join(tree({"id": k, "file_name": name}) for k, name in enumerate(NAMES)),
        b'], "annotations": [',
        b",\n".join(tree({"image_id": k, "caption": text}) for k, text in enumerate(CAPTIONS)), b"]}"), {}, TEXTS),
    "Flickr8k as Kaggle offers it": ({
        **{f"Images/{name}": body for name, body in PICTURES.items()},
        "captions.txt": b"image,caption\n" + b"".join(
            b"%03d.jpg,%s %d\n" % (k, word, k) for k in range(2) for word in (b"a", b"b"))},
        {"source": "captions.txt", "images": "Images"}, TWO),
    "Flickr30k's results.csv": (
        beside("results.csv", b"image_name| comment_number| comment", *numbered(b"%03d.jpg| %d| %s, %d")), {}, COMMAS),
    "Flickr's numbered captions": ({
        **beside("results.token", *numbered(b"%03d.jpg#%d\t%s, %d"), b"odd.jpg#1\tas named, so"),
        "odd.jpg#1": picture(8)}, {"header": ("image", "caption"), "source": "results.token"},
        [*COMMAS, ["as named, so"]]),
    "tars with long names and captions in JSON": ({"a/0.tar": tar([]), **{f"{part}.tar": tar(
        [(f"deep/{k}é.{end}", body) for k in numbers
         for end, body in (("jpg", picture(k)), ("json", tree({"caption": CAPTIONS[k]})))],
        format=tarfile.PAX_FORMAT) for part, numbers in ((1, range(3)), (2, range(3, 4)))}}, {}, TEXTS),
    "compressed tars": ({f"a{suffix}": gzip.compress(tar(members("jpg", "txt")[2 * k : 2 * k + 2]))
        for k, suffix in enumerate((".tar", ".tar.gz", ".tgz"))}, {}, TEXTS[:3]),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_other_tools_work_as_they_are(name, tmp_path):
    files, options, wanted = FORMS[name]
    folder, options, notes = tmp_path / "in", dict(options), list[str]()
    write_files(folder, files)
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
    source, output = tmp_path / "in", tmp_path / "out"
    for name in write_images(source, 4):
        (source / name).with_suffix(".txt").write_text("a cat")
    run(source, output)
    before = digests(output)
    assert "Nothing has changed since the last time" in run(source, output)
    for change in (
        lambda: (source / "000.jpg").write_bytes(picture(9)),
        lambda: (source / "001.txt").write_text("a dog"),
        lambda: (source / "002.jpg").unlink(),
    ):
        change()
        with pytest.raises(UserError, match=r"has changed since .* Delete .* to convert it anew, or name another"):
            run(source, output)
    assert digests(output) == before


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
    for k, text in enumerate(("word " * 120, "一个男人在海边跑步" * 6, "word " * 75, "short", "short")):
        write_files(tmp_path / "in", {f"{k}.png": picture(k, kind="PNG"), f"{k}.txt": text.encode()})
    Image.new("RGBA", (9, 9), (1, 2, 3, 0)).save(tmp_path / "in/0.png")
    # No image, whose caption is not counted.
    write_files(tmp_path / "in", {"bad.jpg": b"no image", "bad.txt": b"dog " * 99})
    said = run(tmp_path / "in", tmp_path / "out")
    assert "Captions: 5, of which 4 are distinct.\n  20% repeat another" in said
    assert "  2 (40.0%) have more than 77 tokens" in said
    assert "Images with transparency: 1, put" in said
    assert "Images of a single colour: 1 of 5" in said
    page = write_report(tmp_path / "out").read_text()
    for count, words in ((4, "Distinct captions"), (2, "Captions of more than 77 tokens"),
                         (1, "Images with transparency")):  # fmt: skip
        assert re.search(rf">{words}</\w+>\s*<[^>]+>{count}<", page), words


def test_what_else_a_folder_has_is_named(tmp_path):
    """Regression test: one of these sources was taken, and the others were passed over without a word."""
    pair = [("a.jpg", picture(1)), ("a.txt", b"x")]
    table = {**beside("t.csv", b"image,caption", b"000.jpg,a"), "b/0.tar": b"", "b/1.zip": b"", ".x/2.tar": b""}
    tars = {"0.tar": tar(pair), "b/1.jpg": picture(2), "1.tar.xz": b"", "b/1.txt": b"y"}
    dated = {f"{name}.tar": tar(pair) for name in ("0", "2", "20240131")}
    for name, files, note in (
        ("table", {**table, "no_images.csv": b"a,b\n"}, "not read, besides: 1 tables, 1 tars, 1 archives; to convert"),
        ("tars", tars, "not read, besides: 1 archives, 1 images; to convert"),
        (
            "gap",
            {name: dated[name] for name in ("0.tar", "2.tar")},
            "numbers are missing among the tars, from 0 to 2: 1",
        ),
        ("dates", dated, ""),
    ):
        write_files(tmp_path / name, files)
        notes = []
        make(tmp_path / name, tmp_path / f"{name} out", notes=notes)
        assert [line.startswith(note) for line in notes[1:]] == [True] * bool(note)


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
    write_files(tmp_path / "in", {"0.heic": HEIC, "1.avif": picture(1, kind="AVIF"), "0.txt": b"x", "1.txt": b"x"})

    class Heif(ImageFile.ImageFile):
        """Shows every HEIC as a red square."""

        format = "HEIF"

        def _open(self):
            self._mode, self._size, self.tile = "RGB", (20, 20), []
            self.im = Image.new("RGB", (20, 20), "red").im

        def load(self):
            return None

    def register():
        monkeypatch.setitem(Image.OPEN, "HEIF", (Heif, lambda head: head[4:12] == b"ftypheic"))
        monkeypatch.setattr(Image, "ID", [*Image.ID, "HEIF"])

    for package, count in ((None, 1), (SimpleNamespace(register_heif_opener=register), 2)):
        monkeypatch.setitem(sys.modules, "pillow_heif", package)
        pixels._formats.cache_clear()
        said = run(tmp_path / "in", tmp_path / str(count))
        words = "unsupported format: 0.heic (HEIC, which needs: pip install 'neuclip[heif]')"
        assert (words in said) == (count == 1)
        assert len(stored(tmp_path / str(count))) == count
        with nullcontext() if count == 2 else pytest.raises(FetchError, match="unsupported format: HEIC"):
            check_image(HEIC, content_type="", max_pixels=400)
            assert decode(HEIC).array.shape == (20, 20, 3)
    pixels._formats.cache_clear()


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
    write_files(tmp_path, {"my own/images/000.jpg": picture(0), "coco.json": b'{"images": []}', "tars/0.tar": b"",
                           "my own/pairs.csv": b"image,caption\nimages/000.jpg,x\n"})  # fmt: skip
    named = [tmp_path / name for name in ("my own", "my own/images", "my own/pairs.csv", "coco.json")]
    for source, words in (
        *((path, re.escape(f"`neuclip pairs {shlex.quote(str(path))} --output FOLDER`")) for path in named),
        (tmp_path / "tars", r"`neuclip manifest .*tars`"),
        ("someone/pictures", r"no such file or folder.*`neuclip pairs SOURCE --output FOLDER`"),
    ):
        with pytest.raises(UserError, match=words) as error:
            load_manifest(source)
        assert str(error.value).count("FOLDER`") <= 1

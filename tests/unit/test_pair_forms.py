"""`neuclip pairs` on folders and tables as other tools write them: what is taken, what is counted, what is refused."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from PIL import Image

from data_prep.dataset.ingest_report import write_report
from data_prep.pairs.members import open_tars
from data_prep.pairs.pair import SourceOptions
from jobs.pairs import command
from pipeline.data.shards.make_manifest import index_shards
from pipeline.errors import UserError
from tests.pair_files import dropped, make, picture, stored, write_csv, write_images
from tests.shards import write_members, write_tar

Files = dict[str, bytes]
NAMES = [f"{k:03d}.jpg" for k in range(4)]
PICTURES = {name: picture(k) for k, name in enumerate(NAMES)}
TEXTS = [[f"caption {k}"] for k in range(4)]


def run(source: Path, output: Path, *options: str) -> str:
    done = CliRunner().invoke(command, [str(source), "--output", str(output), "--processes", "1", *options])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def tree(value: Any) -> bytes:
    return json.dumps(value).encode()


def parquet(folder: Path, **columns: Any) -> bytes:
    pq.write_table(pa.table(columns), folder / "t")
    return (folder / "t").read_bytes()


def tar(folder: Path, members: list[tuple[str, bytes]]) -> bytes:
    write_members(folder / "t", members)
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
    "a list of objects": (lambda at: {**PICTURES, "x.json": tree(
        [{"image": name, "caption": f"caption {k}", "url": "http://x"} for k, name in enumerate(NAMES)])}, {}, TEXTS),
    "conversations": (lambda at: {**{f"images/{name}": body for name, body in PICTURES.items()}, "x.json": tree(
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
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_other_tools_work_as_they_are(name, tmp_path):
    files, options, texts = FORMS[name]
    folder = tmp_path / "in"
    for path, body in files(tmp_path).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(body)
    json_file = folder / "x.json"
    notes: list[str] = []
    make(json_file if json_file.exists() else folder, tmp_path / "out", notes=notes, **options)
    assert "not read" not in " ".join(notes)
    assert [about["captions"] for _, _, about in stored(tmp_path / "out")] == texts
    lost = ["00000.parquet row 4", "image file missing", "no image in this row"]
    assert dropped(tmp_path / "out") == [lost] * (name == "img2dataset's parquet")


def test_every_cut_of_a_tar_is_noticed(tmp_path):
    """Regression test: 19 of 40 samples were lost in no count, since seeking past the end of a file is no error."""
    write_tar(tmp_path / "w.tar", [{"jpg": picture(k), "txt": b"x"} for k in range(8)])
    body = (tmp_path / "w.tar").read_bytes()
    end = len(body.rstrip(b"\0"))
    path = tmp_path / "cut.tar"
    for cut in [*range(0, end, 512), *(random.Random(0).randrange(end) for _ in range(40))]:
        path.write_bytes(body[:cut])
        with pytest.raises(UserError, match=r"cut\.tar (is not a complete tar|holds no samples)"):
            open_tars(tmp_path, [path], SourceOptions(), tmp_path)


def test_the_room_that_a_download_has_not_filled_is_noticed(tmp_path):
    """Regression test: programs that reserve a file's size first leave zeros, which were taken for a tar's end."""
    write_tar(tmp_path / "a.tar", [{"jpg": picture(k), "txt": b"x"} for k in range(2)])
    os.truncate(tmp_path / "a.tar", 1 << 16)
    with pytest.raises(UserError, match="more than any padding"):
        open_tars(tmp_path, [tmp_path / "a.tar"], SourceOptions(), tmp_path)
    with pytest.raises(UserError, match="more than any padding"):
        index_shards(tmp_path)


def test_captions_without_an_end_cost_their_sample_only(tmp_path):
    """Regression test: a pipe beside an image was waited for without an end."""
    folder = tmp_path / "in"
    folder.mkdir()
    for k in range(3):
        (folder / f"{k}.jpg").write_bytes(picture(k))
    os.mkfifo(folder / "0.txt")
    (folder / "1.txt").symlink_to("/dev/zero")
    (folder / "2.txt").write_text("good")
    run(folder, tmp_path / "out")
    assert [text for _, text, _ in stored(tmp_path / "out")] == ["good"]
    assert [place for place, *_ in dropped(tmp_path / "out")] == ["0.jpg", "1.jpg"]
    (folder / "3.tar").symlink_to("nothing")
    with pytest.raises(UserError, match=r"3\.tar is not a file, nor a link to one"):
        run(folder, tmp_path / "other")


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
        assert f"images: jpg; captions: txt{', else json:caption' if count == 20 else ''} (" in said
        assert (len(stored(output)), len(dropped(output))) == (count, lost)
    with pytest.raises(
        UserError, match=r"--caption 'nope' is in no sample of .*Members of 22 samples: json 21, jpg 20,"
    ):
        run(tmp_path / "a.tar", tmp_path / "x", "--caption", "nope")


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
    (tmp_path / "theirs").mkdir()
    write_tar(tmp_path / "theirs/0.tar", [{"png": (folder / "0.png").read_bytes(), "txt": b"x"}])
    index_shards(tmp_path / "theirs")
    write_report(tmp_path / "theirs")
    page = (tmp_path / "theirs/report.html").read_text()
    for words in ("Images with transparency", "Images of a single colour"):
        assert re.search(rf">{words} among 1 that were read</\w+>\s*<[^>]+>1<", page), words


def test_what_is_refused_before_anything_is_written(tmp_path):
    folder = tmp_path / "in"
    write_images(folder, 2)
    (tmp_path / "secret.jpg").write_bytes(picture(3))
    (tmp_path / "tars").mkdir()
    for k in (0, 2):
        write_tar(tmp_path / f"tars/{k}.tar", [{"jpg": picture(k), "txt": b"x"}])
    outside = r"names '.*', which is not in .*--images.*--allow-outside"
    download = "has URLs .*neuclip download"
    coco = {"images": [{"id": 1, "file_name": "000.jpg"}, {"id": 2, "file_name": "../secret.jpg"}],
            "annotations": [{"image_id": k, "caption": "x"} for k in (1, 2)]}  # fmt: skip
    cases: list[tuple[str, bytes, str]] = [
        ("up.csv", b"image,caption\n000.jpg,a\n../secret.jpg,b\n", outside),
        ("absolute.csv", f"image,caption\n000.jpg,a\n{tmp_path}/secret.jpg,b\n".encode(), outside),
        ("coco.json", tree(coco), outside),
        ("up.parquet", parquet(tmp_path, image=["000.jpg", "../secret.jpg"], caption=["a", "b"]), outside),
        ("urls.csv", b"image,caption\nhttp://x/1.jpg,a\n", download),
        ("urls.parquet", parquet(tmp_path, image=["http://x/1.jpg"], caption=["a"]), download),
        ("sbu.json", tree({"image_urls": ["http://x"], "captions": ["a"], "user_ids": ["1"]}), download),
        ("cell.csv", b"image,caption\n" + b"x" * 20_000 + b",a\n", r"such as 'x{77}\.\.\.', do not exist"),
        (
            "uneven.json",
            tree({"image": ["000.jpg", "001.jpg"], "caption": ["a"]}),
            r"columns of different lengths, .*: image 2, caption 1\.",
        ),
        ("twice.json", b'{"000.jpg": "a", "001.jpg": "b", "000.jpg": "c"}', "an object has the name '000.jpg' twice"),
        ("{0..2}.tar", b"", "1 of the 3 files of .* do not exist, such as .*1.tar"),
    ]
    for name, body, message in cases:
        path = tmp_path / "tars" / name if name.endswith(".tar") else folder / name
        if body:
            path.write_bytes(body)
        with pytest.raises(UserError, match=message) as error:
            run(path, tmp_path / "out")
        assert len(str(error.value)) < 800
        assert not (tmp_path / "out").exists()
    assert "2 of 2 rows" in run(folder / "up.csv", tmp_path / "out", "--allow-outside")
    (tmp_path / "tars/20240131.tar").write_bytes((tmp_path / "tars/0.tar").read_bytes())
    assert "numbers" not in run(tmp_path / "tars", tmp_path / "dates")
    (tmp_path / "more").mkdir()
    (tmp_path / "tars/20240131.tar").rename(tmp_path / "more/0.tar")
    run(tmp_path / "{tars,more}" / "0.tar", tmp_path / "both")
    assert [about["source"] for _, _, about in stored(tmp_path / "both")] == [
        "tars/0.tar:000000000",
        "more/0.tar:000000000",
    ]
    assert "numbers are missing among the tars, from 0 to 2: 1" in run(tmp_path / "tars", tmp_path / "gap")


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


def test_sparse_members_and_links_cost_their_sample_only(tmp_path):
    """Regression test: a tar of 20 KB took 7 GB of memory, and gave a sample of 3 GB."""
    for name in ("big", "link", "good"):
        (tmp_path / f"{name}.txt").write_text(name)
    (tmp_path / "good.jpg").write_bytes(picture(1))
    (tmp_path / "big.jpg").touch()
    os.truncate(tmp_path / "big.jpg", 5 << 30)
    (tmp_path / "link.jpg").symlink_to("good.jpg")
    members = [f"{name}.{suffix}" for name in ("big", "link", "good") for suffix in ("jpg", "txt")]
    subprocess.run(["tar", "--sparse", "-cf", "a.tar", *members], cwd=tmp_path, check=True)
    run(tmp_path / "a.tar", tmp_path / "out")
    assert [text for _, text, _ in stored(tmp_path / "out")] == ["good"]
    assert [(reason, detail[:25]) for _, reason, detail in dropped(tmp_path / "out")] == [
        ("malformed row", "its member big.jpg is a s"), ("malformed row", "its member link.jpg is a "),
    ]  # fmt: skip


def test_captions_of_dropped_rows_are_not_counted(tmp_path):
    names = write_images(tmp_path, 2)
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    rows = [
        (names[0], "dog " * 75),
        (names[1], "dog " * 76),
        ("bad.jpg", "dog " * 99),
        ("no.jpg", "y"),
    ]
    said = run(write_csv(tmp_path / "t.csv", [("image", "caption"), *rows]), tmp_path / "out")
    assert "Captions: 2, of which 2 are distinct.\n  1 (50.0%) have more than 77 tokens" in said

"""Damages of evaluation tasks: `BREAKS` are visible in the data itself, `LOCKED` only to the lock.

Each is a task, what damages its folder, and a pattern of the message.
"""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.shards import starts, write_members

FLICKR = "retrieval/flickr_1k_test_image_text_retrieval"
COCO = "retrieval/mscoco_2014_5k_test_image_text_retrieval"
V2, FMOW, WINOGAVIL = "imagenetv2", "wilds/fmow", "misc/winogavil"
FOLDERS = {
    V2: "wds_imagenetv2_test",
    FMOW: "wds_wilds-fmow_test",
    FLICKR: "flickr_1k_test_image_text_retrieval",
    COCO: "wds_retrieval-mscoco_2014_5k_test_image_text_retrieval_test",
    WINOGAVIL: "winogavil",
}
TEMPLATES = "zeroshot_classification_templates.txt"
PARTS = ("data/test-00000-of-00002.parquet", "data/test-00001-of-00002.parquet")


def members(tar):
    with tarfile.open(tar) as opened:
        return {member.name: opened.extractfile(member).read() for member in opened.getmembers()}


def edit_tar(folder, changes):
    """Change members of the first tar; those that are None are dropped."""
    changed = {**members(folder / "test/0.tar"), **changes}
    write_members(folder / "test/0.tar", ((name, body) for name, body in changed.items() if body is not None))


def join_tars(folder):
    first, second = folder / "test/0.tar", folder / "test/1.tar"
    first.write_bytes(first.read_bytes() + second.read_bytes())
    second.unlink()
    (folder / "test/nshards.txt").write_text("1\n")


def swap_two_images(folder):
    """Swap two images: every image is valid, but two have wrong labels."""
    bodies = members(folder / "test/0.tar")
    first, second = (name for name in bodies if name.startswith(("s0000001.", "s0000005.")) and name[-4:] != ".cls")
    edit_tar(folder, {first: bodies[second], second: bodies[first]})


def edit_groups(folder, value):
    """Give a sample a group that is none."""
    row = np.load(io.BytesIO(members(folder / "test/0.tar")["s0000003.npy"])).astype(np.float64)
    row[0] = value
    np.save(buffer := io.BytesIO(), row)
    edit_tar(folder, {"s0000003.npy": buffer.getvalue()})


def add_links(folder):
    with tarfile.open(folder / "test/0.tar", "a") as tar:
        for suffix in ("cls", "jpg"):  # a whole sample of links would be invisible
            link = tarfile.TarInfo(f"s0000099.{suffix}")
            link.type, link.linkname = tarfile.LNKTYPE, f"s0000001.{suffix}"
            tar.addfile(link)


def edit_csv(folder, edit):
    path = folder / "test.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    edit(rows)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def drop_candidate(row, *, associated):
    names, truth = json.loads(row["candidates"]), json.loads(row["associations"])
    names.remove(next(name for name in names if (name in truth) == associated))
    row["candidates"] = json.dumps(names)


def without_image(folder):
    with zipfile.ZipFile(folder / "images.zip") as archive:
        images = {name: archive.read(name) for name in archive.namelist()}
    images.popitem()
    with zipfile.ZipFile(folder / "images.zip", "w") as archive:
        for name, body in images.items():
            archive.writestr(name, body)


def edit_rows(folder, edit):
    rows = pq.read_table(folder / PARTS[1]).to_pylist()
    edit(rows)
    pq.write_table(pa.Table.from_pylist(rows), folder / PARTS[1])


def say_split(folder):
    for path in sorted((folder / "data").iterdir()):
        table = pq.read_table(path)
        pq.write_table(table.append_column("split", pa.array(["test"] * (len(table) - 1) + ["train"])), path)


def cut_file(name, size, folder):
    os.truncate(folder / name, size)


def write(name, text, folder):
    (folder / name).write_text(text)


def renamed(folder, *names):
    for old, new in zip(PARTS, names, strict=False):
        (folder / old).rename(folder / "data" / new)


BREAKS: list[tuple[str, Callable[[Path], object], str]] = [
    (V2, join_tars, "two archives were joined"),
    (V2, partial(cut_file, "test/1.tar", 1_300), "1.tar .* cut short"),
    (V2, lambda f: cut_file("test/1.tar", starts(f / "test/1.tar")[4], f), "1.tar .*no end-of-archive mark"),
    (V2, lambda f: shutil.copy(f / "test/0.tar", f / "test/2.tar"), "nshards.txt says 2 shards, too many: 2.tar"),
    (V2, lambda f: (f / "test/2.tar").symlink_to("gone.tar"), "nshards.txt says 2 shards, too many: 2.tar"),
    (V2, lambda f: (f / "test/1.tar").write_bytes(bytes(10_240)), "holds no samples at all"),
    (V2, lambda f: write_members(f / "test/1.tar", members(f / "test/0.tar").items(), date=1_700_000_000), "is a copy"),
    (V2, lambda f: (f / "test/1.tar").open("ab").write(bytes(1 << 20)), "was its download not finished"),
    (V2, lambda f: (f / "test/1.tar").unlink(), "nshards.txt says 2 shards, missing: 1.tar"),
    (V2, lambda f: (f / "test/nshards.txt").unlink(), "Cannot read .*nshards.txt"),
    (V2, partial(write, "test/nshards.txt", "9" * 5_000), "must hold the number of shards"),
    (V2, partial(write, "test/nshards.txt", "0" * 5_000 + "1"), "must hold the number of shards"),
    (V2, lambda f: (f / "classnames.txt").unlink(), "Cannot read .*classnames.txt"),
    (V2, lambda f: (f / "classnames.txt").write_text("one\n", "utf-16"), "classnames.txt .* is not UTF-8, .*iconv"),
    (V2, partial(write, "classnames.txt", "one\ntwo\n"), "labels run from 0 to 4, but there are 2 class names"),
    (V2, partial(write, TEMPLATES, "a photo\n"), "needs the place of"),
    (V2, lambda f: edit_tar(f, {"s0000001.cls": b"cat"}), "holds b'cat', not a class number"),
    (V2, lambda f: edit_tar(f, {"s0000000.webp": None}), "s0000000 in .*0.tar has no image"),
    (V2, lambda f: edit_tar(f, {"s0000000.cls": None}), "s0000000 in .*0.tar has no .cls"),
    (V2, lambda f: edit_tar(f, {"s0000000.png": b""}), "it holds sample s0000000 twice"),
    (FMOW, lambda f: edit_tar(f, {"s0000000.npy": None}), "s0000000 in .*0.tar has no .npy"),
    (V2, lambda f: write_members(f / "test/0.tar", [("a.cls", b"1"), ("a.CLS", b"1")]), "duplicate file name"),
    (V2, lambda f: write_members(f / "test/0.tar", [("a", b"1")]), "a is of no sample, its name has no suffix"),
    (V2, add_links, "s0000099.cls is a link or a sparse file"),
    (FMOW, lambda f: edit_tar(f, {"s0000003.npy": bytes(99)}), ".npy is damaged"),
    *((FMOW, partial(edit_groups, value=v), "must be whole and not negative") for v in (np.nan, -1)),
    (FLICKR, lambda f: (f / PARTS[1]).unlink(), "say 2 parts, without number 1"),
    (FLICKR, lambda f: shutil.copy(f / PARTS[0], f / PARTS[1]), "would count twice"),
    (FLICKR, lambda f: ((f / PARTS[1]).unlink(), os.mkfifo(f / PARTS[1])), "parquet is no file: reading a pipe"),
    (FLICKR, partial(cut_file, PARTS[1], 200), "not a complete parquet file"),
    (FLICKR, lambda f: renamed(f, "test-00001-of-00003.parquet"), "say 2 and 3 parts"),
    (FLICKR, lambda f: renamed(f, "0000.parquet", "0002.parquet"), "say 3 parts, without number 1"),
    (FLICKR, lambda f: edit_rows(f, lambda rows: rows[3].update(caption=["a", " ", "c"])), "has an empty caption"),
    (FLICKR, lambda f: edit_rows(f, lambda rows: rows.append(rows[2])), "would count twice"),
    (FLICKR, say_split, "is of the split 'train', and 'test' is scored"),
    (COCO, lambda f: edit_tar(f, {"s0000002.txt": b"one\n\nlast"}), "no caption or a blank line"),
    *(
        (WINOGAVIL, partial(edit_csv, edit=edit), message)
        for edit, message in (
            (lambda rows: drop_candidate(rows[2], associated=True), "9 different candidates and 4 assoc"),
            (lambda rows: drop_candidate(rows[2], associated=False), "9 different candidates .*has 5, 6, 10, 12"),
            (lambda rows: [row.update(num_candidates="10") for row in rows], "row 1 .* num_candidates says 10"),
            (lambda rows: rows.append(rows[2]), "are the same, which would count"),
            (lambda rows: rows[2].update(associations='["unheard of"]'), "1 associations, 0 of them among its"),
            (lambda rows: rows[1].update(candidates='["thing1", "thi'), "row 2 of"),
        )
    ),
    (WINOGAVIL, partial(cut_file, "images.zip", 3_000), "images.zip is damaged or cut short"),
    (WINOGAVIL, without_image, "in none of its archives"),
    (WINOGAVIL, partial(write, "test.csv", "name,text\nx,y\n"), "exactly one CSV with the columns candidates, cue"),
]
LOCKED: list[tuple[str, Callable[[Path], object], str]] = [
    (FLICKR, lambda f: ((f / PARTS[1]).unlink(), renamed(f, "test-00000-of-00001.parquet")), "3 files .* are new, mi"),
    (V2, swap_two_images, r"1 files \(test/0.tar\) are new, .* than when it was first evaluated"),
    (V2, shutil.rmtree, "its data is no longer there"),
    (V2, lambda f: shutil.copytree(f, f.parent / "more" / "imagenetv2"), "imagenetv2 has 2 folders"),
]

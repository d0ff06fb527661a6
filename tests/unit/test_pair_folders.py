"""Folders of images: links, splits, classes, and pictures that need a package."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image, ImageFile

from pipeline.errors import UserError
from pipeline.pictures import pixels
from tests.pair_files import dropped, picture, stored, write_csv, write_images
from tests.shards import write_tar
from tests.unit.test_pair_forms import parquet, run, tree


def test_folders_that_are_links_are_read(tmp_path):
    """Regression test: tars and parquet files below them were passed over."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "in").mkdir()
    write_tar(tmp_path / "elsewhere/0.tar", [{"jpg": picture(k), "txt": b"x"} for k in range(3)])
    (tmp_path / "in/sub").symlink_to(tmp_path / "elsewhere")
    run(tmp_path / "in", tmp_path / "out")
    assert len(stored(tmp_path / "out")) == 3


def test_a_file_is_one_sample_by_all_of_its_names(tmp_path):
    """Regression test: an image was its own negative when a link to its folder was beside it."""
    for name in write_images(tmp_path / "in/real", 2):
        (tmp_path / "in/real" / name).with_suffix(".txt").write_text(f"of {name}")
    (tmp_path / "in/alias").symlink_to(tmp_path / "in/real")
    run(tmp_path / "in", tmp_path / "out")
    assert [about["captions"] for _, _, about in stored(tmp_path / "out")] == [["of 000.jpg"], ["of 001.jpg"]]
    rows = [("image", "caption"), ("real/000.jpg", "a"), ("alias/000.jpg", "b"), ("real/001.jpg", "c")]
    run(write_csv(tmp_path / "in/t.csv", rows), tmp_path / "table")
    assert [about["captions"] for _, _, about in stored(tmp_path / "table")] == [["a", "b"], ["c"]]


def test_split_is_refused_where_nothing_has_splits(tmp_path):
    for number, name in enumerate(write_images(tmp_path / "loose", 2)):
        (tmp_path / "loose" / name).with_suffix(".txt").write_text(str(number))
    coco = {"images": [{"id": 1, "file_name": "000.jpg"}], "annotations": [{"image_id": 1, "caption": "x"}]}
    (tmp_path / "coco.json").write_bytes(tree(coco))
    (tmp_path / "list.json").write_bytes(tree([{"image": "loose/000.jpg", "caption": "x"}]))
    (tmp_path / "a.parquet").write_bytes(parquet(tmp_path, image=[picture(1)], caption=["a"]))
    for source, options in (("coco.json", ()), ("list.json", ()), ("loose", ()), ("a.parquet", ()),
                            ("loose", ("--caption-template", "a {class}"))):  # fmt: skip
        with pytest.raises(UserError, match=r"--split does not apply to "):
            run(tmp_path / source, tmp_path / "out", "--split", "train", *options)


def test_templates_need_classes(tmp_path):
    write_images(tmp_path / "in", 1)
    table = write_csv(tmp_path / "t.csv", [("image", "caption"), ("in/000.jpg", "x")])
    for source, template, message in (
        (tmp_path / "in", "a {klass}", r"'a \{klass\}' has no \{class\}"),
        (tmp_path / "in", "a {class}", "has no folders with images"),
        (
            table,
            "a {class}",
            r"--caption-template does not apply to this source, which is of kind table, but to images",
        ),
    ):
        with pytest.raises(UserError, match=message):
            run(source, tmp_path / "out", "--caption-template", template)
    (tmp_path / "in/cat").mkdir()
    (tmp_path / "in/cat/1.jpg").write_bytes(picture(1))
    said = run(tmp_path / "in", tmp_path / "out", "--caption-template", "a {class}")
    assert "classes: 1 (cat)" in said
    assert "in no caption" not in said
    assert dropped(tmp_path / "out") == [["000.jpg", "no caption", "it is in no folder of a class"]]
    (tmp_path / "in/cat").rename(tmp_path / "in/black")
    (tmp_path / "animals").mkdir()
    (tmp_path / "in").rename(tmp_path / "animals/cat")
    said = run(tmp_path / "animals", tmp_path / "nested", "--caption-template", "a {class}")
    assert "in no caption: the folders above, 1 (cat); {parent} in a template takes their names" in said


def test_captions_of_another_kind_are_named(tmp_path):
    for number, name in enumerate(write_images(tmp_path / "in", 5)):
        beside = (tmp_path / "in" / name).with_suffix(".txt" if number < 3 else ".json")
        beside.write_text("a cup" if number < 3 else '{"caption": "a mug", "other": "x"}')
    said = run(tmp_path / "in", tmp_path / "out")
    assert "captions: txt (3 of 5 samples looked at have both; 2 others have json:caption;" in said


def test_heic_needs_a_package_which_is_named(tmp_path, monkeypatch):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "0.heic").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(99))
    (folder / "1.avif").write_bytes(picture(1, kind="AVIF"))
    for k in range(2):
        (folder / f"{k}.txt").write_text("x")
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    pixels._formats.cache_clear()
    said = run(folder, tmp_path / "without")
    assert "unsupported format: 0.heic (HEIC, which needs: pip install 'neuclip[heif]')" in said
    assert len(stored(tmp_path / "without")) == 1
    opener = SimpleNamespace(register_heif_opener=lambda: register_stub(monkeypatch))
    monkeypatch.setitem(sys.modules, "pillow_heif", opener)
    pixels._formats.cache_clear()
    run(folder, tmp_path / "with")
    assert len(stored(tmp_path / "with")) == 2
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

"""`neuclip pairs`: every kind of source gives the same kind of shards; every dropped row has a recorded reason."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from data_prep.dataset import canonical_tar
from data_prep.pairs.convert import ImageOptions, convert
from data_prep.pairs.find_source import SourceOptions
from data_prep.pairs.make_shards import DROPPED_NAME, Conversion, PairsConfig, make_shards
from jobs.pairs import command
from pipeline.data.shards.manifest_format import load_manifest
from pipeline.errors import UserError

ROOT = Path(__file__).parents[2]


def picture(number: int, *, size: tuple[int, int] = (40, 30), kind: str = "JPEG", **options: Any) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


def write_images(folder: Path, count: int) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{number:03d}.jpg" for number in range(count)]
    for number, name in enumerate(names):
        (folder / name).write_bytes(picture(number))
    return names


def write_csv(path: Path, rows: Sequence[Sequence[str]], *, delimiter: str = ",") -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    return path


def convert_all(source: Path | str, output: Path, *, image: ImageOptions | None = None, **options: Any) -> Conversion:
    processes, shard_size = options.pop("processes", 1), options.pop("shard_size", 4)
    config = PairsConfig(str(source), output, options=SourceOptions(**options), image=image or ImageOptions(),
                         processes=processes, shard_size=shard_size)  # fmt: skip
    return make_shards(config)


def stored(output: Path) -> list[tuple[bytes, str, dict[str, Any]]]:
    """Return image, caption and JSON of every sample, in manifest order."""
    manifest = load_manifest(output)
    parts = [p for shard in manifest.shards for _, p in canonical_tar.samples(manifest.url(shard))]
    return [(canonical_tar.picture(p), p["txt"].decode(), json.loads(p["json"])) for p in parts]


def dropped(output: Path) -> list[list[str]]:
    return [line.split("\t") for line in (output / DROPPED_NAME).read_text().splitlines()[1:]]


def digests(output: Path) -> dict[str, str]:
    names = [*output.rglob("*.tar"), *output.glob("meta/*"), output / "manifest.json", output / DROPPED_NAME]
    return {str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest() for path in names}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    names = write_images(tmp_path / "mine" / "images", 10)
    rows = [(f"images/{name}", f"picture {number}") for number, name in enumerate(names)]
    return write_csv(tmp_path / "mine" / "pairs.csv", [("file_name", "text"), *rows])


def check_ten(output: Path, outcome: Conversion) -> None:
    assert (outcome.manifest.n, dict(outcome.manifest.failures)) == (10, {})
    assert [(image, text) for image, text, _ in stored(output)] == [(picture(n), f"picture {n}") for n in range(10)]


def test_a_csv_in_a_folder(table: Path, tmp_path: Path) -> None:
    outcome = convert_all(table.parent, tmp_path / "out")
    check_ten(tmp_path / "out", outcome)
    assert [shard.samples for shard in outcome.manifest.shards] == [4, 4, 2]
    assert stored(tmp_path / "out")[3][2] == {"captions": ["picture 3"], "source": "pairs.csv:5"}


@pytest.mark.parametrize("delimiter", ["\t", ";", "|"])
def test_other_delimiters_and_named_columns(table: Path, tmp_path: Path, delimiter: str) -> None:
    rows = [("where", "what", "more, or less")] + [(f"images/{n:03d}.jpg", f"picture {n}", "x") for n in range(10)]
    path = write_csv(table.parent / ("odd.tsv" if delimiter == "\t" else "odd.csv"), rows, delimiter=delimiter)
    check_ten(tmp_path / "out", make(path, tmp_path / "out", image="where", caption="what"))


def make(source: Path | str, output: Path, **options: Any) -> Conversion:
    """Convert with `image` as the name of the image column."""
    return make_shards(PairsConfig(str(source), output, options=SourceOptions(**options), shard_size=4))


def test_a_table_without_a_header(table: Path, tmp_path: Path) -> None:
    rows = [(f"picture {n}", f"{n:03d}.jpg") for n in range(10)]
    path = write_csv(tmp_path / "bare.tsv", rows, delimiter="\t")
    check_ten(
        tmp_path / "out", make(path, tmp_path / "out", header=("caption", "image"), images=table.parent / "images")
    )


def test_jsonl_with_several_captions(table: Path, tmp_path: Path) -> None:
    path = table.parent / "pairs.jsonl"
    lines = [json.dumps({"image": f"images/{n:03d}.jpg", "captions": [f"picture {n}", f"no. {n}"]}) for n in range(10)]
    path.write_text("\n".join([*lines, "{broken", "[1]", '{"image": 3, "captions": "x"}']))
    outcome = make(path, tmp_path / "out")
    assert (outcome.manifest.n, outcome.several_captions) == (10, 10)
    assert stored(tmp_path / "out")[7][2]["captions"] == ["picture 7", "no. 7"]
    assert [(place, reason) for place, reason, _ in dropped(tmp_path / "out")] == [
        ("pairs.jsonl:11", "malformed row"), ("pairs.jsonl:12", "malformed row"), ("pairs.jsonl:13", "malformed row"),
    ]  # fmt: skip


def test_adjacent_rows_of_the_same_image_become_one_sample(table: Path, tmp_path: Path) -> None:
    rows = [(f"images/{n // 2:03d}.jpg", f"picture {n}") for n in range(20)]
    path = write_csv(table.parent / "five.csv", [("image", "caption"), *rows])
    outcome = make(path, tmp_path / "out")
    assert (outcome.manifest.n, outcome.several_captions) == (10, 10)
    assert stored(tmp_path / "out")[2][2]["captions"] == ["picture 4", "picture 5"]


def test_text_files_next_to_the_images(tmp_path: Path) -> None:
    for number, name in enumerate(write_images(tmp_path / "in" / "sub", 10)):
        (tmp_path / "in" / "sub" / name).with_suffix(".txt").write_text(f"picture\n {number}\n")
    (tmp_path / "in" / "alone.png").write_bytes(picture(0, kind="PNG"))
    outcome = convert_all(tmp_path / "in", tmp_path / "out")
    assert (outcome.manifest.n, dict(outcome.manifest.failures)) == (10, {"no caption": 1})
    assert dropped(tmp_path / "out") == [["alone.png", "no caption", "no alone.txt beside it"]]
    assert stored(tmp_path / "out")[4][1] == "picture 4"


def test_coco(tmp_path: Path) -> None:
    names = write_images(tmp_path / "coco" / "train2017", 10)
    images = [{"id": 100 + n, "file_name": name} for n, name in enumerate(names)]
    notes = [{"image_id": 100 + n, "caption": f"{word} {n}\n"} for word in ("picture", "other") for n in range(9)]
    (tmp_path / "coco" / "annotations").mkdir()
    path = tmp_path / "coco" / "annotations" / "captions_train2017.json"
    path.write_text(json.dumps({"images": images, "annotations": [*notes, {"image_id": 7, "caption": "lost"}]}))
    outcome = convert_all(path, tmp_path / "out")
    assert (outcome.manifest.n, outcome.several_captions) == (9, 9)
    assert dict(outcome.manifest.failures) == {"no caption": 1, "image file missing": 1}
    assert stored(tmp_path / "out")[3][2]["captions"] == ["picture 3", "other 3"]
    with pytest.raises(UserError, match=r"name the annotations, such as .*captions_train2017.json"):
        convert_all(tmp_path / "coco", tmp_path / "other")


def test_parquet_and_datasets(tmp_path: Path) -> None:
    import datasets

    rows = {
        "image": [picture(n) for n in range(10)],
        "caption": [f"picture {n}" for n in range(10)],
        "n": list(range(10)),
    }
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


def test_a_folder_of_parquet_files_with_lists_of_captions(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "in").mkdir()
    for part, numbers in (("a", range(6)), ("b", range(6, 10))):
        columns = {"jpg": [picture(n) for n in numbers], "texts": [[f"picture {n}", "", "more"] for n in numbers]}
        pq.write_table(pa.table(columns), tmp_path / "in" / f"{part}.parquet", row_group_size=4)
    outcome = convert_all(tmp_path / "in", tmp_path / "out", shard_size=3)
    assert (outcome.manifest.n, outcome.several_captions) == (10, 10)
    assert [text for _, text, _ in stored(tmp_path / "out")] == [f"picture {n}" for n in range(10)]
    pq.write_table(pa.table({"other": [1]}), tmp_path / "in" / "c.parquet")
    with pytest.raises(UserError, match=r"c.parquet lacks columns of .*a.parquet: jpg, texts"):
        convert_all(tmp_path / "in", tmp_path / "again")


@pytest.mark.parametrize("member", ["txt", "json"])
def test_webdataset_tars(tmp_path: Path, member: str) -> None:
    (tmp_path / "in").mkdir()
    for part, numbers in enumerate((range(7), range(7, 10))):
        with tarfile.open(tmp_path / "in" / f"{part}.tar", "w", format=tarfile.PAX_FORMAT) as archive:
            for number in numbers:
                text = f"picture {number}"
                body = text.encode() if member == "txt" else json.dumps({"caption": text, "n": number}).encode()
                for suffix, payload in (("jpg", picture(number)), (member, body)):
                    info = tarfile.TarInfo(f"deep/{number:03d}é.{suffix}")
                    info.size = len(payload)
                    archive.addfile(info, io.BytesIO(payload))
    check_ten(tmp_path / "out", convert_all(tmp_path / "in", tmp_path / "out"))
    assert stored(tmp_path / "out")[8][2]["source"] == "1.tar:deep/008é"
    (tmp_path / "in" / "2.tar").write_bytes((tmp_path / "in" / "0.tar").read_bytes()[:30_000])
    with pytest.raises(UserError, match=r"2.tar is not a complete tar, after \d+ samples .*: fetch it again"):
        convert_all(tmp_path / "in", tmp_path / "again")


def test_every_dropped_row_is_recorded_with_position_and_reason(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    write_images(folder, 3)
    (folder / "empty.jpg").touch()
    (folder / "cut.jpg").write_bytes(picture(1)[:-200])
    (folder / "page.jpg").write_bytes(b"<html>not found</html>")
    (folder / "noise.png").write_bytes(picture(2, kind="PNG")[:60] + bytes(200) + b"IEND")
    rows = [("000.jpg", "fine"), ("lost.jpg", "x"), ("empty.jpg", "x"), ("cut.jpg", "x"), ("page.jpg", "x"),
            ("noise.png", "x"), ("001.jpg", "  "), ("002.jpg", "three", "fields")]  # fmt: skip
    path = write_csv(folder / "pairs.csv", [("image", "caption"), *rows])  # type: ignore[list-item]
    with path.open("ab") as file:
        file.write(b"001.jpg,caf\xe9\r\n")
    outcome = make(path, tmp_path / "out")
    found = {place: reason for place, reason, _ in dropped(tmp_path / "out")}
    assert outcome.manifest.n == 1
    assert found == {
        "pairs.csv:3": "image file missing", "pairs.csv:4": "empty", "pairs.csv:5": "truncated",
        "pairs.csv:6": "not an image", "pairs.csv:7": "undecodable", "pairs.csv:8": "no caption",
        "pairs.csv:9": "malformed row", "pairs.csv:10": "caption is not UTF-8",
    }  # fmt: skip
    assert outcome.manifest.attempted == 9


def test_images_are_rotated_upright_downscaled_and_converted() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be rotated by 90 degrees
    turned = convert(picture(0, size=(80, 40), exif=exif), ImageOptions())
    assert (turned.width, turned.height) == (40, 80)
    small = convert(picture(0, size=(80, 40)), ImageOptions(size=20))
    assert (small.suffix, small.width, small.height) == ("jpg", 40, 20)
    assert Image.open(io.BytesIO(small.body)).size == (40, 20)
    whole = picture(0, size=(80, 40))
    assert convert(whole, ImageOptions(size=40)).body == whole  # never enlarged, never re-encoded needlessly
    assert convert(picture(0, kind="GIF"), ImageOptions()).suffix == "jpg"
    assert convert(picture(0, kind="WEBP"), ImageOptions()).suffix == "webp"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_grey_is_scaled_when_it_is_encoded_again(kind: str) -> None:
    """Pillow's own conversion clips it to white."""
    buffer = io.BytesIO()
    Image.fromarray(np.full((60, 80), 128 * 257, np.uint16)).save(buffer, kind)
    stored_image = convert(buffer.getvalue(), ImageOptions(size=32))
    with Image.open(io.BytesIO(stored_image.body)) as image:
        assert np.abs(np.asarray(image.convert("RGB")).astype(int) - 128).max() <= 1


def test_several_processes_and_a_resumed_run_write_the_same_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    names = write_images(folder, 60)
    (folder / names[33]).unlink()
    path = write_csv(folder / "pairs.csv", [("image", "caption"), *((name, f"no. {name}") for name in names)])
    convert_all(path, tmp_path / "whole", shard_size=5)
    convert_all(path, tmp_path / "two", shard_size=5, processes=2)
    assert digests(tmp_path / "two") == digests(tmp_path / "whole")
    arguments = [str(path), str(tmp_path / "killed"), "--shard-size", "5", "--processes", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", SLOW, *arguments], env=environment, cwd=tmp_path)
    deadline = time.monotonic() + 60
    while len(list((tmp_path / "killed" / "meta").glob("*.json"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = len(list((tmp_path / "killed" / "meta").glob("*.json")))
    assert 3 <= before < 12
    assert not (tmp_path / "killed" / "manifest.json").exists()
    convert_all(path, tmp_path / "killed", shard_size=5)
    assert digests(tmp_path / "killed") == digests(tmp_path / "whole")


# The command with a slowed-down conversion, so that it can be killed halfway.
SLOW = """
import sys, time
from data_prep.pairs import make_shards
real = make_shards.convert
def slow(*args):
    time.sleep(0.05)
    return real(*args)
make_shards.convert = slow
from jobs.pairs import command
command(sys.argv[1:])
"""


def test_invalid_sources_and_options_are_rejected_with_what_to_do(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    urls = write_csv(tmp_path / "urls.csv", [("url", "caption"), ("http://x/1.jpg", "one")])
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (tmp_path / "nowhere", {}, "There is no file or folder .*A source is a CSV"),
        (urls, {}, "column 'url'.*neuclip download output=FOLDER source.table=FILE source.url=url"),
        (table, {"caption": "txet"}, r"no column 'txet' \(--caption\).*The nearest is text"),
        (table, {"image": "text", "caption": "file_name"}, "None of the first 10 images .* exists, such as"),
        (table, {"split": "train"}, "--split does not apply to this source"),
        (table.parent / "images", {}, "has images, but no captions"),
        (
            write_csv(tmp_path / "odd.csv", [("a", "b"), ("1", "2")]),
            {},
            "usual name for the image: name it with --image",
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
    with pytest.raises(UserError, match="source_bytes was"):
        make(table, out)


def test_no_manifest_is_written_without_usable_rows(tmp_path: Path) -> None:
    write_images(tmp_path / "in", 1)
    path = write_csv(tmp_path / "in" / "p.csv", [("image", "caption"), ("000.jpg", ""), ("lost.jpg", "x")])
    with pytest.raises(
        UserError, match=r"None of the 2 rows .* gave a sample: .*1 rows: no caption \(first: p.csv:2\)"
    ):
        make(path, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_the_command_reports_the_result_and_how_to_train(table: Path, tmp_path: Path) -> None:
    (table.parent / "images" / "004.jpg").unlink()
    done = CliRunner().invoke(command, [str(table), str(tmp_path / "out"), "--processes", "1"])
    assert done.exit_code == 0, done.output
    assert "9 of 10 rows gave a sample: 1 shards" in done.output
    assert "dropped        1  image file missing: pairs.csv:6\n" in done.output
    assert f"neuclip train --recipe own data.sources={tmp_path / 'out'} output=runs/mine" in done.output


def test_training_on_a_source_names_the_command(table: Path, tmp_path: Path) -> None:
    (tmp_path / "coco.json").write_text('{"images": []}')
    for source in (table, table.parent, table.parent / "images", tmp_path / "coco.json"):
        with pytest.raises(UserError, match=rf"`neuclip pairs {source} OUTPUT`"):
            load_manifest(source)
    (tmp_path / "tars").mkdir()
    (tmp_path / "tars" / "0.tar").touch()
    with pytest.raises(UserError, match=r"`neuclip manifest .*tars`"):
        load_manifest(tmp_path / "tars")
    with pytest.raises(UserError, match=r"no such file or folder.*`neuclip pairs SOURCE OUTPUT`"):
        load_manifest("someone/pictures")

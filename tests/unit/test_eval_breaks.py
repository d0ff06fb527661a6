"""A damaged task gets no score, other tasks keep theirs, and no aggregate is averaged over fewer tasks.

Each case damages a copy of a suite that already has results, so that a stale score would be found. Damage that is
visible in the data itself is evaluated without the lock, as in a first evaluation; the rest is only found by the lock.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from jobs.evaluate import command
from pipeline.evaluation.datasets.datacomp import AGGREGATES, TASKS
from tests.checkpoints import save_checkpoint
from tests.evaluation_suite import write_association, write_classification, write_retrieval
from tests.shards import write_members

FLICKR = "retrieval/flickr_1k_test_image_text_retrieval"
COCO = "retrieval/mscoco_2014_5k_test_image_text_retrieval"
FOLDERS = {
    "imagenetv2": "wds_imagenetv2_test",
    "wilds/fmow": "wds_wilds-fmow_test",
    FLICKR: "flickr_1k_test_image_text_retrieval",
    COCO: "wds_retrieval-mscoco_2014_5k_test_image_text_retrieval_test",
    "misc/winogavil": "winogavil",
}


@dataclass(frozen=True)
class Break:
    """Damage to a task's folder. The message must contain `seen`; `locked` damage is detected only by the lock."""

    key: str
    damage: Callable[[Path], object]
    seen: str
    locked: bool = False


def header_of(path: Path, number: int) -> int:
    with tarfile.open(path) as tar:
        return tar.getmembers()[number].offset


def zero(path: Path, start: int, size: int) -> None:
    body = bytearray(path.read_bytes())
    body[start : start + size] = bytes(len(body[start : start + size]))
    path.write_bytes(bytes(body))


def rewrite_tar(path: Path, change: Callable[[str, bytes], bytes | None], *, date: int = 0) -> None:
    """Rewrite a tar with changed members; a member is dropped if `change` returns None."""
    with tarfile.open(path) as tar:
        members = [(member.name, tar.extractfile(member).read()) for member in tar.getmembers()]  # type: ignore[union-attr]
    changed = ((name, change(name, body)) for name, body in members)
    write_members(path, ((name, body) for name, body in changed if body is not None), date=date)


def join_tars(folder: Path) -> None:
    first, second = folder / "test/0.tar", folder / "test/1.tar"
    first.write_bytes(first.read_bytes() + second.read_bytes())
    second.unlink()
    (folder / "test/nshards.txt").write_text("1\n")


def cut_after_zeros(folder: Path) -> None:
    """Simulate a download that ended after a member that ends in zeros, as raw images and arrays do."""
    path = folder / "test/1.tar"
    rewrite_tar(path, lambda name, body: body if name.endswith(".cls") else body + bytes(2048))
    with tarfile.open(path) as tar:
        last = tar.getmembers()[9]
    end = last.offset_data + -(-last.size // 512) * 512
    path.write_bytes(path.read_bytes()[:end])


def copy_with_new_date(folder: Path) -> None:
    shutil.copy(folder / "test/0.tar", folder / "test/1.tar")
    rewrite_tar(folder / "test/1.tar", lambda name, body: body, date=1_700_000_000)


def edit_csv(folder: Path, edit: Callable[[list[dict[str, str]]], object]) -> None:
    path = folder / "test.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    edit(rows)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def drop_candidate(row: dict[str, str], *, associated: bool) -> None:
    names, truth = json.loads(row["candidates"]), json.loads(row["associations"])
    names.remove(next(name for name in names if (name in truth) == associated))
    row["candidates"] = json.dumps(names)


def without_image(folder: Path) -> None:
    with zipfile.ZipFile(folder / "images.zip") as archive:
        images = {name: archive.read(name) for name in archive.namelist()}
    images.popitem()
    with zipfile.ZipFile(folder / "images.zip", "w") as archive:
        for name, body in images.items():
            archive.writestr(name, body)


def edit_caption(folder: Path, caption: list[str]) -> None:
    path = folder / "data/test-00001-of-00002.parquet"
    rows = pq.read_table(path).to_pylist()
    rows[3]["caption"] = caption
    pq.write_table(pq.read_table(path).from_pylist(rows), path)


def one_part_only(folder: Path) -> None:
    (folder / "data/test-00001-of-00002.parquet").unlink()
    (folder / "data/test-00000-of-00002.parquet").rename(folder / "data/test-00000-of-00001.parquet")


def swap_two_images(folder: Path) -> None:
    """Swap two images: every image is valid, but two have wrong labels."""
    bodies: dict[str, bytes] = {}
    rewrite_tar(folder / "test/0.tar", lambda name, body: bodies.setdefault(name, body))
    images = [name for name in bodies if not name.endswith(".cls")]
    swapped = {images[1]: bodies[images[5]], images[5]: bodies[images[1]]}
    rewrite_tar(folder / "test/0.tar", lambda name, body: swapped.get(name, body))


def damage_npy(folder: Path) -> None:
    path = folder / "test/1.tar"
    with tarfile.open(path) as tar:
        member = next(m for m in tar.getmembers() if m.name.endswith(".npy"))
    zero(path, member.offset_data, 8)


def edit_groups(folder: Path, value: float) -> None:
    """Give a sample a group that is none."""

    def change(name: str, body: bytes) -> bytes:
        if name != "s0000003.npy":
            return body
        row = np.load(io.BytesIO(body)).astype(np.float64)
        row[0] = value
        buffer = io.BytesIO()
        np.save(buffer, row)
        return buffer.getvalue()

    rewrite_tar(folder / "test/0.tar", change)


def npz_as_npy(folder: Path) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, row=np.array([1, 2, 3]))
    rewrite_tar(folder / "test/0.tar", lambda name, body: buffer.getvalue() if name == "s0000003.npy" else body)


def damage_deflated(folder: Path) -> None:
    """Compress the images, then damage the compressed data of all of them."""
    path = folder / "images.zip"
    with zipfile.ZipFile(path) as archive:
        images = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in images.items():
            archive.writestr(name, body + bytes(4096))
        places = [(member.header_offset + 30 + len(member.filename), member) for member in archive.infolist()]
    whole = bytearray(path.read_bytes())
    for place, _ in places:
        whole[place] = 0x07  # a block of a type that does not exist
    path.write_bytes(whole)


def add_candidate(row: dict[str, str]) -> None:
    names = json.loads(row["candidates"])
    names.append(next(name for name in (f"thing{k}" for k in range(16)) if name not in names))
    row["candidates"] = json.dumps(names)


def edit_rows(folder: Path, edit: Callable[[list[dict[str, object]]], object]) -> None:
    path = folder / "data/test-00001-of-00002.parquet"
    rows = pq.read_table(path).to_pylist()
    edit(rows)
    pq.write_table(pa.Table.from_pylist(rows), path)


def say_split(folder: Path) -> None:
    for path in sorted((folder / "data").iterdir()):
        table = pq.read_table(path)
        pq.write_table(table.append_column("split", pa.array(["test"] * (len(table) - 1) + ["train"])), path)


def second_folder(folder: Path) -> None:
    shutil.copytree(folder, folder.parent / "more" / "imagenetv2")


BREAKS = {
    "a parquet part is missing": Break(
        FLICKR, lambda f: (f / "data/test-00001-of-00002.parquet").unlink(), "1 of 2 parts"
    ),
    "zeros inside a tar": Break(
        "imagenetv2", lambda f: zero(f / "test/1.tar", header_of(f / "test/1.tar", 4), 2048), "zeros where a member"
    ),
    "zeros inside the tar of a retrieval task": Break(
        COCO, lambda f: zero(f / "test/0.tar", header_of(f / "test/0.tar", 2), 2048), "zeros where a member"
    ),
    "two tars joined": Break("imagenetv2", join_tars, "two archives were joined"),
    "a tar is cut where a member ends in zeros": Break("imagenetv2", cut_after_zeros, "no end-of-archive mark"),
    "more tars than nshards.txt says": Break(
        "imagenetv2", lambda f: shutil.copy(f / "test/0.tar", f / "test/2.tar"), "nshards.txt says 2 shards"
    ),
    "a tar without members": Break(
        "imagenetv2", lambda f: (f / "test/1.tar").write_bytes(bytes(10_240)), "holds no samples at all"
    ),
    "a shard is a copy of another": Break(
        "imagenetv2", lambda f: shutil.copy(f / "test/0.tar", f / "test/1.tar"), "it is a copy"
    ),
    "a shard is a copy of another with other dates": Break("imagenetv2", copy_with_new_date, "it is a copy"),
    "a tar ends in a megabyte of zeros": Break(
        "imagenetv2", lambda f: (f / "test/1.tar").open("ab").write(bytes(1 << 20)), "was its download not finished"
    ),
    "a shard is missing": Break("imagenetv2", lambda f: (f / "test/1.tar").unlink(), "1 of 2 shards are missing"),
    "a damaged npy": Break("wilds/fmow", damage_npy, ".npy is damaged"),
    "a parquet part is a copy": Break(
        FLICKR,
        lambda f: shutil.copy(f / "data/test-00000-of-00002.parquet", f / "data/test-00001-of-00002.parquet"),
        "would count twice",
    ),
    "an empty caption": Break(FLICKR, lambda f: edit_caption(f, ["a", " ", "c"]), "has an empty caption"),
    "no caption": Break(FLICKR, lambda f: edit_caption(f, []), "has an empty caption"),
    "a blank line of captions": Break(
        COCO,
        lambda f: rewrite_tar(f / "test/0.tar", lambda n, b: b + b"\n\nlast" if n == "s0000002.txt" else b),
        "no caption or a blank line",
    ),
    "a name of WinoGAViL is missing": Break(
        "misc/winogavil",
        lambda f: edit_csv(f, lambda rows: drop_candidate(rows[2], associated=True)),
        "is not among its",
    ),
    "another name of WinoGAViL is missing": Break(
        "misc/winogavil",
        lambda f: edit_csv(f, lambda rows: drop_candidate(rows[2], associated=False)),
        "has 9 candidates, but WinoGAViL's instances have 5, 6, 10, 12",
    ),
    "WinoGAViL has a candidate too many": Break(
        "misc/winogavil", lambda f: edit_csv(f, lambda rows: add_candidate(rows[2])), "has 11 candidates, but"
    ),
    "a group is NaN": Break("wilds/fmow", lambda f: edit_groups(f, float("nan")), "must be whole and not negative"),
    "a group is 0.5": Break("wilds/fmow", lambda f: edit_groups(f, 0.5), "must be whole and not negative"),
    "a group is -1": Break("wilds/fmow", lambda f: edit_groups(f, -1), "must be whole and not negative"),
    "a group has no int64": Break("wilds/fmow", lambda f: edit_groups(f, 1e300), "must be whole and not negative"),
    "a npy is an npz": Break("wilds/fmow", npz_as_npy, ".npy is damaged"),
    "a zip has damaged images": Break("misc/winogavil", damage_deflated, "images.zip is damaged (Error -3"),
    "a count of WinoGAViL is NaN": Break(
        "misc/winogavil",
        lambda f: edit_csv(f, lambda rows: [row.update(num_candidates="nan") for row in rows]),
        "has 5 candidates, but its num_candidates says nan",
    ),
    "a row of WinoGAViL is repeated": Break(
        "misc/winogavil", lambda f: edit_csv(f, lambda rows: rows.append(rows[2])), "are the same, which would count"
    ),
    "a row is repeated": Break(FLICKR, lambda f: edit_rows(f, lambda rows: rows.append(rows[2])), "would count twice"),
    "a row is of another split": Break(FLICKR, say_split, "is of the split 'train', and 'test' is scored"),
    "an association of WinoGAViL is unknown": Break(
        "misc/winogavil",
        lambda f: edit_csv(f, lambda rows: rows[2].update(associations='["unheard of"]')),
        "is not among its 10 candidates",
    ),
    "a list of WinoGAViL is damaged": Break(
        "misc/winogavil", lambda f: edit_csv(f, lambda rows: rows[1].update(candidates='["thing1", "thi')), "row 2 of"
    ),
    "an image of WinoGAViL is missing": Break("misc/winogavil", without_image, "in none of its archives"),
    "a row of WinoGAViL is missing": Break(
        "misc/winogavil",
        lambda f: edit_csv(f, lambda rows: rows.pop(4)),
        "another SHA-256 than when they were",
        locked=True,
    ),
    "a parquet part is missing and the other renamed": Break(FLICKR, one_part_only, "files are missing", locked=True),
    "two images are swapped": Break("imagenetv2", swap_two_images, "another SHA-256", locked=True),
    "a class name is edited": Break(
        "imagenetv2",
        lambda f: (f / "classnames.txt").write_text((f / "classnames.txt").read_text().replace("crane", "cranes")),
        "(classnames.txt)",
        locked=True,
    ),
    "the task is deleted": Break("imagenetv2", shutil.rmtree, "its data is no longer there", locked=True),
    "two folders hold the task": Break("imagenetv2", second_folder, "imagenetv2 has 2 folders"),
}


@dataclass(frozen=True)
class Whole:
    """The undamaged suite and its results."""

    checkpoint: Path
    suite: Path
    results: Path


def evaluate(checkpoint: Path, suite: Path, output: Path, *settings: str) -> Result:
    arguments = [str(checkpoint), "--suite", str(suite), "--output", str(output), "--device", "cpu"]
    return CliRunner().invoke(command, [*arguments, "workers=0", "micro_batch=16", *settings], standalone_mode=False)


def write_whole(root: Path) -> Path:
    """Write a suite on which every aggregate of the damaged tasks is complete, except the average of all 38."""
    for key in AGGREGATES["ImageNet & Variants"]:
        write_classification(root, TASKS[key], samples=22 if key in FOLDERS else 4)
    write_classification(root, TASKS["wilds/fmow"])
    write_retrieval(root, TASKS[FLICKR], layout="parquet")
    write_retrieval(root, TASKS[COCO], layout="webdataset")
    write_association(root, layout="csv+zip")
    return root


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    root = tmp_path_factory.mktemp("whole")
    found = Whole(save_checkpoint(root / "step-00000001", 0), write_whole(root / "suite"), root / "results")
    done = evaluate(found.checkpoint, found.suite, found.results)
    assert done.return_value == 0, done.output
    summary = json.loads((found.results / "summary.json").read_text())
    complete = [name for name, mean in summary["aggregates"].items() if mean["complete"]]
    assert complete == ["ImageNet & Variants", "Retrieval", "Retrieval (DataComp)", "ImageNet dist. shifts"]
    assert set(FOLDERS) <= set(summary["scores"])
    return found


@pytest.mark.parametrize("name", BREAKS)
def test_a_damaged_task_is_never_scored(name: str, whole: Whole, tmp_path: Path) -> None:
    broken = BREAKS[name]
    suite, results = tmp_path / "suite", tmp_path / "results"
    shutil.copytree(whole.suite, suite)
    shutil.copytree(whole.results, results)
    keys = set(json.loads((results / "summary.json").read_text())["scores"])
    if not broken.locked:
        (results / "suite.lock.json").unlink()
    broken.damage(suite / FOLDERS[broken.key])
    done = evaluate(whole.checkpoint, suite, results)
    assert done.exception is None
    assert done.return_value == 1
    assert f"{broken.key} " in next(line for line in done.output.splitlines() if "FAILED" in line)
    assert broken.seen in done.output
    summary = json.loads((results / "summary.json").read_text())
    assert list(summary["failures"]) == [broken.key]
    assert set(summary["scores"]) == keys - {broken.key}
    assert not (results / f"{TASKS[broken.key].stem}.json").exists()
    over_it = [mean for name, mean in summary["aggregates"].items() if broken.key in AGGREGATES[name]]
    assert over_it
    assert not any(mean["complete"] for mean in over_it)
    assert all(mean["score"] is None for mean in over_it)


def test_failure_reports_are_bit_identical(whole: Whole, tmp_path: Path) -> None:
    suite = tmp_path / "suite"
    shutil.copytree(whole.suite, suite)
    for name in ("two tars joined", "a damaged npy", "an empty caption", "an image of WinoGAViL is missing"):
        BREAKS[name].damage(suite / FOLDERS[BREAKS[name].key])
    with zipfile.ZipFile(suite / "winogavil/images.zip", "a") as archive:
        archive.writestr("images/x.jpg", b"no image")
    seen = []
    for number in range(2):
        assert evaluate(whole.checkpoint, suite, tmp_path / str(number)).return_value == 1
        seen.append((tmp_path / str(number) / "summary.json").read_bytes())
    assert seen[0] == seen[1]
    assert len(json.loads(seen[0])["failures"]) == 4

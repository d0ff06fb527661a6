"""Samples are removed from every kind of data set by one protocol; a kill at any step ends with the same bytes."""

# ruff: noqa: F811 (imported fixtures are requested by name)
from __future__ import annotations

import itertools
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from data_prep.dataset import canonical_tar, commit, removal
from data_prep.dataset.dataset_folder import Folder
from data_prep.dataset.shard_files import withdraw
from data_prep.dataset.verification import verify
from jobs.pairs import command as pairs_command
from jobs.verify import command as verify_command
from pipeline.data.shards.manifest_format import load_manifest
from pipeline.data.shards.storage import INDEX_FOLDER
from pipeline.data.shards.tar_reader import read_records
from pipeline.errors import UserError
from tests.ingested import contents, copied, in_a_fork, in_process, index, made, own_opener, site  # noqa: F401
from tests.pair_files import dropped, write_csv, write_images
from tests.shards import sample, write_members

ROWS, SHARD = 24, 6
NAMES = {"0000000001", "0000000003", "0000000008", *(f"{k:010d}" for k in range(12, 18))}
"""Samples of two shards, and all of a third."""
NOTE = "removal.pending"


def convert(root, source=None):
    options = [str(source or root.parent / "in"), "--output", str(root), "--shard-size", str(SHARD), "--processes", "1"]
    assert CliRunner().invoke(pairs_command, options, standalone_mode=False).exception is None


def of_pairs(root):
    source = root.parent / "in"
    write_images(source, ROWS)
    write_csv(source / "t.csv", [("image", "caption"), *((f"{k:03d}.jpg", f"caption {k}") for k in range(ROWS))])
    convert(root)


def write_tars(folder):
    folder.mkdir(parents=True)
    for first in range(0, ROWS, SHARD):
        members = [(f"{k:010d}.{suffix}", body) for k in range(first, first + SHARD)
                   for suffix, body in reversed(sample(k).items())]  # fmt: skip
        canonical_tar.write(folder / f"{first // SHARD:05d}.tar", members)


def foreign(root):
    write_tars(root / "shards")
    index(root)


def behind_links(root):
    """Shards in a linked folder, one of which is a link itself, and has a second name."""
    write_tars(root.parent / "disk")
    (root.parent / "other").mkdir()
    (root.parent / "disk/00000.tar").rename(root.parent / "other/first.tar")
    (root.parent / "disk/00000.tar").symlink_to("../other/first.tar")
    root.mkdir()
    (root / "shards").symlink_to("../disk")
    index(root)


@pytest.fixture
def build(request, tmp_path):
    """A folder with the data set, `data`, and what belongs to it."""
    if request.param == "download":
        return Path(request.getfixturevalue("copied")).parent
    globals()[request.param](tmp_path / "data")
    return tmp_path


def remove(root, names):
    return removal.remove(root, names, allow_outside=True)  # `behind_links` needs it, and the others do not mind


def check(root):
    """The data set is as its manifest says, each shard has an index, and those of former shards are deleted."""
    assert verify(root) == []
    assert len(list((root / INDEX_FOLDER).iterdir())) == len(load_manifest(root).shards)


KINDS = pytest.mark.parametrize("build", ["download", "of_pairs", "foreign", "behind_links"], indirect=True)


def keys(root):
    manifest = load_manifest(root)
    return [key for shard in manifest.shards for key, _ in canonical_tar.samples(manifest.url(shard))]


@KINDS
def test_a_removal_and_what_follows(build, tmp_path):
    root = build / "data"
    check(root)
    before, bodies = load_manifest(root), dict(canonical_tar.samples(root / "shards/00000.tar"))
    mine = [root / "shards/mine.tar.new", root / "shards/.mine.tmp", root / "x.tar.new"]
    for path in (*mine, root / "report.html"):
        path.write_text("not made by this program")
    killed = root / ("plan/work/rows.arrow" if Folder(root).is_converted else "staging/worker-0/00000.spool")
    if Folder(root).is_converted or Folder(root).is_download:
        killed.parent.mkdir(exist_ok=True)
        killed.touch()
    with pytest.raises(UserError, match="nothing would be left"):
        remove(root, {f"{k:010d}" for k in range(ROWS)})
    assert (load_manifest(root).digest, (root / "report.html").exists()) == (before.digest, True)
    done, after = remove(root, {*NAMES, "nobody"})
    assert not (root / "report.html").exists(), "it shows what was removed, also if the command is killed now"
    assert not killed.exists(), "it may hold what was removed"
    assert (done.samples, done.shards, done.missing) == (9, 3, ("nobody",))
    assert keys(root) == [key for k in range(ROWS) if (key := f"{k:010d}") not in NAMES]
    assert [shard.name for shard in after.shards] == [f"shards/0000{k}.tar" for k in (0, 1, 3)]
    assert (after.n, after.attempted, after.failures) == (15, 24, {"removed": 9})
    kept = dict(canonical_tar.samples(root / "shards/00000.tar"))
    assert all(kept[key] == bodies[key] for key in kept)
    check(root)
    assert remove(root, NAMES)[0].missing == (), "they are gone already"
    assert load_manifest(root).digest == after.digest
    assert all(path.exists() for path in mine)
    if (root / "plan/pairs.json").exists():  # the same command again changes nothing
        convert(root)
        assert load_manifest(root).digest == after.digest
        withdraw(Folder(root), 0)
        convert(root)
        assert load_manifest(root).digest == after.digest, "what was removed stays out of a shard that is made again"
        assert [reason for _, reason, _ in dropped(root)] == ["removed"] * 9


STEPS = [(commit, "flush"), (commit, "write_text"), (canonical_tar, "write"), (os, "fsync"), (Path, "replace"),
         (Path, "unlink")]  # fmt: skip


@pytest.mark.parametrize(
    ("build", "action"),
    [("download", "kill"), ("of_pairs", "kill"), ("behind_links", "kill"), ("foreign", "full")],
    indirect=["build"],
)
def test_a_removal_that_is_interrupted_anywhere_can_be_repeated(build, action, tmp_path):
    root, place = tmp_path / "place/data", tmp_path / "place"
    expected: dict[str, bytes] = {}
    for at in itertools.count(0):
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(build, place, symlinks=True, ignore=shutil.ignore_patterns("place"))
        before = contents(root)
        ended = in_a_fork(lambda: remove(root, NAMES), STEPS, at, action)
        if not expected:
            assert ended == 0
            expected = contents(root)
            continue
        assert ended in {"kill": (9, 0), "full": (3, 0)}[action], at
        if action == "full" and ended and not (root / NOTE).exists():
            assert contents(root) in (before, expected), (at, "an error before the commit undoes it")
        if (root / "plan/pairs.json").exists() and at % 2:
            convert(root, build / "in")
        assert remove(root, NAMES)[0].missing == (), at
        found = {name: body for name, body in contents(root).items() if name != "dropped.tsv"}
        assert found == {name: body for name, body in expected.items() if name != "dropped.tsv"}, at
        check(root)
        if not ended:
            break
    assert at > 15


def test_what_is_still_there_is_an_error(tmp_path, monkeypatch):
    """New shards are read again before they take effect, and so are other tars of the folder."""
    root, name = tmp_path / "data", "0000000001"
    behind_links(root)
    shutil.copy(root / "shards/00000.tar", root / "copy.tar")
    with pytest.raises(UserError, match=rf"1 samples that were to be removed are still there: copy\.tar:{name}"):
        remove(root, {name})
    (root / "copy.tar").write_bytes(b"x" * 999)
    with pytest.raises(UserError, match=r"perhaps copy\.tar"):
        remove(root, {name})
    (root / "copy.tar").unlink()
    assert remove(root, {name})[0].missing == ()
    before, old = contents(root), (root / "shards/00001.tar").read_bytes()
    monkeypatch.setattr(canonical_tar, "write", lambda path, members: path.write_bytes(old))
    with pytest.raises(UserError, match=r"00001\.tar has other samples than .*nothing was changed"):
        remove(root, {"0000000008"})
    assert contents(root) == before


def repeat_keys(root):
    members = [(f"{key}.{suffix}", body) for k, key in enumerate("aba") for suffix, body in sample(k).items()]
    canonical_tar.write(root / "shards/00000.tar", members)
    index(root, "--replace")


def replace_by_another(root, *suffixes):
    for suffix in suffixes:
        shutil.copyfile(root / f"meta/00001.{suffix}", root / f"meta/00000.{suffix}")


def change_a_digit(root):
    """Another width in a sample's JSON; the tar is as long as before and can be read."""
    body = (root / "shards/00000.tar").read_bytes()
    (root / "shards/00000.tar").write_bytes(body.replace(b'"width": 42', b'"width": 24', 1))
    assert (root / "shards/00000.tar").read_bytes() != body


OUTWARDS = json.dumps({"token": "0" * 32, "files": {"../x": False}})
REFUSED: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "repeated keys": ("foreign", repeat_keys, r"00000\.tar has several samples with the key 'a'"),
    "no tar": ("foreign", lambda root: (root / "shards/00000.tar").write_bytes(b"x"), r"00000\.tar"),
    "another shard's files": ("of_pairs", lambda root: replace_by_another(root, "parquet", "json"), "damaged"),
    "a meta file": ("of_pairs", lambda root: replace_by_another(root, "parquet"), r"00000\.parquet.* --delete-damaged"),
    "that of a download": ("download", lambda root: replace_by_another(root, "parquet"), r"00000\.parquet .*differs"),
    "a download's tar": ("download", change_a_digit, r"00000\.tar is missing or differs from .*--delete-damaged"),
    "a note to other places": ("foreign", lambda root: (root / NOTE).write_text(OUTWARDS), "only plain names"),
    "a damaged note": ("foreign", lambda root: (root / NOTE).write_text("{"), r"removal\.pending.*damaged"),
}


@pytest.mark.parametrize(("build", "change", "message"), REFUSED.values(), ids=REFUSED, indirect=["build"])
def test_what_differs_is_refused_and_nothing_is_changed(build, change, message):
    root = build / "data"
    (build / "x").write_text("outside")
    change(root)
    before = contents(build)
    with pytest.raises(UserError, match=message):
        remove(root, {"0000000001", "b"})
    assert contents(build) == before


def test_damaged_shards_of_pairs_are_deleted_with_their_records_and_made_again(tmp_path):
    root = tmp_path / "data"
    of_pairs(root)
    before = contents(root)
    (root / "shards/00001.tar").write_bytes(b"x")
    result = CliRunner().invoke(verify_command, [str(root), "--delete-damaged"], standalone_mode=False)
    assert "Deleted (1): shards/00001.tar. The command that made" in result.output
    assert not (root / "meta/00001.json").exists()
    convert(root)
    assert contents(root) == before


def test_a_name_of_any_length_is_kept(tmp_path):
    """Regression test: a shard with a name over 100 characters could not be written again."""
    (tmp_path / "shards").mkdir()
    names = ["short", "x" * 120, "é" * 90, "d/" + "y" * 150]
    members = [(f"{key}.{suffix}", body) for k, key in enumerate(names) for suffix, body in sample(k).items()]
    write_members(tmp_path / "shards/0.tar", members, format=tarfile.PAX_FORMAT)
    index(tmp_path)
    before = dict(canonical_tar.samples(tmp_path / "shards/0.tar"))
    remove(tmp_path, {"short"})
    assert dict(canonical_tar.samples(tmp_path / "shards/0.tar")) == {key: before[key] for key in names[1:]}
    with (tmp_path / "shards/0.tar").open("rb") as file:
        assert [record.key for record in read_records(file)] == names[1:]


def test_an_unfinished_download_keeps_its_removals(copied):
    folder = Folder(copied)
    for shard in (1, 2, 3):
        withdraw(folder, shard)
    assert remove(copied, {"0000000001", "0000000020"})[1] is None
    assert folder.removed_names() == {"0000000001", "0000000020"}
    done, manifest = remove(copied, {f"{k:010d}" for k in range(SHARD)})
    assert (done.samples, manifest) == (SHARD - 1, None), "what is left is fetched later"


def note_of_a_deletion(root, target):
    (root / "x").symlink_to(target)
    (root / NOTE).write_text(json.dumps({"token": "0" * 32, "files": {"x": False}}))


def note_of_a_replacement(root, target):
    (root / "sub").symlink_to(target.parent)
    (target.parent / f".{target.name}.{'0' * 32}.tmp").write_text("theirs")
    (root / NOTE).write_text(json.dumps({"token": "0" * 32, "files": {f"sub/{target.name}": True}}))


def linked_shard(root, target):
    (root / "shards/00000.tar").rename(target)
    (root / "shards/00000.tar").symlink_to(target)


def linked(name):
    return lambda root, target: (root / name).symlink_to(target)


PLANTED = {"a deletion": note_of_a_deletion, "a replacement": note_of_a_replacement, "a shard": linked_shard,
           "the list": linked("removed.txt"), "a lock": linked("staging/lock-folder")}  # fmt: skip


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_links_out_of_a_data_set_are_not_followed_without_consent(tmp_path, plant):
    root, target = tmp_path / "data", tmp_path / "home/precious"
    foreign(root)
    (root / "staging").mkdir()
    target.parent.mkdir()
    target.write_text("mine")
    plant(root, target)
    before = contents(target.parent)
    with pytest.raises(
        (UserError, OSError), match=r"leads to .*precious, outside of|Too many levels of symbolic links"
    ):
        removal.remove(root, {"0000000001"})
    assert contents(target.parent) == before

"""Samples are removed from shards of `neuclip pairs` and of others; a killed removal ends with the same bytes."""

from __future__ import annotations

import contextlib
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from data_prep.dataset import canonical_tar, removal
from data_prep.dataset.dataset_folder import Folder
from data_prep.dataset.removal import remove
from data_prep.dataset.verification import verify
from data_prep.pairs.make_shards import PairsConfig, make_shards
from jobs.manifest import command as manifest_command
from jobs.pairs import command as pairs_command
from jobs.verify import command as verify_command
from pipeline.data.shards.manifest_format import Manifest, check_keys, load_manifest
from pipeline.data.shards.tar_reader import read_records
from pipeline.errors import UserError
from pipeline.files import sha256_of
from tests.pair_files import dropped, picture, write_csv, write_images
from tests.shards import sample, write_members

NAMES = {"0000000001", "shards/00000.tar:0000000003", "0000000007", *(f"00000000{k}" for k in range(10, 20))}
"""Samples of two shards, and all of a third."""


def made(folder: Path) -> Path:
    """32 pairs in shards of ten."""
    write_images(folder / "in", 32)
    write_csv(folder / "in" / "t.csv", [("image", "caption"), *((f"{k:03d}.jpg", f"caption {k}") for k in range(32))])
    convert(folder)
    return folder / "out"


def convert(folder: Path) -> None:
    options = [str(folder / "in"), str(folder / "out"), "--shard-size", "10", "--processes", "1"]
    assert CliRunner().invoke(pairs_command, options, standalone_mode=False).exception is None


def foreign(folder: Path) -> Path:
    """The same number of shards and samples in a folder without records, with members in another order."""
    (folder / "out" / "shards").mkdir(parents=True)
    for shard in range(4):
        members = [(f"{k:010d}.{suffix}", body) for k in range(10 * shard, min(32, 10 * shard + 10))
                   for suffix, body in reversed(sample(k).items())]  # fmt: skip
        canonical_tar.write(folder / "out" / f"shards/{shard:05d}.tar", members)
    CliRunner().invoke(manifest_command, [str(folder / "out")], catch_exceptions=False, standalone_mode=False)
    return folder / "out"


def tars(root: Path) -> dict[str, str]:
    return {path.name: sha256_of(path) for path in root.rglob("*.tar")}


def keys(manifest: Manifest) -> list[int]:
    return [int(key) for shard in manifest.shards for key, _ in canonical_tar.samples(manifest.url(shard))]


@pytest.mark.parametrize("build", [made, foreign])
def test_a_removal_and_what_follows(build: Any, tmp_path: Path) -> None:
    root = build(tmp_path)
    before = load_manifest(root)
    bodies = dict(canonical_tar.samples(root / "shards/00000.tar"))
    with pytest.raises(UserError, match="nothing would be left"):
        remove(root, {f"{k:010d}" for k in range(32)})
    assert load_manifest(root).digest == before.digest
    done, after = remove(root, {*NAMES, "nobody"})
    assert after is not None
    assert (done.samples, done.shards, done.missing) == (13, 2, ("nobody",))
    assert keys(load_manifest(root)) == sorted({*range(32)} - {1, 3, 7, *range(10, 20)})
    assert [shard.name for shard in after.shards] == [f"shards/0000{k}.tar" for k in (0, 2, 3)]
    assert (after.n, after.attempted, after.failures) == (19, 32, {"removed": 13})
    kept = dict(canonical_tar.samples(root / "shards/00000.tar"))
    assert all(kept[key] == bodies[key] for key in kept)
    result = CliRunner().invoke(verify_command, [str(root)], standalone_mode=False)
    assert "19 samples" in result.output
    assert "everything matches" in result.output
    assert remove(root, NAMES)[0].missing == (), "they are gone already"
    if build is made:  # the same command again changes nothing
        convert(tmp_path)
        assert load_manifest(root).digest == after.digest
        for name in ("shards/00000.tar", "meta/00000.json", "meta/00000.parquet"):
            (root / name).unlink()
        convert(tmp_path)
        assert load_manifest(root).digest == after.digest, "what was removed stays out of a shard that is made again"
        assert [reason for _, reason, _ in dropped(root)] == ["removed"] * 13
    assert not [path for path in root.rglob("*") if path.suffix in (".new", ".removal", ".tmp")]


@dataclass
class Dying:
    """A function that is interrupted in one of its calls."""

    real: Callable[..., Any]
    at: int
    calls: int = 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt
        return self.real(*arguments, **options)

    def unlink(self, real: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """`Path.unlink`, which a killed process does not reach."""
        if self.calls >= self.at:
            raise KeyboardInterrupt
        real(*arguments, **options)


@pytest.mark.parametrize("build", [made, foreign])
@pytest.mark.parametrize("again", ["remove", "pairs"])
def test_a_killed_removal_is_finished(build: Any, again: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if again == "pairs" and build is foreign:
        return
    whole = build(tmp_path / "whole")
    remove(whole, NAMES)
    places = [(removal, "flush"), (removal, "write_text"), (removal, "_publish_tar"),
              (Manifest, "save"), (Folder, "write_record")]  # fmt: skip
    for number, (where, name) in enumerate(places):
        for call in range(1, 5):
            root = build(tmp_path / f"{number}-{call}")
            dies = Dying(getattr(where, name), at=call)
            with monkeypatch.context() as patch:
                patch.setattr(where, name, lambda *a, dies=dies, **k: dies(*a, **k))
                patch.setattr(
                    Path, "unlink", lambda *a, dies=dies, unlink=Path.unlink, **k: dies.unlink(unlink, *a, **k)
                )
                with contextlib.suppress(KeyboardInterrupt):
                    remove(root, NAMES)
            if again == "pairs":
                convert(root.parent)
            assert remove(root, NAMES)[0].missing == ()
            assert Folder(root).removed_names() == NAMES
            assert load_manifest(root).digest == load_manifest(whole).digest
            assert tars(root) == tars(whole)
            if dies.calls < call:
                break


@pytest.mark.parametrize("build", [made, foreign])
@pytest.mark.parametrize(("name", "call"), [("_rewrite_tar", 2), ("flush", 3), ("write_text", 3), ("write_text", 1)])
def test_an_error_undoes_a_removal(
    build: Any, name: str, call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression test: the next removal, of another sample, carried out what had been written of it."""
    root = build(tmp_path)
    before = tars(root)
    with monkeypatch.context() as patch:
        patch.setattr(removal, name, Dying(getattr(removal, name), at=call))
        with pytest.raises(KeyboardInterrupt):
            remove(root, NAMES)
    assert not [path for path in root.rglob("*") if path.suffix in (".new", ".removal", ".tmp")]
    assert tars(root) == before
    assert remove(root, {"0000000030"})[0].samples == 1
    assert keys(load_manifest(root)) == sorted({*range(32)} - {30})


def test_a_name_of_any_length_is_kept(tmp_path: Path) -> None:
    """Regression test: a shard with a name over 100 characters could not be written again."""
    (tmp_path / "shards").mkdir()
    names = ["short", "x" * 120, "é" * 90, "d/" + "y" * 150]
    members = [(f"{key}.{suffix}", body) for k, key in enumerate(names) for suffix, body in sample(k).items()]
    write_members(tmp_path / "shards/0.tar", members, format=tarfile.PAX_FORMAT)
    CliRunner().invoke(manifest_command, [str(tmp_path)], catch_exceptions=False, standalone_mode=False)
    before = dict(canonical_tar.samples(tmp_path / "shards/0.tar"))
    remove(tmp_path, {"short"})
    assert dict(canonical_tar.samples(tmp_path / "shards/0.tar")) == {key: before[key] for key in names[1:]}
    with (tmp_path / "shards/0.tar").open("rb") as file:
        assert [record.key for record in read_records(file)] == names[1:]


def test_keys_of_several_samples_are_refused(tmp_path: Path) -> None:
    """Regression test: all of them were removed, and one was reported."""
    root = foreign(tmp_path)
    canonical_tar.write(root / "shards/00000.tar", [
        (f"{key}.{suffix}", body) for k, key in enumerate("aba") for suffix, body in sample(k).items()
    ])  # fmt: skip
    (root / "manifest.json").unlink()
    CliRunner().invoke(manifest_command, [str(root)], catch_exceptions=False, standalone_mode=False)
    before, manifest = tars(root), load_manifest(root)
    with pytest.raises(UserError, match=r"00000\.tar has several samples with the key 'a'"):
        remove(root, {"b", "0000000030"})
    assert tars(root) == before
    with pytest.raises(UserError, match="several samples with the key 'a'"):
        check_keys(manifest, manifest.shards)
    assert remove(root, {"0000000030"})[0].samples == 1, "of another shard"


def test_a_shard_that_differs_from_the_manifest_is_refused(tmp_path: Path) -> None:
    root = foreign(tmp_path)
    canonical_tar.write(root / "shards/00003.tar", [(f"{k:010d}.jpg", picture(k)) for k in (30, 31)])
    before = tars(root)
    with pytest.raises(UserError, match=r"00003\.tar is not what the manifest says, and nothing was changed"):
        remove(root, {"0000000001", "0000000030"})
    assert tars(root) == before


@pytest.mark.parametrize("copied", [("parquet", "json"), ("parquet",)])
def test_files_of_another_shard_are_found_before_anything_is_removed(copied: tuple[str, ...], tmp_path: Path) -> None:
    """Regression test: the tar was replaced, then the record refused; the manifest stayed as it was."""
    root = made(tmp_path)
    for suffix in copied:
        shutil.copyfile(root / f"meta/00001.{suffix}", root / f"meta/00000.{suffix}")
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with pytest.raises(
        UserError, match=r"00000\.(parquet|json) is (another shard's|damaged).* Delete the shard's files"
    ):
        remove(root, {"0000000001"})
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
    assert [problem.shard for problem in verify(root)] == ["meta/00000.parquet"]
    for path in (*root.glob("*/00000.*"),):
        path.unlink()
    convert(tmp_path)
    assert verify(root) == []
    assert remove(root, {"0000000001"})[0].samples == 1


@pytest.mark.parametrize("damage", ["cut", "byte", "empty", "list"])
def test_a_damaged_note_of_a_killed_removal_is_refused(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = made(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(removal, "_publish_tar", Dying(removal._publish_tar, at=1))
        with pytest.raises(KeyboardInterrupt):
            remove(root, {"0000000001"})
    (note,) = root.rglob("*.removal")
    text, before = note.read_bytes(), tars(root)
    note.write_bytes({"cut": text[:-20], "byte": text.replace(b"9", b"8", 1), "empty": b"", "list": b"[]"}[damage])
    for again in (lambda: remove(root, {"0000000001"}), lambda: make_shards(PairsConfig(str(tmp_path / "in"), root))):
        with pytest.raises(UserError, match=r"00000\.tar\.removal, which says how to finish a removal, is damaged"):
            again()
        assert tars(root) == before
    note.write_bytes(text)
    assert remove(root, {"0000000001"})[0].missing == ()
    assert 1 not in keys(load_manifest(root))


def test_an_empty_list_changes_nothing(tmp_path: Path) -> None:
    folder = foreign(tmp_path)
    before = tars(folder), (folder / "manifest.json").read_bytes()
    (tmp_path / "none.txt").write_text("\n")
    done = CliRunner().invoke(verify_command, [str(folder), "--remove", str(tmp_path / "none.txt")])
    assert done.exit_code == 0, done.output
    assert "names nothing: nothing was removed" in done.output
    assert "has changed" not in done.output
    assert (tars(folder), (folder / "manifest.json").read_bytes()) == before

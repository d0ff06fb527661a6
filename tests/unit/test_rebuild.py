"""Damage of several files at once, unfinished removals and commits: everything is reported, and repaired in one go."""

# ruff: noqa: F811 (imported fixtures are requested by name)
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from data_prep import rebuild as rebuilding
from data_prep.dataset import duplicates, shard_commit
from data_prep.dataset.dataset_folder import Folder
from data_prep.dataset.ingest_report import write_report
from data_prep.dataset.removal import finish_removal, remove
from data_prep.dataset.shard_plan import load_plan
from data_prep.dataset.verification import verify
from data_prep.rebuild import rebuild
from data_prep.settings.download_config import DownloadConfig
from jobs.verify import command
from pipeline.data.shards.manifest_format import load_manifest
from pipeline.errors import UserError
from tests.ingested import ROWS, SHARD, copied, fetch_here, made, own_opener, site  # noqa: F401


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(config: DownloadConfig, shards: tuple[int, ...], *, mode: str, **_: object) -> None:
        fetch_here(config, load_plan(Folder(Path(config.output))), list(shards), mode, manifest=False)  # type: ignore[arg-type]

    monkeypatch.setattr(rebuilding, "fetch", fetch)


def contents(root: Path) -> dict[str, bytes]:
    names = [*root.glob("shards/*"), *root.glob("meta/*"), *root.glob("plan/*"), root / "manifest.json"]
    return {str(path.relative_to(root)): path.read_bytes() for path in names}


def flip(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 255
    path.write_bytes(body)


def break_plan(root: Path) -> None:
    (root / "plan/plan.json").write_text("{")


def break_list(root: Path) -> None:
    (root / "plan/part-00000.parquet").write_bytes(b"x")


def break_manifest(root: Path) -> None:
    (root / "manifest.json").write_text("{")


def lose_manifest(root: Path) -> None:
    (root / "manifest.json").unlink()


@pytest.mark.parametrize("more", [break_plan, break_list, break_manifest, lose_manifest])
def test_damaged_shards_are_found_beside_other_damage(copied: Path, more: Callable[[Path], None]) -> None:
    """Regression test: with a damaged plan or manifest, `verify` looked no further, and one rebuild did not suffice."""
    expected = contents(copied)
    more(copied)
    flip(copied / "shards/00001.tar")
    (copied / "meta/00002.parquet").write_bytes(b"x")
    (copied / "meta/00003.json").write_text("{")
    found = verify(copied)
    assert {"shards/00001.tar", "meta/00002.parquet", "meta/00003.json"} < {problem.shard for problem in found}
    rebuild(copied, found)
    assert verify(copied) == []
    assert contents(copied) == expected


def test_an_unfinished_download_has_no_manifest_to_verify(copied: Path) -> None:
    lose_manifest(copied)
    (copied / "meta/00003.json").unlink()
    with pytest.raises(UserError, match="The download is not finished: run the same `neuclip download` again"):
        verify(copied)


def test_changed_settings_are_reported_and_never_used_for_a_rebuild(copied: Path) -> None:
    settings = copied / "download.yaml"
    settings.write_text(settings.read_text().replace("size: 256", "size: 32"))
    flip(copied / "shards/00001.tar")
    found = verify(copied)
    assert "image.size was 256 and is now 32" in str(found[0])
    with pytest.raises(UserError, match=r"download\.yaml has been changed .* Run the same `neuclip download` again"):
        rebuild(copied, found)
    settings.write_text("image: [")
    assert [problem.kind for problem in verify(copied)][:1] == ["damaged"]


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b"x"), lambda path: path.unlink()])
def test_commands_that_read_all_shards_name_a_damaged_one(copied: Path, damage: Callable[[Path], None]) -> None:
    """Regression test: they reported a fault of the program."""
    damage(copied / "shards/00001.tar")
    for work in (write_report, duplicates.find_duplicates, lambda root: remove(root, {"0000000008"})):
        with pytest.raises(UserError, match=r"00001\.tar"):
            work(copied)


def test_a_commit_without_its_files_is_dropped(copied: Path) -> None:
    """After a power failure that kept the commit but lost a file; the older shard remains in effect."""
    folder, expected = Folder(copied), contents(copied)
    folder.commit(1).write_text(folder.record(2).read_text())
    assert shard_commit.recover(folder, range(4)) == []
    assert contents(copied) == expected
    folder.staged_tar(1).write_bytes(folder.tar(1).read_bytes())
    folder.commit(1).write_text(folder.record(1).read_text())
    assert shard_commit.recover(folder, range(4)) == [1], "the meta file had been renamed already"
    assert contents(copied) == expected


def test_a_commit_is_on_the_disk_before_the_files_are_renamed(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    monkeypatch.setattr(shard_commit, "flush", lambda path: steps.append(f"flush {path.name}"))
    monkeypatch.setattr(shard_commit, "fault_point", lambda point, detail: steps.append(point))
    remove(copied, {"0000000008"})
    committed = steps.index("shard.committed")
    assert "flush meta" in steps[steps.index("shard.commit") : committed]
    assert "shard.tar-renamed" in steps[committed:]


def test_a_removal_that_leaves_nothing_is_refused_after_an_interrupted_one(copied: Path) -> None:
    """Regression test: it emptied the set, and no later command could finish."""
    folder = Folder(copied)
    keys = [f"{k:010d}" for k in range(ROWS)]
    folder.pending_removal.write_text("\n".join(keys[: ROWS // 2]))
    with pytest.raises(UserError, match="names all 12 samples"):
        remove(copied, set(keys[ROWS // 2 :]))
    assert load_manifest(copied).n == ROWS // 2
    assert [problem.shard for problem in verify(copied)] == []
    assert not finish_removal(folder)


def test_all_samples_of_an_unfinished_download_can_be_removed(copied: Path) -> None:
    for shard in (1, 2, 3):
        Folder(copied).withdraw(shard)
    done, manifest = remove(copied, {f"{k:010d}" for k in range(SHARD)})
    assert (done.samples, manifest) == (SHARD, None)


def test_a_rebuild_says_that_the_result_is_identical(copied: Path) -> None:
    flip(copied / "shards/00001.tar")
    result = CliRunner().invoke(command, [str(copied), "--rebuild"], standalone_mode=False)
    assert "Repaired, bit-identical to the original; 24 samples now, 24 before." in result.output

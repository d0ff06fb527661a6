"""`neuclip pairs`: every dropped row has a recorded reason, and an interrupted run ends with the same bytes."""

# ruff: noqa: F811 (imported fixtures are requested by name)
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from data_prep.dataset.verification import verify
from data_prep.pairs import make_shards
from jobs import pairs
from jobs.recipe_option import TRAINING
from pipeline.errors import UserError
from pipeline.training.recipe import load_recipe
from pipeline.training.recipe_file import read_recipe
from tests.launch import wait_for
from tests.pair_files import digests, make, run, table, write_csv, write_files, write_images  # noqa: F401

ROOT = Path(__file__).parents[2]


# The command with a slowed-down conversion, so that it can be killed halfway.
SLOW = """
import sys, time
from data_prep.pairs import make_shards
real = make_shards.convert
def slow(*args):
    time.sleep(0.05)
    return real(*args)
make_shards.convert = slow
if __name__ == "__main__":  # the workers import this file
    from jobs.pairs import command
    command(sys.argv[1:])
"""


def test_several_processes_and_a_resumed_run_write_the_same_bytes(tmp_path):
    folder = tmp_path / "in"
    names = write_images(folder, 60)
    (folder / names[33]).unlink()
    path = write_csv(folder / "pairs.csv", [("image", "caption"), *((name, f"no. {name}") for name in names)])
    make(path, tmp_path / "whole", shard_size=5)
    arguments = [str(path), "--output", str(tmp_path / "killed"), "--shard-size", "5", "--processes", "2"]
    (tmp_path / "slow.py").write_text(SLOW)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "slow.py", *arguments], env=environment, cwd=tmp_path)
    records = (tmp_path / "killed" / "meta").glob
    wait_for(lambda: len(list(records("*.json"))) >= 3, "three shards are done", process=process)
    workers = psutil.Process(process.pid).children()
    process.kill()
    process.wait()
    assert len(workers) >= 2
    assert not psutil.wait_procs(workers, timeout=60)[1]
    assert 3 <= len(list(records("*.json"))) < 12
    assert not (tmp_path / "killed" / "manifest.json").exists()
    make(path, tmp_path / "killed", shard_size=5, processes=2)
    assert digests(tmp_path / "killed") == digests(tmp_path / "whole")


def test_shards_may_be_on_another_disk(table, tmp_path):
    """Regression test: a linked folder of shards was refused as a stranger's."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/shards").symlink_to("../disk")
    make(table, tmp_path / "data")
    (tmp_path / "disk/.00000.tar.0123456789abcdef0123456789abcdef.tmp").touch()
    make(table, tmp_path / "data")
    assert {path.suffix for path in (tmp_path / "disk").iterdir()} == {".tar"}
    assert verify(tmp_path / "data") == []


def test_damage_is_named_when_the_command_is_repeated(table, tmp_path):
    """Regression tests: the manifest was written again as if nothing had happened, or another place for a lost row."""
    make(table, tmp_path / "data")
    tar, meta = tmp_path / "data/shards/00001.tar", tmp_path / "data/meta/00001.parquet"
    whole, rows = tar.read_bytes(), bytearray(meta.read_bytes())
    column = pq.ParquetFile(meta).metadata.row_group(0).column(2)
    rows[column.dictionary_page_offset + column.total_compressed_size // 2] ^= 1
    for path, body, what in (
        (tar, whole[:-700], "has [0-9,]+ bytes instead of [0-9,]+"),
        (tar, None, "is missing"),
        (meta, rows, "is missing or differs from its record"),
    ):
        before = path.read_bytes()
        path.unlink() if body is None else path.write_bytes(body)
        with pytest.raises(UserError, match=rf"{path.name} {what}.* --delete-damaged"):
            make(table, tmp_path / "data")
        path.write_bytes(before)
    for path in (tar, meta, meta.with_suffix(".json")):
        path.unlink()
    make(table, tmp_path / "data")
    assert tar.read_bytes() == whole


def test_a_conversion_goes_on_from_another_folder(table, tmp_path, monkeypatch):
    """Regression test: images of a source with a relative name were missing for the run that continued."""
    monkeypatch.chdir(table.parent)
    write_shard = make_shards.write_shard

    def interrupted(job, shard):
        if shard:
            raise KeyboardInterrupt
        return write_shard(job, shard)

    with monkeypatch.context() as patch:
        patch.setattr(make_shards, "write_shard", interrupted)
        with pytest.raises(KeyboardInterrupt):
            make(table.name, tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    assert make(table, tmp_path / "out").manifest.n == 10
    make(table.relative_to(tmp_path), tmp_path / "relative")
    assert digests(tmp_path / "relative") == digests(tmp_path / "out")


def test_no_manifest_is_written_without_usable_rows(tmp_path):
    path = write_csv(tmp_path / "p.csv", [("image", "caption"), (write_images(tmp_path, 1)[0], ""), ("lost.jpg", "x")])
    with pytest.raises(UserError, match=r"None of the 2 rows .* gave a sample: .*1 row: no caption \(first: p.csv:2\)"):
        make(path, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("before", [None, (), ("staging/lock-of-another",)])
def test_a_refused_source_leaves_what_was_there(table, tmp_path, before):
    output = tmp_path / "new" / "out"
    if before is not None:
        output.mkdir(parents=True)
        write_files(output, dict.fromkeys(before, b""))
    with pytest.raises(UserError, match="has no column 'nothing'"):
        make(table, output, caption="nothing")
    assert output.exists() == (before is not None)
    assert [path.name for path in output.glob("*")] == ["staging"] * bool(before)
    assert all((output / name).is_file() for name in before or ())


def test_the_command_reports_the_result_and_how_to_train(table, tmp_path, monkeypatch):
    (table.parent / "images" / "004.jpg").unlink()
    folder = tmp_path / "my pairs"
    for recipe, least in (("finetune", 100_000), ("own", 9)):
        monkeypatch.setattr(pairs, "FROM_SCRATCH", least)
        said = run(table, folder)
        assert "9 of 10 rows gave a sample: 1 shard," in said
        assert "dropped        1  image file missing: pairs.csv:6\n" in said
        told = "Fewer than 100,000 pairs teach little from scratch, which is --recipe own." in said
        assert told == (recipe == "finetune")
        commands = (shlex.split(line.partition("neuclip ")[2]) for line in said.splitlines() if "neuclip " in line)
        report, train = (words for words in commands if words[0] in ("report", "train"))
        assert report == ["report", str(folder)]
        settings = [f"data.sources={folder}", "batch_size=2", "epochs=50", "output=runs/mine"]
        assert train == ["train", "--recipe", recipe, *settings]
        assert load_recipe(TRAINING / f"{recipe}.yaml", settings).data.sources[0].manifest == str(folder)
        assert read_recipe(TRAINING / f"{recipe}.yaml")["batch_size"] == pairs.RECIPES_BATCH


def test_the_suggested_batch_fits_into_an_epoch():
    for samples, batch, epochs in ((1, 2, 200), (80, 8, 20), (500, 64, 29), (1_535, 128, 19)):
        assert pairs.small_batch(samples) == f" batch_size={batch} epochs={epochs}"
    assert pairs.small_batch(6 * pairs.RECIPES_BATCH) == ""


def test_a_note_is_written_after_everything_that_it_refers_to_is_on_the_disk(table, tmp_path, monkeypatch):
    synced: list[str] = []
    sync, out = os.fsync, tmp_path / "out"

    def fsync(descriptor):
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), out))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    make(table, out, shard_size=10)
    temporary = re.compile(r"\.(?P<name>[\w.]+?)(\.[0-9a-f]{32})?\.tmp")
    names = [temporary.sub(r"\g<name>", name) for name in synced]
    note = names.index("meta/00000.commit")
    files = ["plan/pairs.json", "shards/00000.tar", "meta/00000.parquet", "meta/00000.json"]
    assert (names[:4], sorted(names[4:note])) == (files, ["meta", "shards"])
    assert (sorted(set(names[note + 1 : -1])), names[-1]) == (["meta", "shards"], "manifest.json")

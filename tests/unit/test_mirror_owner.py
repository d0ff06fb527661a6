"""Whose a mirror is: other runs, other machines and altered names are refused or skipped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint import mirror as mirror_module
from pipeline.checkpoint.layout import best_checkpoint, run_id_of
from pipeline.checkpoint.mirror import fetch_newest, refuse_taken
from pipeline.checkpoint.mirror_store import MirrorStore, Owner
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.files import write_text
from pipeline.run_files import META_NAME, checkpoint_folders, digest_of, name_of, read_run_id, write_run_id
from tests.launch import wait_for
from tests.mirrors import fetched, write, writer_of
from tests.written_checkpoints import FACTS, Towers, snapshot
from tests.written_checkpoints import writer_of as plain_writer


def test_the_mirror_of_another_run_is_refused(tmp_path: Path, url: str, towers: Towers) -> None:
    first, other, world = tmp_path / "one" / "run", tmp_path / "other" / "run", World()
    write(first, url, towers, [1, 2])
    with pytest.raises(UserError, match="has checkpoints: add --resume latest"):
        refuse_taken(other, url, resume=None, step=-1, world=world)
    with pytest.raises(UserError, match=r"later checkpoints than old \(step-00000002\)"):
        refuse_taken(first, url, resume="old", step=1, world=world)
    refuse_taken(first, url, resume="old", step=2, world=world)
    refuse_taken(tmp_path / "third", url, resume=None, step=-1, world=world)
    for step in (1, 9):
        with pytest.raises(
            UserError,
            match=rf"belongs to run {read_run_id(first)}, and .* is a new one; --resume latest continues that",
        ):
            refuse_taken(other, url, resume="elsewhere/step-00000001", step=step, world=world)
    write_run_id(other, "0123456789abcdef")
    for start in (refused, resumed):
        with pytest.raises(UserError, match=rf"belongs to run {read_run_id(first)}, and .* is run 0123456789abcdef"):
            start(other, url)
    assert not (other / "checkpoints").exists()


def refused(run: Path, url: str) -> None:
    refuse_taken(run, url, resume="elsewhere", step=9, world=World())


def resumed(run: Path, url: str) -> None:
    fetch_newest(run, url, world=World(), on_event=print)


def test_two_machines_cannot_train_one_run(
    tmp_path: Path, url: str, towers: Towers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "BEAT_SECONDS", 0.2)
    first, second, events = tmp_path / "one" / "run", tmp_path / "two" / "run", list[str]()
    alive = writer_of(first, url, towers, events.append)
    alive.begin()
    store = MirrorStore(url, first)
    wait_for(lambda: store.owner() is not None, "the mirror has an owner")
    for start in (refused, resumed):  # before the first checkpoint, too
        with pytest.raises(UserError, match=rf"to run {read_run_id(first)}, which is being trained now \(.*process"):
            start(second, url)
    alive.save(snapshot(towers, 1))
    alive.finish()
    with pytest.raises(UserError, match="is being trained now"):
        resumed(second, url)
    assert alive._mirror is not None
    asleep = Owner(read_run_id(first), "a machine that was asleep", "1")

    def noticed() -> bool:  # it did not ask; a claim between the other's look and claim is lost, so it claims again
        store.claim(asleep)
        return any("another process has taken over the mirror" in event for event in events)

    wait_for(noticed, "the other machine is noticed")
    alive.save(snapshot(towers, 2))
    alive.close()
    assert store.names() == ["step-00000001"]
    assert store.owner() == asleep
    monkeypatch.setattr(mirror_module, "WATCH_SECONDS", 1.0)
    resumed(second, url)  # that one is gone: its owner.json does not change any more
    assert run_id_of(second) == read_run_id(first)
    assert [path.name for path in checkpoint_folders(second)] == ["step-00000001"]


def test_two_processes_may_claim_a_mirror_at_once(tmp_path: Path) -> None:
    stores = [MirrorStore(f"file://{tmp_path}/store", tmp_path / "run") for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        claims = [pool.submit(store.claim, Owner("0123456789abcdef", "a machine", "1")) for store in stores * 200]
    assert not [claim for claim in claims if claim.exception()]


def test_a_new_machine_does_not_continue_a_run_with_another_recipe(tmp_path: Path, url: str, towers: Towers) -> None:
    recipe = {"batch_size": 8, "seed": 1, "optimizer": {"lr": 0.1}, "checkpoint": {"every": 5}}
    writer = writer_of(tmp_path / "one" / "run", url, towers)
    writer.save(replace(snapshot(towers, 1), facts={**FACTS, "samples": 8, "config": recipe}))
    writer.close()
    how: dict[str, Any] = {"world": World(), "on_event": print}
    other = tmp_path / "two" / "run"
    changed = {**recipe, "optimizer": {"lr": 0.2}}
    with pytest.raises(UserError, match=r"step-00000001 of another run .*: optimizer\.lr 0\.1 -> 0\.2\. Choose"):
        fetch_newest(other, url, **how, settings=changed)
    assert not checkpoint_folders(other)
    fetch_newest(other, url, **how, settings={**recipe, "checkpoint": {"every": 9}})
    assert checkpoint_folders(other)
    fetch_newest(tmp_path / "one" / "run", url, **how, settings=changed)  # its own folder knows which run it is


def test_a_foreign_checkpoint_in_a_mirror_is_skipped(tmp_path: Path, url: str, towers: Towers) -> None:
    run = tmp_path / "run"
    write(run, url, towers, [1, 2])
    change_meta(MirrorStore(url, run), 2, lambda meta: meta.update(run_id="0123456789abcdef"))
    shutil.rmtree(run / "checkpoints")
    found, notes = fetched(run, url)
    assert found.step == 1
    assert "step-00000002 of the mirror was written by another run (0123456789abcdef) and was skipped" in notes[0]
    write(run, url, towers, [3], keep_last=1)
    assert MirrorStore(url, run).names() == ["step-00000002", "step-00000003"]


def test_a_foreign_checkpoint_of_the_same_step_is_kept(tmp_path: Path, url: str, towers: Towers) -> None:
    run, other, foreign = tmp_path / "run", tmp_path / "other" / "run", "0123456789abcdef"
    store = MirrorStore(url, run)
    write(run, url, towers, [1, 2])
    change_meta(store, 2, lambda meta: meta.update(run_id=foreign))
    events = write(run, url, towers, [2, 3])
    assert f"step-00000002 is NOT in the mirror {store.url} (run {foreign} has one of this name there" in events[1]
    assert store.run_id(name_of(2)) == foreign
    assert store.read("latest") == name_of(3)

    store._write("best", f"{name_of(2)}\n".encode())
    write_run_id(other, foreign)  # two steps of another run, on this machine only
    writer = plain_writer(other, towers)
    for step in (3, 5):
        writer.save(snapshot(towers, step))
        writer.wait()
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(other / "checkpoints", run / "checkpoints")
    found, notes = fetched(run, url)
    assert (found.step, found.run_id) == (3, read_run_id(run))
    assert f"step-00000003 was written by another run ({foreign}) and is step-00000003.run-{foreign} now" in notes[0]
    assert (run / "checkpoints" / f"step-00000003.run-{foreign}" / META_NAME).is_file()
    assert [path.name for path in checkpoint_folders(run)] == [name_of(3), name_of(5)]


@pytest.mark.parametrize("text", [b"[]", b"7", b"null", b'{"files": []}', b"\xff", b"[" * 100_000, b""])
def test_a_checkpoint_json_of_another_type_is_skipped(tmp_path: Path, url: str, towers: Towers, text: bytes) -> None:
    run = tmp_path / "run"
    write(run, url, towers, [1, 2])
    store = MirrorStore(url, run)
    store._files.pipe_file(f"{store._root}/{name_of(2)}/{META_NAME}", text)
    shutil.rmtree(run)
    found, notes = fetched(run, url)
    assert found.step == 1
    assert "step-00000002 of the mirror is damaged and was skipped" in notes[0]


@pytest.mark.parametrize("config", [7, {"batch_size": 8, "seed": "changed"}])
def test_a_damaged_recipe_in_a_mirror_is_skipped(tmp_path: Path, url: str, towers: Towers, config: object) -> None:
    """Regression test: the start was refused, as if the mirror were away or belonged to another run."""
    run = tmp_path / "run"
    write(run, url, towers, [1, 2])
    store = MirrorStore(url, run)
    meta = {**store.meta(name_of(2)), "config": config}
    text = json.dumps({**meta, "digest": digest_of(meta)} if config == 7 else meta)
    store._files.pipe_file(f"{store._root}/{name_of(2)}/{META_NAME}", text.encode())
    shutil.rmtree(run)
    notes: list[str] = []
    fetch_newest(run, url, world=World(), on_event=notes.append, settings={"batch_size": 8, "seed": 1})
    assert "step-00000002 of the mirror is damaged and was skipped" in notes[0]
    assert [path.name for path in checkpoint_folders(run)] == [name_of(1)]


@pytest.mark.parametrize("name", ["../../outside", "ema/../../../outside", "{abs}", "."])
def test_a_mirror_cannot_write_outside_the_run(tmp_path: Path, url: str, towers: Towers, name: str) -> None:
    run, name = tmp_path / "deep" / "run", name.format(abs=tmp_path / "outside")
    write(run, url, towers, [1, 2])
    change_meta(MirrorStore(url, run), 2, lambda meta: meta["files"].update({name: {"bytes": 0, "sha256": "0"}}))
    shutil.rmtree(run)
    before = {path for path in tmp_path.rglob("*") if "store" not in path.parts}
    found, notes = fetched(run, url)
    assert found.step == 1
    assert "step-00000002 of the mirror is damaged and was skipped" in notes[0]
    assert "only plain names" in notes[0]
    after = {path for path in tmp_path.rglob("*") if "store" not in path.parts}
    assert all(path.is_relative_to(run) for path in after - before)


@pytest.mark.parametrize("name", ["/../../precious", ".", "..", "{abs}", "step-00000001/../../../../precious"])
def test_a_name_in_best_deletes_nothing(tmp_path: Path, url: str, towers: Towers, name: str) -> None:
    run, precious = tmp_path / "run", tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis").write_text("ten years")
    write(run, url, towers, [1])
    MirrorStore(url, run).point("best", name.format(abs=precious))
    shutil.rmtree(run)
    assert fetched(run, url)[0].step == 1
    assert not (run / "checkpoints" / "best").exists()
    write_text(run / "checkpoints" / "best", name.format(abs=precious))
    assert best_checkpoint(run) is None
    write(run, url, towers, [2, 3], keep_last=1)
    assert (precious / "thesis").read_text() == "ten years"
    assert [path.name for path in checkpoint_folders(run)] == ["step-00000003"]


def test_a_damaged_best_stops_neither_a_start_nor_an_upload(tmp_path: Path, url: str, towers: Towers) -> None:
    run, store = tmp_path / "run", MirrorStore(url, tmp_path / "run")
    write(run, url, towers, [1])
    store._files.pipe_file(f"{store._root}/best", b"\xff")
    shutil.rmtree(run)
    assert fetched(run, url)[0].step == 1
    events = write(run, url, towers, [2])
    assert "Checkpoint step-00000002 is in the mirror" in events[-1]


def test_ids_in_a_mirror_are_no_paths(tmp_path: Path, url: str, towers: Towers) -> None:
    run, store = tmp_path / "run", MirrorStore(url, tmp_path / "run")
    write(run, url, towers, [1, 2])
    run_id = read_run_id(run)
    for step in (1, 2):
        change_meta(store, step, lambda meta: meta.update(run_id="x/../../elsewhere"))
    store.claim(Owner("x/../../elsewhere", "", ""))
    assert (store.owner(), store.run_id(name_of(2))) == (None, "")
    shutil.rmtree(run)
    notes: list[str] = []
    fetch_newest(run, url, world=World(), on_event=notes.append)
    assert [note for note in notes if "damaged and was skipped: in checkpoint.json, run_id is wrong" in note] == notes
    assert len(notes) == 2
    assert run_id_of(run) == ""
    change_meta(store, 2, lambda meta: meta.update(run_id=run_id))
    assert fetched(run, url)[0].step == 2


def change_meta(store: MirrorStore, step: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a mirror's checkpoint.json, with a digest that fits, as somebody who can write there could."""
    meta = json.loads(store.read(f"{name_of(step)}/{META_NAME}"))
    change(meta)
    meta["digest"] = digest_of(meta)
    store._files.pipe_file(f"{store._root}/{name_of(step)}/{META_NAME}", json.dumps(meta).encode())

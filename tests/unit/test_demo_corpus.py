"""The demo reuses existing data only if it belongs to the same corpus; it evaluates in the process that trained."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import pipeline.training.run
from data_prep.scenes import published
from data_prep.scenes.published import corpus_digest
from data_prep.scenes.scene import ScenesConfig
from jobs import demo
from jobs.demo import keep_or_clear
from pipeline.distributed import workers
from pipeline.evaluation.run.images import WORKER_IMPORTS
from pipeline.training.recipe import load_recipe

SCENES = ScenesConfig(pairs=1000)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """The data and run folders of a finished demo."""
    data, run = tmp_path / "demo-data", tmp_path / "demo"
    keep_or_clear(SCENES, data, run)
    for name in ("shards", "suite"):
        (data / name).mkdir()
    for name in ("urls.parquet", "port"):
        (data / name).write_text("1234")
    run.mkdir()
    (run / "metrics.jsonl").write_text("{}")
    return data, run


def test_the_same_corpus_is_kept(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    data, run = folders
    before = {path: path.stat().st_mtime_ns for path in data.rglob("*")}
    keep_or_clear(SCENES, data, run)
    assert {path: path.stat().st_mtime_ns for path in data.rglob("*")} == before
    assert (run / "metrics.jsonl").exists()
    assert capsys.readouterr().out == ""


def test_other_settings_or_a_missing_digest_rebuild_the_corpus(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    data, run = folders
    keep_or_clear(dataclasses.replace(SCENES, pairs=2000), data, run)
    assert [path.name for path in data.iterdir()] == ["corpus.sha256"]
    assert not run.exists()
    (aside,) = run.parent.glob("demo-corpus-*")
    assert (aside / "metrics.jsonl").exists(), "the trained run was lost"
    assert "generating it again" in capsys.readouterr().out

    (data / "corpus.sha256").unlink()
    (data / "port").write_text("1234")
    keep_or_clear(SCENES, data, run)
    assert [path.name for path in data.iterdir()] == ["corpus.sha256"]


def test_interrupted_cleanup_is_completed_by_the_next_run(folders: tuple[Path, Path]) -> None:
    data, run = folders
    other = dataclasses.replace(SCENES, seed=1)
    (data / "suite").rmdir()  # as if the removal had been interrupted
    keep_or_clear(other, data, run)
    assert (data / "corpus.sha256").read_text().strip() != corpus_digest(other)  # the digest covers the recipe, too
    assert not (data / "shards").exists()


def test_code_is_part_of_the_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = corpus_digest(SCENES)
    package = tmp_path / "scenes"
    package.mkdir()
    for path in Path(published.__file__).parent.glob("*.py"):
        (package / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(published, "__file__", str(package / "published.py"))
    assert corpus_digest(SCENES) == before, "the location of the code must not change the digest"
    (package / "render.py").write_text("# other pictures\n")
    assert corpus_digest(SCENES) != before


def test_the_fork_server_starts_with_what_the_evaluation_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers come from that of the loader; without, each of every task imports it, which takes 4 seconds."""
    monkeypatch.setattr(workers, "_preloaded", {})
    when_training: list[str] = []

    def record(*_: Any, **__: Any) -> int:
        when_training.extend(workers._preloaded)
        return 0

    monkeypatch.setattr(pipeline.training.run, "train", record)
    code, _ = demo.train(load_recipe(demo.RECIPE, [f"output={tmp_path}"]))
    assert code == 0
    assert set(WORKER_IMPORTS) <= set(when_training)

"""Ranks that wait at the start for the work of rank 0, such as the download of a checkpoint from the mirror."""

from __future__ import annotations

import time
from pathlib import Path

import fsspec
import pytest
import torch

from pipeline.checkpoint.mirror import Mirror
from pipeline.distributed import peers
from pipeline.distributed.peers import LostRank, work_on_main
from pipeline.distributed.timing import Phases
from pipeline.distributed.world import World
from tests.launch import run
from tests.thread_world import on_ranks


@pytest.mark.slow
def test_the_others_wait_for_longer_than_a_collective_may_take() -> None:
    """Regression test: a download on rank 0 that took longer ended the other ranks."""
    run("tests.dist.patient_start", ranks=2)


@pytest.mark.parametrize("ends", ["it dies", "it makes no progress"])
def test_the_others_do_not_wait_for_a_rank_that_is_lost(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "WORK_SECONDS", 0.02)
    monkeypatch.setattr(peers, "WORK_LOST_AFTER", 1.0)

    def program(world: World) -> str:
        if world.is_main and ends == "it dies":
            return ""
        object.__setattr__(world, "phases", Phases(torch.device("cpu")))
        try:
            work_on_main(lambda: time.sleep(3.0), world=world, minutes=0.001)
        except LostRank as error:
            return f"{error.exit_code}: {error}"
        return ""

    main, other = on_ranks(2, program)
    assert main == ""
    assert other.startswith("76: Rank 0 has ended or hangs while this rank, 1, waits for it")


def test_an_error_of_rank_0_ends_the_wait() -> None:
    def program(world: World) -> str:
        try:
            work_on_main(lambda: 1 // 0, world=world, minutes=1)
        except ZeroDivisionError:
            return "failed"
        return "went on"

    assert on_ranks(2, program) == ["failed", "went on"]


def test_every_block_of_a_download_is_progress(tmp_path: Path) -> None:
    noted: list[float] = []
    mirror = Mirror("memory://progress", tmp_path / "run", progress=lambda: noted.append(0.0))
    files = fsspec.filesystem("memory")
    files.pipe_file("/progress/run/checkpoints/x", bytes(100))
    mirror._files.get_file("x", str(tmp_path / "x"), callback=mirror._downloaded)
    assert noted

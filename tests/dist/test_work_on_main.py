"""Ranks that wait at the start for the work of rank 0, such as the download of a checkpoint from the mirror."""

from __future__ import annotations

import fsspec
import pytest
import torch

from pipeline.checkpoint.mirror import Mirror
from pipeline.distributed.timing import Phases
from pipeline.distributed.world import World
from pipeline.errors import UserError
from tests.thread_world import on_ranks


def test_the_others_wait_for_the_work_of_rank_0_or_its_error():
    """As the heartbeats see it, rank 0 is behind meanwhile, so that it is named if it makes no progress."""

    def program(world: World) -> tuple[tuple[str, int] | None, int, str]:
        object.__setattr__(world, "phases", Phases(torch.device("cpu")))
        assert world.phases is not None
        marks = lambda: world.phases.latest.count  # noqa: E731
        done, error = world.work_on_main(lambda: ("done", marks())), ""
        try:
            world.work_on_main(lambda: 1 // 0)
        except ZeroDivisionError:
            error = "failed"
        return done, marks(), error

    assert on_ranks(2, program) == [(("done", 0), 4, "failed"), (None, 4, "")]


def test_an_error_that_the_user_can_fix_is_raised_on_every_rank():
    def program(world: World) -> str:
        def work() -> None:
            raise UserError("the folder is full")

        with pytest.raises(UserError, match="the folder is full"):
            world.work_on_main(work)
        return "raised"

    assert on_ranks(2, program) == ["raised"] * 2


def test_every_block_of_a_download_is_progress(tmp_path):
    noted: list[float] = []
    mirror = Mirror("memory://progress", tmp_path / "run", progress=lambda: noted.append(0.0))
    files = fsspec.filesystem("memory")
    files.pipe_file("/progress/run/checkpoints/x", bytes(100))
    mirror._files.get_file("x", str(tmp_path / "x"), callback=mirror._downloaded)
    assert noted

"""Ranks that wait at the start for the work of rank 0, such as the download of a checkpoint from the mirror."""

from __future__ import annotations

import fsspec
import torch

from pipeline.checkpoint.mirror import Mirror
from pipeline.distributed.timing import Phases
from pipeline.distributed.world import World
from tests.thread_world import on_ranks


def test_the_others_wait_for_the_work_of_rank_0_or_its_error():
    """As the heartbeats see it, rank 0 is behind, so that it is named if it makes no progress."""

    def program(world: World) -> tuple[str | None, int, str]:
        object.__setattr__(world, "phases", Phases(torch.device("cpu")))
        assert world.phases is not None
        done, error = world.work_on_main(lambda: "done"), ""
        try:
            world.work_on_main(lambda: 1 // 0)
        except ZeroDivisionError:
            error = "failed"
        return done, world.phases.latest.count, error

    assert on_ranks(2, program) == [("done", 0, "failed"), (None, 2, "")]


def test_every_block_of_a_download_is_progress(tmp_path):
    noted: list[float] = []
    mirror = Mirror("memory://progress", tmp_path / "run", progress=lambda: noted.append(0.0))
    files = fsspec.filesystem("memory")
    files.pipe_file("/progress/run/checkpoints/x", bytes(100))
    mirror._files.get_file("x", str(tmp_path / "x"), callback=mirror._downloaded)
    assert noted

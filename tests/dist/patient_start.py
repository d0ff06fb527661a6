"""Rank 0 works at the start for longer than a collective may take, as at the download of a large checkpoint.

python -m tests.dist.patient_start
"""

from __future__ import annotations

import time

from pipeline.distributed.peers import work_on_main
from pipeline.distributed.start import start_world
from pipeline.distributed.world import leave

LIMIT, SECONDS = 3.0, 8.0


def main() -> None:
    with start_world(timeout_minutes=LIMIT / 60, device="cpu") as world:

        def work() -> str:
            for _ in range(int(SECONDS)):
                time.sleep(1.0)
                world.progress()
            return "done"

        found = work_on_main(work, world=world, minutes=LIMIT / 60)
        assert found == ("done" if world.is_main else None)
        assert world.gather_objects(world.rank) == list(range(world.size))


if __name__ == "__main__":
    main()
    leave(0)

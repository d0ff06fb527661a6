"""Program run on each rank by `test_data_ranks`: load, stop, resume, and save the sample ids of each scenario."""

import json
import sys
from pathlib import Path

from pipeline.distributed.start import start_world
from pipeline.distributed.world import leave
from pipeline.errors import UserError
from tests.shards import open_loader

BATCH, STREAMS = 12, 6


def make_loader(folder, world, **options):
    settings = {"streams": STREAMS, "shuffle_buffer": 7, "corrupt_limit": 0.3, **options}
    return open_loader(folder, world=world, batch=BATCH, image_size=8, **settings)


def steps(loader, count):
    return [next(loader).sample_id.tolist() for _ in range(count)]


def order_and_resume(folder, world):
    with make_loader(folder, world, workers=2) as loader:
        first = steps(loader, 7)
        state = loader.state_dict()
    with make_loader(folder, world, workers=1) as loader:
        loader.load_state_dict(state)
        second = steps(loader, 8)
        return {"ids": first + second, "state": loader.state_dict(), "middle": state}


def limit(folder, world):
    """Delete a shard after the first batch."""
    with make_loader(folder, world, workers=0, shuffle_buffer=1, corrupt_limit=0.01) as loader:
        shown = steps(loader, 1)
        world.barrier()
        (folder / "00001.tar").unlink(missing_ok=True)
        world.barrier()
        try:
            for _ in range(loader.steps_per_epoch * 2):
                shown += steps(loader, 1)
                loader.report()
        except UserError as error:
            return {"stopped": str(error), "ids": shown}
    return {}


SCENARIOS = {"order": order_and_resume, "limit": limit}


def main(out):
    """Run the scenarios on the shards in `out`/SCENARIO."""
    with start_world(device="cpu", timeout_minutes=2) as world:
        results = {name: scenario(out / name, world) for name, scenario in SCENARIOS.items()}
        (out / f"{world.rank}.json").write_text(json.dumps(results, default=str))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave(0)

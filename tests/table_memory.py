"""Print how much memory writing a per-sample table to a checkpoint adds, as a share of the table's size.

The table is written in blocks, as the trainer does, or cloned first (`--clone`). Peak memory is that of a process, so
each way needs a process of its own.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path

import torch

from pipeline.checkpoint.writer import CheckpointConfig, CheckpointWriter, Snapshot
from pipeline.distributed.world import World
from pipeline.model.towers import ModelConfig, build_towers
from pipeline.objectives.sample_table import PerSampleTable

COLUMNS = ("image_log_u", "text_log_u", "image_tau", "text_tau")
ROWS = 2**25


def main(folder: Path, *, clone: bool) -> None:
    _, architecture = build_towers(ModelConfig(), seed=0, device="meta")
    table = PerSampleTable(dict.fromkeys(COLUMNS, 0.5), dataset_size=ROWS, world=World(), device=torch.device("cpu"))
    table.values.normal_()
    events: list[str] = []
    writer = CheckpointWriter(
        folder, config=CheckpointConfig(keep_last=1), world=World(), architecture=architecture, on_event=events.append
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    blocks = [table.owned().clone()] if clone else table.snapshot()
    writer.save(Snapshot(1, {"logit_scale": torch.tensor(0.0)}, {}, 0, {}, {"per_sample": (0, blocks)}, (0.0, 0.0), {}))
    generator = torch.Generator().manual_seed(0)
    while not events:  # rows change while they are written
        table.lookup(torch.randint(ROWS, (4096,), generator=generator))
        table.write(torch.randn(4096, len(COLUMNS), generator=generator))
        time.sleep(0.05)
    writer.wait()
    assert "written" in events[0], events
    added = 2**10 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    print(added / (ROWS * len(COLUMNS) * 4))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary), clone="--clone" in sys.argv)

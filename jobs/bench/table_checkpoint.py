"""Peak memory and time of writing a per-sample table to a checkpoint: in blocks or as one clone.

    python -m jobs.bench.table_checkpoint                        # 32 million rows of 4 columns: 512 MiB
    python -m jobs.bench.table_checkpoint --rows 125000000       # a rank's share of a billion samples on 8 ranks

Each variant runs in its own process, which fills a table, writes a whole checkpoint with the trainer's writer while
rows keep changing, and prints the growth of its peak resident memory. `share` is relative to the table's size.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COLUMNS = ("image_log_u", "text_log_u", "image_tau", "text_tau")
WAYS = ("blocks", "clone")
MIB = 2**20


def measure(rows: int, way: str, folder: Path) -> tuple[float, float]:
    """Increase of peak memory after the table was filled, in MiB, and seconds until the checkpoint was published."""
    import torch

    from pipeline.checkpoint.writer import CheckpointConfig, CheckpointWriter, Snapshot
    from pipeline.distributed.world import World
    from pipeline.model.towers import ModelConfig, build_towers
    from pipeline.objectives.sample_table import PerSampleTable

    _, architecture = build_towers(ModelConfig(), seed=0, device="meta")
    table = PerSampleTable(dict.fromkeys(COLUMNS, 0.5), dataset_size=rows, world=World(), device=torch.device("cpu"))
    table.values.normal_()
    events: list[str] = []
    config = CheckpointConfig(keep_last=1)
    writer = CheckpointWriter(folder, config=config, world=World(), architecture=architecture, on_event=events.append)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    blocks = table.snapshot() if way == "blocks" else [table.owned().clone()]
    weights = {"logit_scale": torch.tensor(0.0)}
    writer.save(Snapshot(1, weights, {}, 0, {}, {"per_sample": (0, blocks)}, (0.0, 0.0), {}))
    generator = torch.Generator().manual_seed(0)
    while not events:
        table.lookup(torch.randint(rows, (4096,), generator=generator))
        table.write(torch.randn(4096, len(COLUMNS), generator=generator))
        time.sleep(0.05)
    seconds = time.perf_counter() - start
    writer.wait()
    assert "written" in events[0], events
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2**25)
    parser.add_argument("--folder", help="where to write the checkpoint; default: a temporary folder")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            print(*measure(args.rows, args.way, Path(folder)))
        return
    size = args.rows * len(COLUMNS) * 4 / MIB
    print(f"{args.rows:,} rows of {len(COLUMNS)} columns: {size:,.0f} MiB")
    for way in WAYS:
        command = [sys.executable, "-m", "jobs.bench.table_checkpoint", "--rows", str(args.rows), "--way", way]
        command += ["--folder", args.folder] if args.folder else []
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        extra, seconds = map(float, done.stdout.split()[-2:])
        print(f"{way:<8}peak memory +{extra:,.0f} MiB, share {extra / size:.2f}, written after {seconds:.1f} s")


if __name__ == "__main__":
    main()

"""Cost of resuming: seconds to the first batch and bytes read, at several points of an epoch.

    python -m jobs.bench.data_resume

Bytes are those this process reads from the system (rchar of /proc/self/io), whether cached or not. Each case runs on
local shards and on the same shards behind a pipe, which must be read from the start.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from jobs.bench.loader import make_shards
from pipeline.data.data_config import DataConfig
from pipeline.data.loading.accounting import Position
from pipeline.data.loading.loader import build_loader
from pipeline.data.loading.resume import save_position
from pipeline.data.shards.manifest_format import load_manifest, make_manifest
from pipeline.data.shards.storage import open_shard
from pipeline.distributed.world import World

BATCH, STREAMS, BUFFER, PIXELS = 64, 8, 200, 64


def no_tokens(texts: list[str]) -> Tensor:
    return torch.zeros((len(texts), 1), dtype=torch.int64)


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def first_batch(folder: Path, *, share: float) -> tuple[float, int, int]:
    """Resume at a fraction of an epoch. Returns seconds and bytes to the first batch, and the number of that batch."""
    config = DataConfig(sources=str(folder), streams=STREAMS, shuffle_buffer=BUFFER, workers=0)  # type: ignore[arg-type]
    loader = build_loader(config, world=World(), global_batch=BATCH, seed=0, image_size=PIXELS, tokenize=no_tokens)
    position = Position(epoch=3, batch=int(share * (loader.steps_per_epoch - 1)))
    state = save_position(position, loader._dataset, world=World())
    before, start = bytes_read(), time.perf_counter()
    loader.load_state_dict(state)
    next(loader)
    seconds, count = time.perf_counter() - start, bytes_read() - before
    loader.close()
    return seconds, count, position.batch


def piped(folder: Path, out: Path) -> Path:
    """Write a manifest of the same shards as `pipe:` commands, whose output this process reads and counts, too."""
    rows = [(f"pipe:cat {folder / s.name}", s.samples, s.bytes, s.sha256) for s in load_manifest(folder).shards]
    make_manifest(rows).save(out)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--shard-samples", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        folder = make_shards(Path(one), shards=options.shards, samples=options.shard_samples, shorter=112)
        manifest = load_manifest(folder)
        total = manifest.bytes
        for shard in manifest.shards:
            with open_shard(manifest.url(shard)) as file:
                while file.read(1 << 20):
                    pass
        print(
            f"{manifest.n} samples in {len(manifest.shards)} shards, {total / 1e6:.0f} MB; {STREAMS} streams, "
            f"buffer {BUFFER}, so about {BUFFER * STREAMS * total / manifest.n / 1e6:.0f} MB are read again"
        )
        for label, source in (("local", folder), ("pipe", piped(folder, Path(other)))):
            for share in (0.0, 0.25, 0.5, 0.75, 1.0):
                seconds, count, batch = first_batch(source, share=share)
                print(
                    f"{label:6s} batch {batch:4d}: {seconds:6.3f} s to the first batch, {count / 1e6:7.1f} MB read "
                    f"({count / total:.1%} of the data)",
                    flush=True,
                )


if __name__ == "__main__":
    main()

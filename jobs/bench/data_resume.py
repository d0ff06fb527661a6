"""Cost of resuming: CPU seconds to the first batch and bytes read, at several points of an epoch.

    python -m jobs.bench.data_resume
    python -m jobs.bench.data_resume --streams 4 16 --buffer 1000 500 --shard-samples 5000

Several numbers of streams and buffers are compared pair by pair; a worker of a run has data.streams / ranks / workers
streams. The buffers' memory is that of their encoded samples after 200 batches. Bytes are those that this process reads
from the system (rchar of /proc/self/io), whether cached or not. Each case runs with local shards and with the same
shards behind a pipe, which must be read from its start.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from jobs.bench.loader import make_shards
from pipeline.data.data_config import DataConfig
from pipeline.data.loading.accounting import Position
from pipeline.data.loading.loader import Loader, build_loader
from pipeline.data.loading.resume import save_position
from pipeline.data.loading.stream_reader import StreamReader
from pipeline.data.shards.manifest_format import load_manifest, make_manifest
from pipeline.data.shards.storage import open_shard
from pipeline.distributed.world import World

BATCH, PIXELS, FILLED = 64, 64, 200
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def no_tokens(texts: list[str]) -> Tensor:
    return torch.zeros((len(texts), 1), dtype=torch.int64)


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def start(folder: Path, *, streams: int, buffer: int) -> Loader:
    config = DataConfig(sources=str(folder), streams=streams, shuffle_buffer=buffer, workers=0)  # type: ignore[arg-type]
    return build_loader(config, world=World(), global_batch=BATCH, seed=0, image_size=PIXELS, tokenize=no_tokens)


def buffered_bytes(loader: Loader) -> int:
    """Encoded samples in the shuffle buffers after some batches."""
    kept: list[StreamReader] = []
    original = StreamReader.__init__

    def remember(self: StreamReader, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        kept.append(self)

    with patch.object(StreamReader, "__init__", remember):
        for _ in range(min(FILLED, loader.steps_per_epoch // 2)):
            next(loader)
    return sum(reader.kept_bytes for reader in kept)


def first_batch(loader: Loader, *, share: float) -> tuple[float, int, int]:
    """CPU seconds and bytes to the first batch after resuming at a share of an epoch, and the batch's number."""
    position = Position(epoch=3, batch=int(share * (loader.steps_per_epoch - 1)))
    state = save_position(position, loader._dataset, world=World())
    before, begin = bytes_read(), time.process_time()
    loader.load_state_dict(state)
    next(loader)
    seconds, count = time.process_time() - begin, bytes_read() - before
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
    parser.add_argument("--streams", type=int, nargs="+", default=[8])
    parser.add_argument("--buffer", type=int, nargs="+", default=[200])
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
        print(f"{manifest.n} samples in {len(manifest.shards)} shards, {total / 1e6:.0f} MB")
        sources = (("local", folder), ("pipe", piped(folder, Path(other))))
        for streams, buffer in zip(options.streams, options.buffer, strict=True):
            with start(folder, streams=streams, buffer=buffer) as loader:
                kept = buffered_bytes(loader)
            print(f"{streams} streams, buffer {buffer}: {kept / 1e6:.1f} MB of encoded samples in the buffers")
            for label, source in sources:
                for share in SHARES:
                    seconds, count, batch = first_batch(start(source, streams=streams, buffer=buffer), share=share)
                    print(
                        f"  {label:6s} batch {batch:4d}: {seconds:6.3f} s CPU to the first batch, {count / 1e6:7.1f} "
                        f"MB read ({count / total:.1%} of the data)",
                        flush=True,
                    )


if __name__ == "__main__":
    main()

"""Time and memory of planning an epoch of a billion samples in 100,000 shards.

python -m jobs.bench.data_plan
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.data.data_config import DataConfig
from pipeline.data.order.canonical_order import Order, planned_ids
from pipeline.data.order.data_costs import plan_data
from pipeline.data.order.mixture import load_mixture, plan_epoch
from pipeline.data.order.streams import make_layout
from pipeline.data.shards.manifest_format import make_manifest

BATCH, STREAMS, BUFFER, RANKS = 32768, 512, 4000, 64


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


@contextmanager
def timed(label: str) -> Iterator[None]:
    start, before = time.perf_counter(), peak_megabytes()
    yield
    seconds, grown = time.perf_counter() - start, peak_megabytes() - before
    print(f"{label:58s} {seconds:8.3f} s   peak memory +{grown:6.0f} MB")


def write_manifest(folder: str, shards: int, samples: int) -> None:
    rows = [(f"{i:08d}.tar", samples - i % 97, 40_000 * samples, f"{i:064x}") for i in range(shards)]
    make_manifest(rows).save(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=100_000)
    parser.add_argument("--shard-samples", type=int, default=10_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        child = multiprocessing.get_context("spawn").Process(  # so that its memory is not counted here
            target=write_manifest, args=(folder, options.shards, options.shard_samples)
        )
        child.start()
        child.join()
        megabytes = (Path(folder) / "manifest.json").stat().st_size / 1e6
        print(
            f"{options.shards:,} shards, a manifest of {megabytes:.0f} MB; {peak_megabytes():.0f} MB in use at the "
            "start"
        )
        config = DataConfig(sources=str(Path(folder)), streams=STREAMS, shuffle_buffer=BUFFER)  # type: ignore[arg-type]
        with timed("read the manifest"):
            mixture = load_mixture(config)
        layout = make_layout(samples=mixture.epoch_samples, global_batch=BATCH, streams=STREAMS, ranks=RANKS)
        order = Order(mixture=mixture, layout=layout, seed=0, shuffle_buffer=BUFFER)
        print(
            f"{layout.samples:,} samples, {layout.steps:,} steps of {BATCH:,}; "
            f"{STREAMS} streams of {layout.stream_length:,}"
        )
        with timed("plan an epoch (permute and cut all shards)"):
            plan_epoch(mixture, seed=0, epoch=3)
        with timed("one stream: find where to resume in the middle"):
            order.stream(epoch=3, stream=5).resume(layout.stream_length // 2)
        with timed("one stream: the whole epoch, batch by batch"):
            stream, b = order.stream(epoch=3, stream=5), layout.rows
            for batch in range(layout.steps):
                stream.places(batch * b, (batch + 1) * b)
        with timed("all streams: the sample ids of one global batch"):
            planned_ids(order, epoch=3, first=layout.steps // 2, last=layout.steps // 2 + 1)
        with timed("neuclip plan"):
            plan_data(config, ranks=RANKS, global_batch=BATCH, image_size=224)


if __name__ == "__main__":
    main()

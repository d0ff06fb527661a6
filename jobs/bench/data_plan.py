"""Time and memory of planning an epoch of ten billion samples in a million shards, for all processes of a node.

    python -m jobs.bench.data_plan
    python -m jobs.bench.data_plan --shards 100000 --processes 4

The steps are timed in one process; "peak" is the increase of its peak memory. Then all processes of a node do
concurrently what ranks and workers do at startup. Their memory is reported as proportional set size, which divides
shared pages among the processes that use them: the difference between before loading and after all have loaded.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.data.data_config import DataConfig
from pipeline.data.order.canonical_order import Order, planned_ids
from pipeline.data.order.data_costs import plan_data
from pipeline.data.order.mixture import load_mixture, plan_epoch, shared_epoch
from pipeline.data.order.streams import make_layout
from pipeline.data.shards.manifest_format import MANIFEST_NAME, make_manifest

BATCH, STREAMS, BUFFER, RANKS, EPOCH = 32768, 1024, 4000, 64, 3


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def shared_megabytes() -> float:
    """Proportional set size of this process."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1000
    raise OSError("this kernel does not report proportional set sizes")


@contextmanager
def timed(label: str) -> Iterator[None]:
    start, cpu, before = time.perf_counter(), time.process_time(), peak_megabytes()
    yield
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    print(f"{label:55s} {seconds:8.3f} s ({cpu:6.3f} s CPU)   peak +{peak_megabytes() - before:4.0f} MB", flush=True)


def write_manifest(folder: str, shards: int, samples: int) -> None:
    rows = ((f"{i:08d}.tar", samples - i % 97, 40_000 * samples, f"{i:064x}") for i in range(shards))
    make_manifest(rows).save(folder)


def open_order(config: DataConfig) -> Order:
    mixture = load_mixture(config)
    layout = make_layout(samples=mixture.epoch_samples, global_batch=BATCH, streams=STREAMS, ranks=RANKS)
    return Order(mixture=mixture, layout=layout, seed=0, shuffle_buffer=BUFFER)


def one_process(config: DataConfig) -> None:
    """Time each step in one process, the first on the node."""
    print(f"{peak_megabytes():.0f} MB in use at the start")
    with timed("read the manifest for the first time on this node"):
        load_mixture(config)
    with timed("open it in another process"):
        order = open_order(config)
    layout = order.layout
    print(
        f"{layout.samples:,} samples, {layout.steps:,} steps of {BATCH:,}; "
        f"{STREAMS} streams of {layout.stream_length:,}"
    )
    with timed("plan an epoch (permute and cut all shards)"):
        plan_epoch(order.mixture, seed=0, epoch=EPOCH)
    with timed("the same, stored for the other processes"):
        shared_epoch(order.mixture, seed=0, epoch=EPOCH)
    with timed("the same, opened by another process"):
        shared_epoch(order.mixture, seed=0, epoch=EPOCH)
    with timed("one stream: find where to resume in the middle"):
        order.stream(epoch=EPOCH, stream=5).resume(layout.stream_length // 2)
    with timed("one stream: 1,000 batches"):
        stream, b = order.stream(epoch=EPOCH, stream=5), layout.rows
        for batch in range(1000):
            stream.places(batch * b, (batch + 1) * b)
    middle = layout.steps // 2
    with timed("one rank's streams: the sample ids of a batch"):
        planned_ids(order, epoch=EPOCH, first=middle, last=middle + 1, streams=range(STREAMS // RANKS))
    with timed("all streams: the sample ids of a batch"):
        planned_ids(order, epoch=EPOCH, first=middle, last=middle + 1)
    with timed("neuclip plan"):
        plan_data(config, ranks=RANKS, global_batch=BATCH, image_size=224)


def node_process(config: DataConfig, number: int, barrier: Any, results: Any) -> None:
    """Do what a rank or worker does at startup: open the order and find the first shards of its streams."""
    before = shared_megabytes()
    barrier.wait()
    start = time.perf_counter()
    order = open_order(config)
    segments = shared_epoch(order.mixture, seed=0, epoch=EPOCH)
    for stream in range(number, STREAMS, RANKS):
        shard, _, _ = segments.locate(stream * order.layout.stream_length)
        order.mixture.manifest.url(order.mixture.manifest.shards[shard])
    seconds = time.perf_counter() - start
    barrier.wait()  # wait until all processes have mapped the files
    results.put((shared_megabytes() - before, seconds))
    barrier.wait()


def node(config: DataConfig, processes: int) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(processes), context.Queue()
    children = [
        context.Process(target=node_process, args=(config, number, barrier, results)) for number in range(processes)
    ]
    for child in children:
        child.start()
    grown, seconds = zip(*(results.get() for _ in children), strict=True)
    for child in children:
        child.join()
    print(
        f"{processes} processes of a node: +{sum(grown):.0f} MB in all, +{max(grown):.0f} MB at most in one; "
        f"{max(seconds):.2f} s until the last is ready"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=1_000_000)
    parser.add_argument("--shard-samples", type=int, default=10_048)
    parser.add_argument("--processes", type=int, default=16, help="ranks and workers of the node")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = folder  # inherited by the processes below, so that their files are removed at the end
        config = DataConfig(sources=folder, streams=STREAMS, shuffle_buffer=BUFFER)  # type: ignore[arg-type]

        def run(target: Any, *args: Any) -> None:
            child = context.Process(target=target, args=args)
            child.start()
            child.join()
            if child.exitcode:
                raise SystemExit(f"{target.__name__} failed.")

        run(write_manifest, folder, options.shards, options.shard_samples)
        size = (Path(folder) / MANIFEST_NAME).stat().st_size / 1e6
        print(f"{options.shards:,} shards, a manifest of {size:.0f} MB", flush=True)
        run(one_process, config)
        node(config, options.processes)


if __name__ == "__main__":
    main()

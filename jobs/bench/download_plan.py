"""What large downloads cost besides the network: planning a table of URLs, and 1,000 workers on one shared folder.

    TMPDIR=/data python -m jobs.bench.download_plan --rows 10000000
    TMPDIR=/dev/shm python -m jobs.bench.download_plan --workers 1000

The table's parts are links to one parquet file with a million random URLs, captions and uids. The workers are threads
that all work at the same time, with the locks and files of `neuclip download`, but without requests. A tenth of them
die between two steps of publishing, and return twice at once, so that one of the two is refused.
(`tests/e2e/test_ingest_crashes.py` has real kills.)
"""

from __future__ import annotations

import os
import random
import resource
import tempfile
import threading
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.dataset import shard_commit
from data_prep.dataset.dataset_folder import Folder
from data_prep.dataset.manifest_writer import write_manifest
from data_prep.dataset.sessions import shared_lock, worker_lock
from data_prep.dataset.shard_plan import Plan, make_plan, read_shard
from data_prep.fetching.shard_writer import ShardWriter
from data_prep.settings.download_config import SubsetConfig
from data_prep.settings.source_config import SourceConfig
from pipeline.errors import UserError

PART_ROWS, SHARDS_EACH, ROWS_EACH = 1_000_000, 3, 2


def write_table(folder: Path, rows: int) -> None:
    """A table in parts of up to a million rows."""
    draw, here = np.random.default_rng(0), min(rows, PART_ROWS)
    numbers, words = draw.bytes(32 * here).hex(), [f"{word:x}" for word in draw.integers(0, 1 << 20, 60_000)]
    lengths, chosen = draw.integers(4, 16, here), draw.integers(0, len(words), (here, 16))
    urls = [f"https://{k % 20_011}.example.org/{numbers[64 * k : 64 * k + 32]}.jpg" for k in range(here)]
    captions = [" ".join(words[w] for w in chosen[k, : lengths[k]]) for k in range(here)]
    uids = [numbers[64 * k + 32 : 64 * k + 64] for k in range(here)]
    folder.mkdir(parents=True)
    table = pa.table({"url": urls, "caption": captions, "uid": uids})
    pq.write_table(table, folder / "00000.parquet", row_group_size=100_000)
    for part in range(1, rows // here):
        os.link(folder / "00000.parquet", folder / f"{part:05d}.parquet")


def plan_of(root: Path, shard_size: int, peaks: dict[int, float]) -> Plan:
    """Plan root/table; `peaks` gets the largest memory in MB so far, by millions of rows."""

    def measure(rows: int) -> None:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        peaks[rows // PART_ROWS] = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1e3

    folder, source = Folder(root / "data"), SourceConfig(table=str(root / "table"), uid="uid")
    folder.make()
    return make_plan(folder, source, SubsetConfig(), shard_size=shard_size, on_rows=measure)


def plan_here(pipe: Connection, settings: dict[str, Path]) -> None:
    """In a process of its own: answers with wall and CPU seconds, and memory after the first million rows and all."""
    pipe.send(None)
    pipe.recv()
    began, cpu, peaks = time.perf_counter(), time.process_time(), dict[int, float]()
    plan_of(settings["root"], 10_000, peaks)
    pipe.send((time.perf_counter() - began, time.process_time() - cpu, peaks[1], max(peaks.values())))


class Killed(BaseException):
    """A simulated death."""


class Workers:
    """`count` threads that share a folder; each owns every `count`th shard."""

    def __init__(self, root: Path, count: int) -> None:
        write_table(root / "table", count * SHARDS_EACH * ROWS_EACH)
        self.root, self.count, self.plan = root / "data", count, plan_of(root, ROWS_EACH, {})
        self.begun, self.lost, self.refused = Counter[int](), Counter[int](), 0
        self.locking, self.listing = list[float](), list[float]()
        self._steps, flush = threading.local(), shard_commit.flush

        def step(path: Path) -> None:
            self._steps.left -= 1
            if self._steps.left == 0:
                raise Killed
            flush(path)

        shard_commit.flush = step  # type: ignore[assignment]

    def run(self) -> int:
        """Let all workers run, and the dead ones return; the number that died."""
        draw = random.Random(0)
        doomed = {worker: draw.randrange(1, 20) for worker in draw.sample(range(self.count), self.count // 10)}
        for lives in ([(k, doomed.get(k, 0)) for k in range(self.count)], [(k, 0) for k in doomed for _ in range(2)]):
            together = threading.Barrier(len(lives))
            threads = [threading.Thread(target=self._work, args=(*life, together)) for life in lives]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert all(self.begun[shard] == 1 + self.lost[shard] for shard in range(self.plan.shards)), "not exactly once"
        assert write_manifest(Folder(self.root), self.plan).n == self.plan.rows
        return len(doomed)

    def _work(self, worker: int, dies_at: int, together: threading.Barrier) -> None:
        folder, self._steps.left = Folder(self.root, worker), dies_at
        own = range(worker, self.plan.shards, self.count)
        together.wait()
        began = time.perf_counter()
        try:
            folder.make()
            with shared_lock(folder, self.count), worker_lock(folder):
                self.locking.append(time.perf_counter() - began)
                shard_commit.recover(folder, own)
                for shard in sorted(set(own) - set(folder.finished())):
                    self._publish(folder, shard)
                    began = time.perf_counter()
                    folder.finished()
                    self.listing.append(time.perf_counter() - began)
        except UserError:
            self.refused += 1
        except Killed:
            pass

    def _publish(self, folder: Folder, shard: int) -> None:
        self.begun[shard] += 1
        rows = read_shard(folder, shard).to_pylist()
        writer = ShardWriter(shard, folder, self.plan, rows=rows, encode_format="jpg", kept={}, on_failure=lambda: None)
        for row in rows:
            facts = dict.fromkeys(("width", "height", "original_width", "original_height"), 256)
            writer.write(b"\xff\xd8\xff", "", row["caption"], {**row, **facts, "error_message": None})
        try:
            writer.close()
        except Killed:
            self.lost[shard] += not (folder.commit(shard).exists() or folder.record(shard).exists())
            raise


def main(argv: list[str] | None = None) -> None:
    from jobs.bench import harness  # here, so that the process whose memory is measured does not import torch

    parser = harness.parser(__doc__, rounds=1)
    parser.add_argument("--rows", type=int, default=0, help="rows to plan: millions")
    parser.add_argument("--workers", type=int, default=0, help="simulated workers")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        if args.rows:
            write_table(root / "plan/table", args.rows)
            answer = harness.Child("the plan", plan_here, {"root": root / "plan"}).ask("plan")
            size = sum(path.stat().st_size for path in (root / "plan/data/plan").iterdir())
            names = ("seconds", "CPU s", "MB at 1M", "MB at most", "bytes/row")
            rows = {f"{args.rows:,} rows": [*answer, size / args.rows]}
            harness.show("Planning", dict.fromkeys(names, ".0f"), rows, output=args.json)
        if args.workers:
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            workers, began = Workers(root / "workers", args.workers), time.perf_counter()
            head = f"{args.workers:,} workers, {workers.plan.shards:,} shards, every one published once; "
            head += f"{workers.run()} deaths, {workers.refused} refused, {time.perf_counter() - began:.0f} s"
            times = {"taking the locks": workers.locking, "listing the shards": workers.listing}
            found = {name: [1e3 * median(values), 1e3 * max(values)] for name, values in times.items()}
            harness.show(head, {"median ms": ".0f", "max ms": ".0f"}, found, output=args.json)


if __name__ == "__main__":
    main()

"""img2dataset as the engine: its downloader, resizer and distributors, with our rows as input and our shards as output.

Runs in its own process and process group (`main`), so that img2dataset's workers, prints and signal handlers do not
affect the program that supervises it. It exits, with all its workers, when that program is gone for any reason.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from img2dataset.distributor import multiprocessing_distributor, pyspark_distributor, ray_distributor
from img2dataset.downloader import Downloader

from data_prep import reasons
from data_prep.dataset.dataset_folder import Folder, key_of, names_of
from data_prep.dataset.locks import engine_lock
from data_prep.dataset.shard_files import Rows, settled_rows
from data_prep.dataset.shard_plan import Plan, load_plan, read_shard
from data_prep.fetching.decoder import Decoder
from data_prep.fetching.opener import Opener
from data_prep.fetching.shard_writer import ShardWriter
from data_prep.fetching.supervisor import Mode
from data_prep.settings.download_config import DownloadConfig, FetchConfig, GuardConfig, ImageConfig
from pipeline.config import parse
from pipeline.errors import UserError
from pipeline.files import write_json

DISTRIBUTORS = {
    "multiprocessing": multiprocessing_distributor,
    "pyspark": pyspark_distributor,
    "ray": ray_distributor,
}
# Shards per Spark job.
_SPARK_SHARDS = 1000
_LOOPBACK = "127.0.0.1"
# Only shard names pass through Ray's store; by default it would take 30% of the machine's memory.
_RAY_STORE_BYTES = 100_000_000


@dataclass(frozen=True)
class Job:
    """The job of one engine process."""

    config: DownloadConfig
    folder: Folder
    plan: Plan
    mode: Mode = "fetch"


class ShardDownloader(Downloader):
    """img2dataset's downloader for our job: installs the guarded opener, and publishes through ShardWriter."""

    def __init__(self, job: Job) -> None:
        self._job = job
        source, fetch = job.config.source, job.config.fetch
        hash_kind = source.hash_kind if source.hash else None
        columns = ["row", *(["blur"] if source.blur else []), "caption", *([hash_kind] if hash_kind else []), "url"]
        super().__init__(
            sample_writer_class=None,
            resizer=None,  # each worker process has its own decoder
            thread_count=fetch.threads,
            save_caption=True,
            extract_exif=False,
            output_folder=str(job.folder.staging),
            column_list=columns,
            timeout=fetch.timeout,
            number_sample_per_shard=job.plan.shard_size,
            oom_shard_count=5,
            compute_hash=hash_kind or "sha256",
            verify_hash_type=hash_kind,
            encode_format=job.config.image.encode_format,
            retries=0,  # the opener retries, and only transient failures
            user_agent_token=job.config.guard.user_agent,
            disallowed_header_directives=None,  # the opener honours them, before the body is read
            blurring_bbox_col="blur" if source.blur else None,
        )

    def download_shard(self, row: tuple[int, str]) -> None:
        """Fetch one shard's rows (img2dataset's own method) and publish the result.

        What only the user can mend is reported to the supervisor: another engine would meet it again.
        """
        try:
            with engine_lock(self._job.folder):
                self._download_shard(*row)
        except UserError as error:
            write_json(self._job.folder.staging / f"{row[0]:05d}.live", {"refusal": str(error)})
            raise

    def _download_shard(self, shard: int, path: str) -> None:
        job = self._job
        opener = _cached_opener(job.config.guard, job.config.fetch)
        urllib.request.install_opener(opener)  # type: ignore[arg-type]
        table = read_shard(job.folder, shard)
        rows = table.to_pylist()
        kept = settled_rows(job.folder, shard) if job.mode == "retry" else _unverifiable(rows, job.config)
        opener.begin(_blocked(rows, job.folder))
        decoder = _cached_decoder(job.config.image, job.config.guard, job.config.fetch, bool(job.config.source.blur))
        writer = ShardWriter(
            shard,
            job.folder,
            job.plan,
            rows=rows,
            encode_format=job.config.image.encode_format,
            kept=kept,
            on_failure=opener.close,
            is_transparent=lambda: decoder.is_transparent,
        )
        if job.mode == "fetch":
            writer.outcomes[reasons.NO_HASH] += len(kept)
        asked = table.filter(pa.array([row["row"] not in kept for row in rows], pa.bool_()))
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, asked.schema) as stream:
            stream.write_table(asked)
        self.sample_writer_class = lambda *_: writer  # img2dataset would make one from a class and arguments
        self.resizer = decoder
        try:
            super().download_shard((shard, path))
        except Exception:
            if not writer.is_published:  # else only img2dataset's own statistics could not be written
                raise
        (job.folder.staging / f"{shard:05d}_stats.json").unlink(missing_ok=True)


def run(job: Job, shards: list[int]) -> None:
    """Fetch shards with the chosen distributor."""
    fetch = job.config.fetch
    with _cluster(fetch):
        # The path of each shard's rows, which the worker itself writes.
        rows = ((shard, str(job.folder.staging / f"{shard:05d}.arrow")) for shard in shards)
        distribute = DISTRIBUTORS[fetch.distributor]
        processes = min(fetch.processes, len(shards))  # one that has no shard would import for seconds
        distribute(processes, ShardDownloader(job), rows, _SPARK_SHARDS, 1)


@contextmanager
def _cluster(fetch: FetchConfig) -> Iterator[None]:
    """Join the given cluster, or start one on this machine; img2dataset uses the existing session.

    A cluster started here listens on the loopback address only and serves no web UI.
    """
    if fetch.distributor == "pyspark":
        from pyspark.sql import SparkSession

        session = SparkSession.builder.master(fetch.master or f"local[{fetch.processes}]").appName("neuclip download")
        if not fetch.master:
            own: dict[str, Any] = {
                "spark.driver.host": _LOOPBACK,
                "spark.driver.bindAddress": _LOOPBACK,
                "spark.ui.enabled": "false",
            }
            session = session.config(map=own)
        with session.getOrCreate():
            yield
    elif fetch.distributor == "ray":
        import ray

        if fetch.master:
            ray.init(address=fetch.master)
        else:
            ray.init(
                num_cpus=fetch.processes,
                include_dashboard=False,
                object_store_memory=_RAY_STORE_BYTES,
                _node_ip_address=_LOOPBACK,
            )
        try:
            yield
        finally:
            ray.shutdown()
    else:
        yield


def main(path: str) -> None:
    """Do the job in a JSON file, for as long as the process that started this one lives."""

    def watch() -> None:
        sys.stdin.read()  # to its end, when that process is gone
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    # Spark's workers otherwise take whichever python3 comes first on the PATH.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    tree: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    config = parse(DownloadConfig, tree["config"])
    folder = Folder(Path(config.output), config.fetch.worker)
    with engine_lock(folder):
        run(Job(config, folder, load_plan(folder), mode=tree["mode"]), tree["shards"])


@functools.cache
def _cached_decoder(image: ImageConfig, guard: GuardConfig, fetch: FetchConfig, has_boxes: bool) -> Decoder:
    return Decoder(image, max_pixels=guard.max_pixels, fetch=fetch, has_boxes=has_boxes)


@functools.cache
def _cached_opener(guard: GuardConfig, fetch: FetchConfig) -> Opener:
    """This process's opener, which keeps its state of each host between shards."""
    connections = max(1, guard.host_connections // fetch.processes)
    return Opener(guard, connections=connections, retries=fetch.retries, total_seconds=fetch.total_timeout)


def _unverifiable(rows: list[dict[str, Any]], config: DownloadConfig) -> Rows:
    """The outcomes of rows that lack the hash by which they would be verified."""
    return {
        row["row"]: {**row, "key": key_of(row["row"]), "status": "failed", "reason": reasons.NO_HASH, "error": None}
        for row in rows
        if config.source.hash and not row[config.source.hash_kind]
    }


def _blocked(rows: list[dict[str, Any]], folder: Folder) -> dict[str, str]:
    """URLs that are not requested, with the reason. If a removed URL is in a kept row as well, the writer decides."""
    removed = folder.removed_names()
    out = [not removed.isdisjoint(names_of(row)) for row in rows] if removed else [False] * len(rows)
    kept = {row["url"] for row, is_out in zip(rows, out, strict=True) if not is_out}
    gone = {row["url"] for row, is_out in zip(rows, out, strict=True) if is_out} - kept
    return dict.fromkeys(gone, reasons.REMOVED)

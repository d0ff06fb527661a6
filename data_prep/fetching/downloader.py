"""img2dataset as the engine: its downloader, resizer and distributors; our rows go in and our shards come out.

Runs in a process of its own (`python -m data_prep.fetching.fetch_process job.json`), so that img2dataset's workers,
prints and signal handlers do not affect the program that supervises it.
"""

from __future__ import annotations

import dataclasses
import functools
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from typing import Any

import pyarrow as pa

from data_prep import reasons
from data_prep.dataset.dataset_folder import Folder, names_of
from data_prep.dataset.shard_plan import Plan, read_shard
from data_prep.fetching.import_stubs import stand_ins
from data_prep.fetching.opener import Opener
from data_prep.fetching.shard_writer import ShardWriter
from data_prep.settings.download_config import DownloadConfig, FetchConfig, GuardConfig

with stand_ins("wandb", "webdataset"):
    from img2dataset.blurrer import BoundingBoxBlurrer
    from img2dataset.distributor import multiprocessing_distributor, pyspark_distributor, ray_distributor
    from img2dataset.downloader import Downloader, is_disallowed
    from img2dataset.resizer import Resizer

DISTRIBUTORS = {
    "multiprocessing": multiprocessing_distributor,
    "pyspark": pyspark_distributor,
    "ray": ray_distributor,
}
# Shards that one Spark job is handed at a time.
_SPARK_SHARDS = 1000
_LOOPBACK = "127.0.0.1"
# Only names of shards pass through Ray's store; by default it would take 30% of the machine's memory.
_RAY_STORE_BYTES = 100_000_000


@dataclass(frozen=True)
class Job:
    """What one engine process does: fetch these shards; in a retry only their rows that failed for a passing reason."""

    config: DownloadConfig
    folder: Folder
    plan: Plan
    shards: tuple[int, ...]
    retry: bool = False


class ShardReader:
    """What a distributor iterates over: `(shard, path of its rows)`; the rows are written by the worker itself."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __iter__(self) -> Iterator[tuple[int, str]]:
        for shard in self._job.shards:
            yield shard, str(self._job.folder.staging / f"{shard:05d}.arrow")


class ShardDownloader(Downloader):
    """img2dataset's downloader for our job: installs the guarded opener, and publishes through ShardWriter."""

    def __init__(self, job: Job) -> None:
        # Sent along with every task: the list of shards stays here.
        self._job = dataclasses.replace(job, shards=())
        source, fetch = job.config.source, job.config.fetch
        hash_kind = source.hash_kind if source.hash else None
        columns = ["row", *(["blur"] if source.blur else []), "caption", *([hash_kind] if hash_kind else []), "url"]
        super().__init__(
            sample_writer_class=None,
            resizer=make_resizer(job.config),
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
            retries=0,  # the opener retries, and only what may pass
            user_agent_token=job.config.guard.user_agent,
            disallowed_header_directives=list(job.config.guard.opt_outs) or None,
            blurring_bbox_col="blur" if source.blur else None,
        )

    def download_shard(self, row: tuple[int, str]) -> None:
        """Fetch one shard's rows (img2dataset's own method) and publish what came."""
        shard, path = row
        job = self._job
        opener = _opener_of(job.config)
        urllib.request.install_opener(opener)  # type: ignore[arg-type]
        table = read_shard(job.folder, shard)
        rows = table.to_pylist()
        opener.blocked = _blocked(rows, job.folder.removed_names())
        writer = ShardWriter(
            shard,
            job.folder,
            plan=job.plan.digest,
            rows=rows,
            encode_format=job.config.image.encode_format,
            retry=job.retry,
        )
        asked = table.filter(_passing_failures(job.folder, shard, table)) if job.retry else table
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, asked.schema) as stream:
            stream.write_table(asked)
        self.sample_writer_class = functools.partial(_given, writer)
        super().download_shard((shard, path))
        (job.folder.staging / f"{shard:05d}_stats.json").unlink(missing_ok=True)


def make_resizer(config: DownloadConfig) -> Resizer:
    """img2dataset's resizer with our image settings."""
    image = config.image
    return Resizer(
        image_size=image.size,
        resize_mode=image.resize_mode,
        resize_only_if_bigger=image.resize_only_if_bigger,
        encode_quality=image.encode_quality,
        encode_format=image.encode_format,
        skip_reencode=image.skip_reencode,
        min_image_size=image.min_size,
        max_image_area=config.guard.max_pixels,
        max_aspect_ratio=image.max_aspect_ratio,
        blurrer=BoundingBoxBlurrer() if config.source.blur else None,
    )


def run(job: Job) -> None:
    """Fetch the job's shards with the chosen distributor."""
    fetch = job.config.fetch
    with _cluster(fetch):
        distribute = DISTRIBUTORS[fetch.distributor]
        distribute(fetch.processes, ShardDownloader(job), ShardReader(job), _SPARK_SHARDS, 1)


@contextmanager
def _cluster(fetch: FetchConfig) -> Iterator[None]:
    """Join the cluster that was named, or start one on this machine; img2dataset uses the session it finds.

    A cluster of our own listens on the loopback address only, and has no pages of its own.
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


def _given(writer: ShardWriter, *_: Any) -> ShardWriter:
    """img2dataset makes its writer from a class and arguments of its own; ours is made already."""
    return writer


def _opener_of(config: DownloadConfig) -> Opener:
    """This process's opener: it keeps between shards what it learnt about hosts."""
    fetch = config.fetch
    connections = max(1, config.guard.host_connections // fetch.processes)
    return _cached_opener(config.guard, connections, fetch.retries, fetch.total_timeout)


@functools.cache
def _cached_opener(guard: GuardConfig, connections: int, retries: int, total_seconds: float) -> Opener:
    directives = set(guard.opt_outs)

    def is_opted_out(headers: Message) -> bool:
        return bool(directives) and is_disallowed(headers, guard.user_agent.lower(), directives)

    return Opener(
        guard, connections=connections, retries=retries, total_seconds=total_seconds, is_opted_out=is_opted_out
    )


def _blocked(rows: list[dict[str, Any]], removed: frozenset[str]) -> frozenset[str]:
    """URLs that no row of the shard may ask for any more; one that another row keeps is left to the writer."""
    if not removed:
        return removed
    out = [not removed.isdisjoint(names_of(row)) for row in rows]
    kept = {row["url"] for row, is_out in zip(rows, out, strict=True) if not is_out}
    return frozenset(row["url"] for row, is_out in zip(rows, out, strict=True) if is_out) - kept


def _passing_failures(folder: Folder, shard: int, table: Any) -> Any:
    import pyarrow.parquet as pq

    meta = pq.read_table(folder.meta(shard), columns=["row", "reason"]).to_pydict()
    again = {n for n, reason in zip(*meta.values(), strict=True) if reason and reasons.is_transient(reason)}
    return pa.array([row in again for row in table.column("row").to_pylist()], pa.bool_())

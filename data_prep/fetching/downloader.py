"""img2dataset as the engine: its downloader, resizer and distributors, with our rows as input and our shards as output.

Runs in its own process and process group (`main`), so that img2dataset's workers, prints and signal handlers do not
affect the program that supervises it. It exits, with all its workers, when that program is gone for any reason.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pyarrow as pa
from img2dataset import distributor
from img2dataset.downloader import Downloader

from data_prep import reasons
from data_prep.dataset.commit import engine_lock
from data_prep.dataset.dataset_folder import Folder, names_of
from data_prep.dataset.shard_files import failed_row, settled_rows
from data_prep.dataset.shard_plan import Plan, load_plan, read_shard
from data_prep.download_config import DownloadConfig, FetchConfig, GuardConfig, ImageConfig
from data_prep.fetching.decoder import Decoder
from data_prep.fetching.opener import Opener
from data_prep.fetching.shard_writer import ShardWriter
from pipeline.config import parse
from pipeline.errors import UserError
from pipeline.files import write_json

# Shards per Spark job.
_SPARK_SHARDS = 1000
_LOOPBACK = "127.0.0.1"


class ShardDownloader(Downloader):
    """img2dataset's downloader for our job: installs the guarded opener, and publishes through ShardWriter."""

    def __init__(self, config: DownloadConfig, folder: Folder, plan: Plan) -> None:
        self._config, self._folder, self._plan = config, folder, plan
        source, fetch = config.source, config.fetch
        hash_kind = source.hash_kind if source.hash else None
        columns = ["row", *(["blur"] if source.blur else []), "caption", *([hash_kind] if hash_kind else []), "url"]
        super().__init__(
            sample_writer_class=None,
            resizer=None,  # each worker process has its own decoder
            thread_count=fetch.threads,
            save_caption=True,
            extract_exif=False,
            output_folder=str(folder.staging),
            column_list=columns,
            timeout=fetch.timeout,
            number_sample_per_shard=plan.shard_size,
            oom_shard_count=5,
            compute_hash=hash_kind or "sha256",
            verify_hash_type=hash_kind,
            encode_format=config.image.encode_format,
            retries=0,  # the opener retries, and only transient failures
            user_agent_token=config.guard.user_agent,
            disallowed_header_directives=None,  # the opener honours them, before the body is read
            blurring_bbox_col="blur" if source.blur else None,
        )

    def download_shard(self, row: tuple[int, str]) -> None:
        """Fetch one shard's rows (img2dataset's own method) and publish the result.

        What only the user can mend is reported to the supervisor: another engine would meet it again.
        """
        try:
            with engine_lock(self._folder):
                self._download_shard(*row)
        except UserError as error:
            write_json(self._folder.staging / f"{row[0]:05d}.live", {"refusal": str(error)})
            raise

    def _download_shard(self, shard: int, path: str) -> None:
        config, folder = self._config, self._folder
        opener, decoder = _cached_tools(config.guard, config.fetch, config.image, bool(config.source.blur))
        urllib.request.install_opener(opener)  # type: ignore[arg-type]
        table = read_shard(folder, shard)
        rows = table.to_pylist()
        if is_retry := folder.record(shard).exists():
            kept = settled_rows(folder, shard)
        else:
            without = [row for row in rows if config.source.hash and not row[config.source.hash_kind]]
            kept = {row["row"]: failed_row(row, reasons.NO_HASH) for row in without}
        # URLs that are not requested. If a removed URL is in a kept row as well, the writer decides.
        removed = folder.removed_names()
        opener.removed = {row["url"] for row in rows} - {r["url"] for r in rows if removed.isdisjoint(names_of(r))}
        writer = ShardWriter(shard, folder, self._plan, rows=rows, kept=kept, decoder=decoder, opener=opener)
        if not is_retry:
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
        (folder.staging / f"{shard:05d}_stats.json").unlink(missing_ok=True)


def main(path: str) -> None:
    """Do the job in a JSON file, for as long as the process that started this one lives."""

    def watch() -> None:
        sys.stdin.read()  # to its end, when that process is gone
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    tree: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    config = parse(DownloadConfig, tree["config"])
    folder, shards, fetch = Folder(Path(config.output), config.fetch.worker), tree["shards"], config.fetch
    with engine_lock(folder):
        _join_cluster(fetch)
        downloader = ShardDownloader(config, folder, load_plan(folder))
        # The path of each shard's rows, which the worker itself writes.
        rows = ((shard, str(folder.staging / f"{shard:05d}.arrow")) for shard in shards)
        processes = min(fetch.processes, len(shards))  # one that has no shard would import for seconds
        distribute = getattr(distributor, f"{fetch.distributor}_distributor")
        distribute(processes, downloader, rows, _SPARK_SHARDS, 1)


def _join_cluster(fetch: FetchConfig) -> None:
    """Join the given cluster, or start one on this machine that only this machine reaches; img2dataset uses it."""
    if fetch.distributor == "pyspark":
        from pyspark.sql import SparkSession

        # Spark's workers otherwise take whichever python3 comes first on the PATH.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        if not fetch.master:
            os.environ["SPARK_LOCAL_IP"] = _LOOPBACK
        master = fetch.master or f"local[{fetch.processes}]"
        session = SparkSession.builder.master(master).appName("neuclip download").getOrCreate()
        atexit.register(session.stop)  # else the cluster counts the application as lost
    elif fetch.distributor == "ray":
        import ray

        own: dict[str, Any] = {"num_cpus": fetch.processes, "include_dashboard": False, "_node_ip_address": _LOOPBACK}
        ray.init(address=fetch.master, **({} if fetch.master else own))


@functools.cache
def _cached_tools(guard: GuardConfig, fetch: FetchConfig, image: ImageConfig, blur: bool) -> tuple[Opener, Decoder]:
    """This process's opener, which keeps its state of each host between shards, and its decoder."""
    connections = max(1, guard.host_connections // fetch.processes)
    opener = Opener(guard, connections=connections, retries=fetch.retries, total_seconds=fetch.total_timeout)
    return opener, Decoder(image=image, max_pixels=guard.max_pixels, processes=fetch.processes, blur=blur)

"""CPU time per URL of one worker on one shard: our downloader against img2dataset's, alternating in one process.

    python -m jobs.bench.download_shard --urls 1500 --rounds 4

Start-up, worker processes and waiting for the network are excluded (`jobs.bench.download` times the whole call). This
time limits the throughput of a CPU-bound node.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import click

from jobs.bench.download import serve_photographs, write_table

_THREADS = 16


@click.command()
@click.option("--urls", default=1_500, show_default=True, help="URLs in the shard.")
@click.option("--rounds", default=4, show_default=True)
def command(urls: int, rounds: int) -> None:
    """Print CPU milliseconds per URL of both downloaders, and the median ratio."""
    import webdataset  # noqa: F401  before our engine, which imports img2dataset without it

    ratios = []
    with serve_photographs() as base, tempfile.TemporaryDirectory() as temporary:
        table = Path(temporary) / "urls.parquet"
        write_table(table, base, urls)
        for turn in range(rounds):
            direct = _direct(table, Path(temporary) / f"direct-{turn}", urls)
            ours = _ours(table, Path(temporary) / f"ours-{turn}", urls)
            ratios.append(direct / ours)
            click.echo(f"round {turn + 1}: direct {direct / urls * 1e3:.3f} ms, ours {ours / urls * 1e3:.3f} ms of CPU")
    each = ", ".join(f"{ratio:.3f}" for ratio in ratios)
    click.echo(f"throughput per CPU second, ours / direct: median {statistics.median(ratios):.3f} (each {each})")


def _ours(table: Path, folder: Path, urls: int) -> float:
    from data_prep.dataset.dataset_folder import Folder
    from data_prep.fetching.downloader import Job, ShardDownloader
    from data_prep.ingest import prepare
    from data_prep.settings.download_config import DownloadConfig
    from pipeline.config import parse

    tree = {
        "output": str(folder),
        "source": {"table": str(table)},
        "guard": {"allow_addresses": ["127.0.0.1"]},
        "fetch": {"shard_size": urls, "processes": 1, "threads": _THREADS, "retries": 0},
    }
    config, plan = prepare(parse(DownloadConfig, tree))
    paths = Folder(folder)
    return _cpu_seconds(ShardDownloader(Job(config, paths, plan, ())), (0, str(paths.staging / "rows.arrow")))


def _direct(table: Path, folder: Path, urls: int) -> float:
    from img2dataset.downloader import Downloader
    from img2dataset.reader import Reader
    from img2dataset.resizer import Resizer
    from img2dataset.writer import WebDatasetSampleWriter

    scratch = folder / "_tmp"
    scratch.mkdir(parents=True)
    reader = Reader(str(table), "parquet", "url", "caption", None, None, None, urls, set(), str(scratch))
    downloader = Downloader(
        sample_writer_class=WebDatasetSampleWriter,
        resizer=Resizer(256, "keep_ratio", True),
        thread_count=_THREADS,
        save_caption=True,
        extract_exif=False,
        output_folder=str(folder),
        column_list=reader.column_list,
        timeout=10,
        number_sample_per_shard=urls,
        oom_shard_count=5,
        compute_hash="sha256",
        verify_hash_type=None,
        encode_format="jpg",
        retries=0,
        user_agent_token=None,
        disallowed_header_directives=["noai"],
    )
    return _cpu_seconds(downloader, next(iter(reader)))


def _cpu_seconds(downloader: object, row: tuple[int, str]) -> float:
    started = time.process_time()
    done, _ = downloader(row)  # type: ignore[operator]
    if not done:
        raise click.ClickException("the shard could not be fetched; see the traceback above")
    return time.process_time() - started


if __name__ == "__main__":
    command()

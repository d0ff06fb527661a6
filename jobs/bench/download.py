"""Our download against img2dataset called directly, alternating on the same URL list.

    python -m jobs.bench.download --urls 6000 --rounds 3

Both fetch from a small server on 127.0.0.1 that replies immediately with 512-pixel photographs, resize to 256 and write
webdataset shards. The whole call is timed, including start-up, in wall and CPU seconds. Ours also checks the URL table,
guards addresses, verifies that images are complete, sorts and hashes the shards, and writes the manifest.
"""

from __future__ import annotations

import asyncio
import io
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np

_IMAGES = 32
_OURS = """
import sys
from data_prep.settings.download_config import DownloadConfig
from data_prep.ingest import download
from pipeline.config import parse
table, output, shard, processes, threads = sys.argv[1:]
download(parse(DownloadConfig, {
    "output": output,
    "source": {"table": table},
    "guard": {"allow_addresses": ["127.0.0.1"], "contact": "bench@example.org"},
    "fetch": {"shard_size": int(shard), "processes": int(processes), "threads": int(threads), "retries": 0},
}))
"""
_DIRECT = """
import sys
from img2dataset import download
table, output, shard, processes, threads = sys.argv[1:]
if __name__ == "__main__":
    download(
        url_list=table, input_format="parquet", url_col="url", caption_col="caption", output_folder=output,
        output_format="webdataset", image_size=256, resize_mode="keep_ratio", resize_only_if_bigger=True,
        processes_count=int(processes), thread_count=int(threads), number_sample_per_shard=int(shard),
        extract_exif=False, compute_hash="sha256", enable_wandb=False,
    )
"""


@click.command()
@click.option("--urls", default=6_000, show_default=True)
@click.option("--rounds", default=3, show_default=True, help="Rounds; each runs both programs.")
@click.option("--shard-size", default=1_000, show_default=True)
@click.option("--processes", default=2, show_default=True)
@click.option("--threads", default=32, show_default=True)
def command(urls: int, rounds: int, shard_size: int, processes: int, threads: int) -> None:
    """Time both programs in turn and print the median of the per-round ratios."""
    wall: dict[str, list[float]] = {"ours": [], "direct": []}
    busy: dict[str, list[float]] = {"ours": [], "direct": []}
    with tempfile.TemporaryDirectory() as temporary, serve_photographs() as base:
        folder = Path(temporary)
        table = folder / "urls.parquet"
        write_table(table, base, urls)
        scripts = {"ours": folder / "ours.py", "direct": folder / "direct.py"}
        scripts["ours"].write_text(_OURS)
        scripts["direct"].write_text(_DIRECT)
        for turn in range(rounds):
            for name in sorted(scripts, reverse=bool(turn % 2)):
                words = [str(table), str(folder / name), str(shard_size), str(processes), str(threads)]
                took, cpu = _time(scripts[name], words)
                wall[name].append(took)
                busy[name].append(cpu)
                shutil.rmtree(folder / name)
                click.echo(f"round {turn + 1}: {name:<7}{took:7.1f} s {urls / took:6.0f} URLs/s {cpu:7.1f} CPU s")
    for what, figures in (("throughput", wall), ("throughput per CPU second", busy)):
        ratios = [direct / ours for direct, ours in zip(figures["direct"], figures["ours"], strict=True)]
        each = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        click.echo(f"{what}, ours / direct: median of rounds {statistics.median(ratios):.3f} (each {each})")


def _time(script: Path, words: list[str]) -> tuple[float, float]:
    """Wall seconds and CPU seconds of a script with all its processes; CPU time is more reliable on a busy machine."""
    environment = {**os.environ, "NO_ALBUMENTATIONS_UPDATE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    ended = subprocess.run([sys.executable, str(script), *words], env=environment, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    if ended.returncode:
        raise click.ClickException(ended.stderr[-2_000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def write_table(path: Path, base: str, urls: int) -> None:
    """Write a table of `urls` URLs of the server."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        "url": [f"{base}/{k}.jpg" for k in range(urls)],
        "caption": [f"photograph number {k} of a place" for k in range(urls)],
    }
    pq.write_table(pa.table(columns), path)


@contextmanager
def serve_photographs() -> Iterator[str]:
    """Run a server process that replies immediately, and yield its base URL."""
    context = multiprocessing.get_context("spawn")
    port = context.Queue()
    process = context.Process(target=_serve, args=(port,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{port.get(timeout=60)}"
    finally:
        process.terminate()
        process.join()


def _serve(port: Any) -> None:
    """Reply to every request immediately with one of a few photographs (smooth noise, 512 pixels)."""
    from PIL import Image

    answers = []
    for seed in range(_IMAGES):
        pixels = np.random.default_rng(seed).integers(0, 255, (24, 32, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).resize((683, 512), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
        body = buffer.getvalue()
        head = (
            f"HTTP/1.1 200 OK\r\nContent-Type: image/jpeg\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        answers.append(head.encode() + body)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        number = int(request.split(b" ", 2)[1].strip(b"/").removesuffix(b".jpg"))
        writer.write(answers[number % _IMAGES])
        await writer.drain()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024)
        port.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


if __name__ == "__main__":
    command()

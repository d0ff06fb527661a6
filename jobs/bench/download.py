"""Our download against img2dataset called directly, alternating on the same URL list.

    python -m jobs.bench.download --urls 6000 --rounds 3

Both fetch from a small server on 127.0.0.1 that replies immediately with 512-pixel photographs, resize to 256 and write
webdataset shards. The whole call is timed, including start-up, in wall and CPU seconds. Ours also checks the URL table,
guards addresses, verifies that images are complete, sorts and hashes the shards, and writes the manifest.
"""

from __future__ import annotations

import asyncio
import functools
import io
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jobs.bench.harness import alternate, parser, ratios, show


def main() -> None:
    """Time both programs in turn."""
    given = parser(__doc__, rounds=3)
    given.add_argument("--urls", type=int, default=6_000)
    args = given.parse_args()
    with tempfile.TemporaryDirectory() as temporary, serve_photographs() as base:
        table, output = Path(temporary) / "urls.parquet", Path(temporary) / "out"
        urls = [f"{base}/{number}.jpg" for number in range(args.urls)]
        captions = [f"photograph number {number} of a place" for number in range(args.urls)]
        pq.write_table(pa.table({"url": urls, "caption": captions}), table)
        ours = [
            "jobs.cli", "download", f"output={output}", f"source.table={table}", "guard.allow_addresses=[127.0.0.1]",
            "guard.contact=bench@example.org", "fetch.retries=0", "fetch.shard_size=1000",
            "fetch.processes=2", "fetch.threads=32",
        ]  # fmt: skip
        direct = [
            "img2dataset.main", f"--url_list={table}", "--input_format=parquet", "--url_col=url",
            "--caption_col=caption", f"--output_folder={output}", "--output_format=webdataset", "--image_size=256",
            "--resize_mode=keep_ratio", "--resize_only_if_bigger=True", "--extract_exif=False",
            "--compute_hash=sha256", "--enable_wandb=False", "--number_sample_per_shard=1000",
            "--processes_count=2", "--thread_count=32",
        ]  # fmt: skip
        programs = {"ours": ours, "img2dataset": direct}
        runs = {name: functools.partial(timed, words, output=output) for name, words in programs.items()}
        seconds = alternate(runs, rounds=args.rounds)
    wall, busy = ({name: [one[k] for one in each] for name, each in seconds.items()} for k in (0, 1))
    rows = {
        name: (args.urls / median(wall[name]), *ratios(wall["img2dataset"], wall[name]), median(busy[name]),
               *ratios(busy["img2dataset"], busy[name]))
        for name in seconds
    }  # fmt: skip
    columns = {"URLs/s": ".0f", "/ img2dataset": ".2f", "lowest": ".2f", "highest": ".2f"}
    columns |= {"CPU s": ".1f", "URLs/CPU s, ratio": ".2f", "least": ".2f", "most": ".2f"}
    show(f"{args.urls} URLs, 2 processes of 32 threads", columns, rows)


def timed(words: list[str], *, output: Path) -> tuple[float, float]:
    """Wall seconds and CPU seconds of a program with all its processes; CPU time is more reliable on a busy machine."""
    environment = {**os.environ, "NO_ALBUMENTATIONS_UPDATE": "1", "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    ended = subprocess.run([sys.executable, "-m", *words], env=environment, capture_output=True, text=True)
    taken = time.perf_counter() - started
    if ended.returncode:
        raise SystemExit(ended.stderr[-2_000:])
    shutil.rmtree(output)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return taken, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@contextmanager
def serve_photographs() -> Iterator[str]:
    """Reply to every request immediately with one of a few photographs (smooth noise, 512 pixels); yields the base URL.

    The server's time is not counted: it is that of this process, and `timed` counts that of ended programs.
    """
    from PIL import Image

    answers = []
    for seed in range(32):
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
        writer.write(answers[number % 32])
        await writer.drain()
        writer.close()

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    server = asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024)
    yield f"http://127.0.0.1:{asyncio.run_coroutine_threadsafe(server, loop).result().sockets[0].getsockname()[1]}"
    loop.call_soon_threadsafe(loop.stop)


if __name__ == "__main__":
    main()

"""Time and peak memory of selecting a subset from a large URL table.

    python -m jobs.bench.subset --rows 50000000

Writes a parquet table of that many rows (uid, URL and caption of realistic lengths, about 110 bytes per row on disk)
and plans shards for a tenth of it in a separate process. Prints seconds, rows per second and that process's peak
resident memory, for this table and for one a tenth as long: if memory is bounded, the two peaks hardly differ.
"""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

_CHUNK = 1_000_000


@click.command()
@click.option("--rows", default=5_000_000, show_default=True, help="Rows of the table.")
@click.option("--fraction", default=0.1, show_default=True)
@click.option("--folder", type=click.Path(file_okay=False), help="Where to write the table [a temporary folder].")
def command(rows: int, fraction: float, folder: str | None) -> None:
    """Select a subset of a generated table and print time and peak memory."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        for count in (rows // 10, rows):
            table = Path(temporary) / f"urls-{count}.parquet"
            make_table(table, count)
            out = Path(temporary) / f"out-{count}"
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                seconds, selected, peak = pool.apply(_select, (str(table), str(out), fraction))
            click.echo(
                f"{count:,} rows ({table.stat().st_size / 1e9:.2f} GB): {selected:,} selected in {seconds:.1f} s, "
                f"{count / seconds / 1e6:.2f} M rows/s, peak {peak:.0f} MiB"
            )


def make_table(path: Path, rows: int) -> None:
    """Write a table of random uids, with URLs and captions derived from them."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    generator = np.random.default_rng(0)
    writer: Any = None
    for start in range(0, rows, _CHUNK):
        count = min(_CHUNK, rows - start)
        text = pa.py_buffer(generator.bytes(16 * count).hex().encode())
        offsets = pa.py_buffer(np.arange(0, 32 * count + 1, 32, dtype=np.int32))
        uid = pa.StringArray.from_buffers(count, offsets, text)
        host = pc.binary_join_element_wise("https://images-", pc.utf8_slice_codeunits(uid, 0, 3), ".example.org/", "")
        table = pa.table(
            {
                "uid": uid,
                "url": pc.binary_join_element_wise(host, uid, ".jpg", ""),
                "caption": pc.binary_join_element_wise(
                    "a photograph of", pc.utf8_slice_codeunits(uid, 3, 8), "beside the", " "
                ),
            }
        )
        writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
        writer.write_table(table)
    writer.close()


def _select(table: str, output: str, fraction: float) -> tuple[float, int, float]:
    from data_prep.dataset.dataset_folder import Folder
    from data_prep.dataset.shard_plan import make_plan
    from data_prep.settings.download_config import SubsetConfig
    from data_prep.settings.source_config import SourceConfig

    folder = Folder(Path(output))
    folder.make()
    started = time.perf_counter()
    plan = make_plan(
        folder, SourceConfig(table=table, uid="uid"), SubsetConfig(fraction=fraction, seed=1), shard_size=10_000
    )
    seconds = time.perf_counter() - started
    return seconds, plan.rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    command()

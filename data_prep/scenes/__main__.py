"""Serve the corpus from a local web server.

python -m data_prep.scenes --table urls.parquet --pairs 2000       # runs until Ctrl-C
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import click

from data_prep.scenes.scene import ScenesConfig
from data_prep.scenes.server import serve_scenes, write_url_table
from pipeline.errors import UserError


@click.command()
@click.option("--table", required=True, type=click.Path(dir_okay=False, path_type=Path), help="Parquet file to write.")
@click.option("--pairs", default=2_000, show_default=True, type=click.IntRange(1, 9_999_999), help="URLs in the table.")
@click.option("--port", default=0, show_default=True, type=click.IntRange(0, 65_535), help="0 takes a free one.")
def command(table: Path, pairs: int, port: int) -> None:
    """Publish the corpus on 127.0.0.1, as the demo does, and write the table of its URLs; until Ctrl-C."""
    config = ScenesConfig(pairs=pairs)
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs are started with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    try:
        with serve_scenes(config, port=port) as base:
            write_url_table(config, base, table)
            click.echo(f"{pairs:,} URLs on {base}, listed in {table}. Stop with Ctrl-C. To fetch them, elsewhere:")
            click.echo(f"neuclip download --recipe scenes source.table={table} output=FOLDER")
            threading.Event().wait()
    except UserError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        click.echo("Stopped.")


if __name__ == "__main__":
    command(prog_name="python -m data_prep.scenes")

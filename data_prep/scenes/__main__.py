"""Serve the corpus from a local web server.

    python -m data_prep.scenes --table urls.parquet --pairs 2000       # interactive: runs until Ctrl-C

`serve_scenes` starts it with `--serve-stdin`: it then reads the settings from standard input, prints the base URL to
standard output, and exits when standard input is closed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import click

from data_prep.scenes.scene import FaultRates, ScenesConfig
from data_prep.scenes.server import HOST, SERVE_STDIN, SceneServer, serve_scenes, write_url_table
from pipeline.errors import UserError


def _serve() -> None:
    settings = json.loads(sys.stdin.readline())
    config = ScenesConfig(**{**settings["config"], "faults": FaultRates(**settings["config"]["faults"])})
    try:
        server = SceneServer(config, settings["port"])
    except OSError as error:
        print(os.strerror(error.errno or 0), flush=True)
        return
    print(f"http://{HOST}:{server.server_address[1]}", flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()


@click.command()
@click.option("--table", required=True, type=click.Path(dir_okay=False, path_type=Path), help="Parquet file to write.")
@click.option("--pairs", default=2_000, show_default=True, type=click.IntRange(1, 9_999_999), help="URLs in the table.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0))
@click.option("--port", default=0, show_default=True, type=click.IntRange(0, 65_535), help="0 takes a free one.")
def command(table: Path, pairs: int, seed: int, port: int) -> None:
    """Publish the corpus on 127.0.0.1, as the demo does, and write the table of its URLs; until Ctrl-C."""
    config = ScenesConfig(pairs=pairs, seed=seed)
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs are started with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    try:
        with serve_scenes(config, port=port) as base:
            write_url_table(config, base, table)
            click.echo(f"{pairs:,} URLs on {base}, listed in {table}. Stop with Ctrl-C. To fetch them, elsewhere:")
            click.echo(f"neuclip download --recipe scenes source.table={table} output=FOLDER")
            while True:
                time.sleep(3600)
    except UserError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        click.echo("Stopped.")


if __name__ == "__main__":
    if sys.argv[1:] == [SERVE_STDIN]:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides when to stop
        _serve()
    else:
        command(prog_name="python -m data_prep.scenes")

"""`neuclip playground`: a local page to try a model with texts and images."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from pipeline.errors import UserError
from pipeline.run_files import check_model


@click.command("playground", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model", metavar="RUN_OR_EXPORT")
@click.option("--images", type=click.Path(path_type=Path), help="Folder of images, or of shards, to search in.")
@click.option("--limit", type=click.IntRange(min=1), default=2000, show_default=True, help="Most images.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=7860, show_default=True, help="0 takes any free port.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
def command(model: str, images: Path | None, limit: int, host: str, port: int, device: str) -> None:
    """Serve a page on this machine: find images for a text or an image, and classify an image.

    RUN_OR_EXPORT is what `neuclip evaluate` takes: a run, a checkpoint, an export, or ARCH:PRETRAINED. Without --images
    the page classifies images that you drop onto it. The page needs no network, and only this machine can reach it
    unless --host is given. Needs the extra `playground`.
    """
    check_model(model)  # before imports that take seconds
    if images is not None and not images.is_dir():
        raise UserError(f"--images {images}: there is no such folder.")
    try:
        from pipeline.playground.http_api import LOOPBACK, listen, make_app, serve
    except ImportError as error:
        raise UserError(
            f"The playground needs the extra `playground` ({error.name} is missing): "
            "pip install -c constraints.txt -e '.[playground]'"
        ) from error
    from pipeline.evaluation.run.evaluator import load_checkpoint
    from pipeline.evaluation.run.session import start_processes
    from pipeline.playground.explorer import Explorer, lines_of

    def progress(count: int) -> None:
        if sys.stderr.isatty():
            click.echo(f"{count:,} images encoded\r", nl=False, err=True)

    with listen(host, port) as listening, start_processes(device) as (_, where):
        explorer = Explorer(load_checkpoint(model, device=where))
        if images is not None:
            lines = lines_of(explorer.add_images(images, limit=limit, progress=progress))
            if not explorer.names:
                raise UserError(f"{images} has no image that can be used. {lines}")
            click.echo(f"{len(explorer.names):,} images (at most {limit:,}: --limit). {lines}")
        address = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}/"
        everyone = "Everyone who can reach this address can use it, and see the images."
        reach = "Only this machine can reach it." if host in LOOPBACK else everyone
        click.echo(f"Playground: {address} {reach} Ctrl-C ends it.")
        serve(make_app(explorer, local=host in LOOPBACK), listening)


if __name__ == "__main__":
    from jobs.cli import run

    run(command, prog_name="neuclip playground")

"""`neuclip playground`: a local page to try a model with texts and images."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.errors import UserError
from pipeline.run_files import check_model

if TYPE_CHECKING:
    from pipeline.data.shards.tar_reader import CaptionField
    from pipeline.playground.explorer import ClassSet, Explorer


@click.command("playground", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model", metavar="RUN_OR_EXPORT")
@click.option("--images", type=click.Path(path_type=Path), help="Folder of images, or of shards, to search in.")
@click.option("--captions", type=click.Path(path_type=Path), help="Text file, one caption a line, or folder of shards.")
@click.option("--suite", help="Suite or tasks.yaml whose class names and templates the page offers.")
@click.option("--caption", show_default="txt", help="Captions in shards: txt or json:FIELD.")
@click.option("--limit", type=click.IntRange(min=1), default=2000, show_default=True, help="Most images and captions.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=7860, show_default=True, help="0 takes any free port.")
@click.option("--open", "open_page", is_flag=True, help="Open the page in a browser.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
def command(
    model: str, images: Path | None, captions: Path | None, caption: str | None, host: str, **options: Any
) -> None:
    """Serve a page on this machine: find images for a text, classify an image, find captions for an image.

    RUN_OR_EXPORT is what `neuclip evaluate` takes: a run, a checkpoint, an export, or ARCH:PRETRAINED. Without --images
    and --captions the page classifies images that you drop onto it. Captions of shards given by --images are searched,
    too. The page needs no network, and only this machine can reach it unless --host is given. Needs the extra
    `playground`.
    """
    check_model(model)  # before imports that take seconds
    from pipeline.data.shards.check_shards import check_caption
    from pipeline.data.shards.tar_reader import CaptionField
    from pipeline.evaluation.run.checkpoint import load_checkpoint
    from pipeline.evaluation.run.session import start_processes
    from pipeline.playground.explorer import Explorer
    from pipeline.playground.gallery import shards_in
    from pipeline.playground.http_api import LOOPBACK, listen, make_app, serve

    field = CaptionField.parse(caption or "txt", option="--caption")
    for option, path in (("--images", images), ("--captions", captions)):
        if path is not None and not path.exists():
            raise UserError(f"{option} {path}: there is no such file or folder.")
        if caption is not None and path is not None and (shards := shards_in(path)):
            check_caption(str(shards[0]), caption, name="--caption")
    if caption is not None and not any(path and shards_in(path) for path in (images, captions)):
        raise UserError(f"--caption {caption}: neither --images nor --captions has shards with captions.")
    with listen(host, options["port"]) as listening, start_processes(options["device"]) as (_, where):
        class_sets = _class_sets(options["suite"])
        loaded = load_checkpoint(model, device=where)
        explorer = Explorer(loaded, class_sets=class_sets)
        app = make_app(explorer, title=_title(loaded.source), local=host in LOOPBACK)
        _fill(explorer, images, captions, field=field, limit=options["limit"])
        address = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}/"
        click.echo(f"{len(explorer.names):,} images, {len(explorer.captions):,} captions. Playground: {address}")
        everyone = "Everyone who can reach this address can use it, and see the images."
        click.echo(f"{'Only this machine can reach it.' if host in LOOPBACK else everyone} Ctrl-C ends it.")
        if options["open_page"]:
            click.launch(address)
        serve(app, listening)


def _title(source: str) -> str:
    """`cc3m, step-00001000` for a checkpoint of a run, else the folder's name or ARCH:PRETRAINED."""
    path = Path(source)
    if not path.is_dir():
        return source
    path = path.resolve()
    return f"{path.parent.parent.name}, {path.name}" if path.parent.name == "checkpoints" else path.name


def _class_sets(suite: str | None) -> list[ClassSet]:
    """Class names and templates of every classification task of a suite; a task that cannot be opened is reported."""
    from pipeline.evaluation.datasets.suite import open_suite, open_task
    from pipeline.playground.explorer import ClassSet

    sets = []
    for entry in open_suite(suite).entries if suite else ():
        if entry.task.protocol != "classification":
            continue
        try:
            data = open_task(entry)
        except UserError as error:
            click.echo(f"{entry.task.key} is left out: {error}")
            continue
        sets.append(ClassSet(entry.task.name, data.classnames, data.templates))
    return sets


def _fill(explorer: Explorer, images: Path | None, captions: Path | None, *, field: CaptionField, limit: int) -> None:
    """Encode images and captions, with a line of progress, and report what could not be used."""
    from pipeline.playground.gallery import Dropped, read_samples

    dropped = Dropped()

    def progress(what: str, count: int) -> None:
        if sys.stderr.isatty():
            click.echo(f"\r{count:,} {what} encoded", nl=False, err=True)

    if images is not None:
        samples = read_samples(images, caption=field, limit=limit, dropped=dropped)
        explorer.add_images(samples, dropped=dropped, progress=lambda count: progress("images", count))
        if not explorer.names:
            raise UserError(f"{images} has no image that can be used. {' '.join(dropped.lines())}")
    texts = [caption for caption in explorer.image_captions if caption]
    if captions is not None:
        given = read_samples(captions, caption=field, limit=limit, dropped=dropped)
        texts = [sample.caption for sample in given if sample.caption]
        if not texts:
            raise UserError(f"{captions} holds no captions, one a line or in shards. {' '.join(dropped.lines())}")
    explorer.add_captions(texts, progress=lambda count: progress("captions", count))
    if sys.stderr.isatty():
        click.echo(err=True)
    for line in dropped.lines():
        click.echo(line)


if __name__ == "__main__":
    from jobs.cli import run

    run(command, prog_name="neuclip playground")

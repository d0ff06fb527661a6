"""`neuclip export`: write a checkpoint as a folder that open_clip and model hubs load, with a model card."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import click

from pipeline.errors import UserError
from pipeline.files import check_new_folder
from pipeline.run_files import META_NAME, check_model, model_folder_in


@click.command(name="export")
@click.argument("model", metavar="MODEL")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="New folder of the exported model.")
@click.option("--onnx", is_flag=True, help="Also write both towers as ONNX; needs the extra `onnx`.")
@click.option(
    "--format", "form", type=click.Choice(["open_clip", "transformers"]), default="open_clip", show_default=True
)
@click.option("--best", is_flag=True, help="Of a run, the checkpoint with the lowest validation loss, not the newest.")
@click.option("--ema", "average", is_flag=True, help="The average of the weights (EMA) instead of the trained weights.")
@click.option("--license", "licence", metavar="ID", help="Licence of the weights, for the model card: apache-2.0, ...")
def command(model: str, output: Path, onnx: bool, form: str, best: bool, average: bool, licence: str | None) -> None:
    """Export MODEL, which is what `neuclip evaluate` takes (of a run, its newest checkpoint).

    Load OUTPUT/open_clip_model.safetensors with open_clip.create_model_and_transforms(ARCH, pretrained=FILE), the
    folder as "local-dir:OUTPUT", or after `hf upload NAME OUTPUT` as "hf-hub:NAME". --format transformers writes a
    CLIPModel or SiglipModel instead. All exported models are compared with the trained model.
    """
    stopped: list[int] = []

    def stop(number: int, _: object) -> None:
        stopped.append(128 + number)
        sys.exit(stopped[0])  # removes temporary folders

    signal.signal(signal.SIGTERM, stop)
    check_new_folder(output)  # before imports that take seconds
    check_model(model)
    for wrong, message in (
        (form == "transformers" and onnx, "--onnx goes with the open_clip format: export twice, into two folders."),
        (licence and not re.fullmatch(r"[\w.+-]+", licence),
         f"--license {licence!r} is not the identifier of a licence, such as apache-2.0 or mit."),
    ):  # fmt: skip
        if wrong:
            raise UserError(message)
    from pipeline.checkpoint.layout import validated_model
    from pipeline.export.exporter import choose_checkpoint, export

    folder, chosen = model_folder_in(Path(model)), None
    if best or average or (folder is not None and (folder / META_NAME).is_file()):
        chosen = choose_checkpoint(Path(model), best=best)
    try:
        difference, note = export(
            chosen or model, output, form=form, onnx=onnx, average=average, licence=licence, stopped=stopped
        )
    except Exception:
        if stopped:  # modules written in C turn a SystemExit into other errors
            sys.exit(stopped[0])
        raise
    for path in sorted(path for path in output.rglob("*") if path.is_file()):
        click.echo(f"{path.stat().st_size:>14,} B  {path}")
    what, other = (f"Step {chosen.step:,}", "trained") if chosen else (model, "given")
    click.echo(f"{what} exported; largest difference from the {other} model {difference:.1e}.")
    if note:
        click.echo(note)
    if chosen and best and not average and validated_model(chosen.path) != chosen.path:
        click.echo("The validation loss was that of the average of the weights (EMA); --ema exports it.")


if __name__ == "__main__":
    from jobs.cli import run as run_command

    run_command(command, prog_name="jobs.export")

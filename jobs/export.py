"""`neuclip export`: write a checkpoint as a folder that open_clip and model hubs load, with a model card."""

from __future__ import annotations

import re
from pathlib import Path

import click

from pipeline.files import check_new_folder


@click.command(name="export")
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--torch", "with_torch", is_flag=True, help="Also write both towers as torch.export programs (.pt2).")
@click.option("--onnx", "with_onnx", is_flag=True, help="Also write both towers as ONNX; needs the extra `onnx`.")
@click.option(
    "--format", "form", type=click.Choice(["open_clip", "transformers"]), default="open_clip", show_default=True
)
@click.option("--best", is_flag=True, help="Of a run, the checkpoint with the lowest validation loss, not the newest.")
@click.option("--ema", "average", is_flag=True, help="The average of the weights (EMA) instead of the trained weights.")
@click.option("--license", "licence", metavar="ID", help="Licence of the weights, for the model card: apache-2.0, ...")
@click.option("--push", metavar="REPO", help="Upload the export to this hub repository (OWNER/NAME).")
@click.option("--private", is_flag=True, help="With --push: make a newly created repository private.")
def command(
    checkpoint: Path,
    output: Path,
    with_torch: bool,
    with_onnx: bool,
    form: str,
    best: bool,
    average: bool,
    licence: str | None,
    push: str | None,
    private: bool,
) -> None:
    """Export CHECKPOINT (a checkpoint folder, or a run: its newest checkpoint) to the new folder OUTPUT.

    Load OUTPUT/open_clip_model.safetensors with open_clip.create_model_and_transforms(ARCH, pretrained=FILE), the
    folder as "local-dir:OUTPUT", or after an upload "hf-hub:NAME". --format transformers writes a CLIPModel or
    SiglipModel instead.
    All exported models are compared with the trained model.
    """
    check_new_folder(output)  # before imports that take seconds
    from pipeline.errors import UserError

    if private and not push:
        raise UserError("--private is for --push, which is not given.")
    if licence and not re.fullmatch(r"[\w.+-]+", licence):
        raise UserError(f"--license {licence!r} is not the identifier of a licence, such as apache-2.0 or mit.")
    from pipeline.checkpoint.layout import validated_model
    from pipeline.export.exporter import choose_checkpoint, export, export_transformers, logit_parameters, model_of
    from pipeline.export.model_card import model_card

    chosen = choose_checkpoint(checkpoint, best=best)
    model_of(chosen, average=average)  # checked before the card is written
    programs = tuple(name for name, wanted in (("torch", with_torch), ("onnx", with_onnx)) if wanted)
    scale, bias = logit_parameters(chosen.path)
    if form == "transformers" and programs:
        raise UserError("--torch and --onnx go with the open_clip format: export twice, into two folders.")
    card = model_card(chosen, scale=scale, bias=bias, programs=programs, form=form, licence=licence, average=average)
    if form == "transformers":
        exported = export_transformers(chosen, output, card=card, logit_scale=scale, average=average)
    else:
        exported = export(chosen, output, card=card, programs=programs, average=average)
    for path in exported.files:
        click.echo(f"{path.stat().st_size:>14,} B  {path}")
    click.echo(f"Step {chosen.step:,} exported; largest difference from the trained model {exported.difference:.1e}.")
    if best and not average and validated_model(chosen.path) != chosen.path:
        click.echo("The validation loss was that of the average of the weights (EMA); --ema exports it.")
    if push:
        from pipeline.export.exporter import push as upload

        click.echo(f"Uploaded: {upload(output, push, private=private)}")


if __name__ == "__main__":
    from jobs.cli import run as run_command

    run_command(command, prog_name="jobs.export")

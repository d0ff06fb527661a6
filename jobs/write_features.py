"""`neuclip features MODEL --data SHARDS`: store a model's features of every sample of a dataset."""

from __future__ import annotations

import shlex
import warnings
from dataclasses import asdict
from pathlib import Path

import click
from click.core import ParameterSource

from jobs.score import shard_progress
from pipeline.run_files import check_model, model_folder_in


@click.command(name="features", epilog="With several ranks: torchrun -m jobs.write_features ...")
@click.argument("model")
@click.option("--data", multiple=True, required=True, type=click.Path(exists=True),
              help="Folder with manifest.json; several: in the order of `data.sources`.")  # fmt: skip
@click.option("--output", required=True, type=click.Path(file_okay=False), help="Folder of the features.")
@click.option(
    "--images-only",
    is_flag=True,
    help="Store outputs of the image tower, for a run that locks it (data.image_features).",
)
@click.option("--caption", default="txt", show_default=True, help="A member's suffix, or json:FIELD.")
@click.option(
    "--batch-size", type=click.IntRange(min=1), default=64, show_default=True, help="Images encoded at a time."
)
@click.option("--workers", type=click.IntRange(min=0), default=2, show_default=True, help="Decoding threads per rank.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--allow-outside", is_flag=True, help="Read shards outside of DATA that its manifests name.")
def command(
    model: str,
    data: tuple[str, ...],
    output: str,
    images_only: bool,
    caption: str,
    device: str,
    allow_outside: bool,
    **how: int,
) -> None:
    """Store a model's features of every sample of a dataset.

    MODEL is a run, a checkpoint, an exported folder, or ARCH:PRETRAINED. A run with `data.teacher_features=OUTPUT
    objective.distill=1` learns from a teacher's image and text features, in fp16. With --images-only, a run with
    `data.image_features=OUTPUT model.lock_image=true` takes the outputs of its image tower from there, in fp32,
    instead of decoding images. Run it again to continue a stopped job.
    """
    check_model(model)  # before imports that take seconds
    from pipeline.analysis.feature_writer import write_features
    from pipeline.analysis.pair_scores import start_output, temperature_of
    from pipeline.data.loading.stored_features import FACTS, FeatureFacts
    from pipeline.data.order.mixture import make_mixture
    from pipeline.data.shards.check_shards import check_caption
    from pipeline.data.shards.manifest_format import load_manifest
    from pipeline.data.shards.tar_reader import CaptionField
    from pipeline.distributed.start import start_world
    from pipeline.errors import UserError
    from pipeline.model.evaluation_model import load_for_evaluation
    from pipeline.model.model_folder import image_tower_identity

    source = click.get_current_context().get_parameter_source("caption")
    if images_only and source != ParameterSource.DEFAULT:
        raise UserError("--caption has no effect with --images-only: leave one of them out.")
    if len({Path(folder).resolve() for folder in data}) < len(data):
        raise UserError(f"--data has a folder twice: {' '.join(data)}. Name each once, as in data.sources.")
    field = CaptionField.parse(caption, option="--caption")
    warnings.filterwarnings("ignore", module=r"PIL\.")  # about odd metadata of images
    manifests = [load_manifest(folder, allow_outside=allow_outside) for folder in data]
    for manifest in manifests if not images_only else ():
        check_caption(manifest, caption, name="--caption")
    mixture = make_mixture(manifests)
    with start_world(device=device) as world:
        spec = world.gather_objects(str(model_folder_in(Path(model)) or model))[0]  # a run may go on writing
        encoder = load_for_evaluation(spec, device=world.device)
        samples, digests = mixture.manifest.n, list(mixture.digests)
        if images_only:
            tower = image_tower_identity(encoder.towers.clip.state_dict(), encoder.architecture, decoding="fast")
            facts = FeatureFacts(tower["weights"], spec, 1.0, encoder.dim, digests, "", samples, tower=tower)
        else:
            tau, bias = temperature_of(encoder, spec), encoder.towers.logit[1] if encoder.towers.logit else None
            facts = FeatureFacts(encoder.digest, spec, tau, encoder.dim, digests, str(field), samples, bias=bias)
        start_output(Path(output) / FACTS, asdict(facts), what="features", apart=("source",))
        world.barrier()
        tell = click.echo if world.is_main else (lambda message: None)
        counts = write_features(
            encoder, mixture, facts, output=Path(output), world=world, on_shard=shard_progress(tell), **how
        )
        tell(f"{counts['stored']:,} of {samples:,} pairs have features of {encoder.dim} numbers a side: {output}")
        for problem, number in sorted(counts["problems"].items(), key=lambda item: -item[1]):
            tell(f"  {number:,} without features: {problem}")
        setting = shlex.quote(f"data.{'image' if images_only else 'teacher'}_features={output}")
        use = "model.lock_image=true" if images_only else "objective.distill=1"
        tell(f"To train with them: neuclip train ... {setting} {use}")


if __name__ == "__main__":
    from jobs.cli import run as run_command

    run_command(command, prog_name="neuclip features")

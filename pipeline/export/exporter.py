"""Export a model: a folder that open_clip or transformers loads, with a model card.

    EXPORT/
        open_clip_config.json, open_clip_model.safetensors   what open_clip loads, by folder or as `pretrained=FILE`
        tokenizer.json ...                                   the tokenizer, if it is one of Hugging Face's
        adapters/                                            of a run with LoRA, in peft's format; merged in the weights
        README.md, config.yaml                               the model card, and the run's configuration
        image.onnx, text.onnx                                on request: towers that run without open_clip

The ONNX programs map normalised images [B, 3, H, W] or tokens [B, L] to unit-norm features [B, d], for any B.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.checkpoint.layout import ADAPTERS_NAME, best_checkpoint
from pipeline.checkpoint.reader import Checkpoint, open_checkpoint
from pipeline.config import dump
from pipeline.errors import UserError
from pipeline.export.model_card import model_card
from pipeline.export.transformers_model import is_siglip, write_transformers
from pipeline.files import check_new_folder, new_folder
from pipeline.model.architectures import save_tokenizer
from pipeline.model.evaluation_model import EvaluationModel, load_for_evaluation
from pipeline.model.finetuning import ADAPTER_FILES
from pipeline.model.model_folder import WEIGHTS_NAME, save_open_clip
from pipeline.model.towers import Towers
from pipeline.run_files import EMA_NAME, META_NAME, MODEL_CONFIG_NAME, RUN_CONFIG_NAME, finished_checkpoints

TOLERANCE = 1e-5
DEFAULT_LOGIT = math.log(100.0)
"""CLIP's, for weights without a temperature."""


def choose_checkpoint(source: Path, *, best: bool = False) -> Checkpoint:
    """Open a checkpoint, or of a run the newest (`best`: that with the lowest validation loss), and verify it.

    Raises:
        UserError: There is no checkpoint, or it is damaged.
    """
    candidates = finished_checkpoints(source) if not (source / META_NAME).is_file() else [source]
    path = best_checkpoint(source) if best else next(reversed(candidates), None)
    if path is None:
        best_of = " that validates (validation.sources), as --best needs" if best else ""
        raise UserError(f"{source} is neither a checkpoint nor a run with checkpoints{best_of}.")
    try:
        return open_checkpoint(path)
    except UserError as error:
        raise UserError(f"{path} is damaged and not exported: {error} Name another checkpoint of the run.") from error


def export(
    source: Checkpoint | str,
    output: Path,
    *,
    form: str = "open_clip",
    onnx: bool = False,
    average: bool = False,
    licence: str | None = None,
    stopped: Sequence[int] = (),
) -> tuple[float, str]:
    """Write a folder, and compare everything in it with the trained towers before it is kept.

    Args:
        source: A checkpoint, or what `load_for_evaluation` takes.
        output: A folder that does not exist or is empty.
        form: What loads the folder: open_clip, or transformers as a `CLIPModel` or `SiglipModel`.
        onnx: Add both towers as ONNX, to open_clip's form.
        average: Export the average of the weights (EMA).
        licence: The hub's identifier of the weights' licence, for the model card.
        stopped: Exit codes of signals that have arrived meanwhile, though a module may have swallowed their exceptions.

    Returns:
        The largest difference of any feature or logit from the trained model's, and a sentence for the user and the
        model card about what the form cannot hold, if anything.

    Raises:
        UserError: `output` is not empty, the run kept no average, packages are missing, transformers' models cannot
            hold the architecture, or a result differs by more than 1e-5.
    """
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if onnx and missing:
        raise UserError(f"ONNX export needs {', '.join(missing)}: pip install -c constraints.txt -e '.[onnx]'.")
    given: Path | str = source.path if isinstance(source, Checkpoint) else source
    if isinstance(source, Checkpoint) and average:
        given = source.path / EMA_NAME
        if not given.is_dir():
            raise UserError(f"{source.path} has no average of the weights: train with ema.decay=0.999, say.")
    model = load_for_evaluation(given)
    bias, note = (model.towers.logit or (DEFAULT_LOGIT, None))[1], ""
    if bias and form == "transformers" and not is_siglip(model.architecture.model_cfg):
        note = f"A CLIPModel has no logit bias: add {bias:.4f} to its logits before a sigmoid."
    card = model_card(source, model.architecture, form=form, licence=licence, average=average, note=note)
    target = output.resolve()  # the folder itself, not `.` or a link to it
    with new_folder(target) as temporary:
        (temporary / "README.md").write_text(card, encoding="utf-8")
        worst = _write(temporary, model, source, Path(given), form=form, onnx=onnx)
        if not worst <= TOLERANCE:  # also when it is NaN
            raise UserError(
                f"The export differs from the trained model by {worst:.1e}, more than {TOLERANCE:g}: it is not kept. "
                "Other versions of torch or open_clip than those of the checkpoint may be the cause."
            )
        if stopped:
            sys.exit(stopped[0])
        check_new_folder(output)  # again: another process may have written there
        if target.exists() and target.samefile(os.curdir):  # a shell's folder must not be replaced under it
            for path in temporary.iterdir():
                path.replace(target / path.name)
            temporary.rmdir()
    return worst, note


def _write(
    folder: Path, model: EvaluationModel, source: Checkpoint | str, given: Path, *, form: str, onnx: bool
) -> float:
    """Fill a folder; `given` is the model folder of a checkpoint. Returns the largest difference, NaN if any is."""
    examples, logit = example_inputs(model), model.towers.logit or (DEFAULT_LOGIT, None)
    if form == "transformers":
        return write_transformers(model, folder, examples=examples, logit=logit)
    if isinstance(source, Checkpoint):
        (folder / RUN_CONFIG_NAME).write_text(dump(source.meta["config"]), encoding="utf-8")
        for name in (MODEL_CONFIG_NAME, WEIGHTS_NAME):
            shutil.copyfile(given / name, folder / name)
        if (given / ADAPTERS_NAME).is_dir():
            (folder / ADAPTERS_NAME).mkdir()
            for name in ADAPTER_FILES:
                shutil.copyfile(given / ADAPTERS_NAME / name, folder / ADAPTERS_NAME / name)
        save_tokenizer(model.tokenize, folder)
    else:
        state = model.towers.clip.state_dict()
        save_open_clip(folder, state=state, architecture=model.architecture, logit=logit)
    differences = [_check_open_clip(folder, model, examples, logit=logit)]
    if onnx:
        sides = zip(("image", "text"), examples, strict=True)
        differences += [_export_onnx(folder, side, model.towers, example) for side, example in sides]
    return float(torch.tensor(differences).max())


def example_inputs(model: EvaluationModel) -> tuple[Tensor, Tensor]:
    """Random normalised images [3, 3, H, W] from a fixed seed, and tokens [3, L] of short and long texts."""
    generator = torch.Generator().manual_seed(0)
    text = model.tokenize(["a", "a photo of a dog on the beach", "two red circles and a cup of coffee " * 12])
    return torch.randn(3, 3, model.image_size, model.image_size, generator=generator), text


@torch.no_grad()
def _check_open_clip(
    folder: Path, model: EvaluationModel, examples: tuple[Tensor, Tensor], *, logit: tuple[float, float | None]
) -> float:
    """Largest difference between open_clip's model of this folder and the trained towers, in features and logits."""
    import open_clip

    theirs = open_clip.create_model(f"local-dir:{folder}").eval()
    image, text = examples
    ours = model.encode_image(image), model.encode_text(text)
    features = theirs.encode_image(image, normalize=True), theirs.encode_text(text, normalize=True)
    logits, _ = theirs.get_logits(image, text)
    scale, bias = math.exp(logit[0]), logit[1]
    # Logits in units of cosines, so that one tolerance holds for all.
    expected = ours[0] @ ours[1].T + (bias or 0.0) / scale
    pairs = (*zip(ours, features, strict=True), (expected, logits / scale))
    return float(torch.stack([(a - b).abs().max() for a, b in pairs]).max())  # NaN if any is


class Tower(nn.Module):
    """[B, 3, H, W] normalised images, or [B, L] tokens -> [B, d] unit-norm features."""

    def __init__(self, towers: Towers, side: str) -> None:
        super().__init__()
        self.towers, self.side = towers, side

    def forward(self, x: Tensor) -> Tensor:
        return self.towers.encode_image(x) if self.side == "image" else self.towers.encode_text(x)


@torch.no_grad()
def _export_onnx(folder: Path, side: str, towers: Towers, example: Tensor) -> float:
    """Write `SIDE.onnx`. Returns the largest difference of its features, by onnxruntime, from the tower's."""
    import onnxruntime

    logging.getLogger("onnxscript").setLevel(logging.ERROR)  # it logs every constant that it does not fold
    path, tower = folder / f"{side}.onnx", Tower(towers, side).eval()
    shapes = ({0: torch.export.Dim("batch")},)
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # a fused kernel for inference, which no exporter supports
    try:
        named: dict[str, Any] = {"input_names": [side], "output_names": ["features"]}
        program = torch.onnx.export(tower, (example,), **named, dynamic_shapes=shapes, dynamo=True, verbose=False)
        assert program is not None
        for node in program.model.graph.all_nodes():
            node.metadata_props.clear()  # stack traces, with the paths of this machine
        program.save(path, external_data=False)
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        batches = (example, example[:2])  # of another size, too
        outputs = [torch.from_numpy(session.run(None, {side: x.numpy()})[0]) for x in batches]
        return float(torch.stack([(a - tower(x)).abs().max() for a, x in zip(outputs, batches, strict=True)]).max())
    finally:
        torch.backends.mha.set_fastpath_enabled(before)

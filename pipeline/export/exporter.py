"""Finished models for others: a hub-ready open_clip folder with a model card, torch.export programs, ONNX files.

    EXPORT/
        open_clip_config.json, open_clip_model.safetensors   what open_clip loads, by folder or as `pretrained=FILE`
        README.md, config.yaml                               the run's facts, for people and for machines
        image.pt2, text.pt2, image.onnx, text.onnx           on request: towers that need no open_clip

Towers of the last line map normalised images [B, 3, H, W] or tokens [B, L] to unit-norm features [B, d], any B.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.checkpoint.layout import META_NAME, finished_checkpoints
from pipeline.checkpoint.reader import Checkpoint, open_checkpoint
from pipeline.errors import UserError
from pipeline.model.architectures import CONFIG_NAME
from pipeline.model.evaluation_model import EvaluationModel, load_for_evaluation
from pipeline.model.model_folder import WEIGHTS_NAME
from pipeline.model.towers import Towers

PROGRAMS = ("torch", "onnx")
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Exported:
    """Where an export lies, and the largest difference of any feature or logit seen in the check of it."""

    folder: Path
    files: tuple[Path, ...]
    difference: float


def choose_checkpoint(source: Path) -> Checkpoint:
    """A checkpoint's folder, or the newest of a run; verified. Raises: UserError when there is none that is whole."""
    path = source
    if not (path / META_NAME).is_file():
        finished = finished_checkpoints(source)
        if not finished:
            raise UserError(f"{source} is neither a checkpoint ({META_NAME} is missing) nor a run with checkpoints.")
        path = finished[-1]
    try:
        return open_checkpoint(path)
    except UserError as error:
        raise UserError(f"{path} is damaged and not exported: {error} Name another checkpoint of the run.") from error


def export(checkpoint: Checkpoint, output: Path, *, card: str, programs: Iterable[str] = ()) -> Exported:
    """Write the folder and hold everything in it against the trained towers.

    Args: card: text of README.md. programs: any of `PROGRAMS`.
    Raises: UserError when `output` holds something, ONNX's packages are missing, or a result differs by over 1e-5.
    """
    if output.exists() and any(output.iterdir()):
        raise UserError(f"{output} is not empty: choose another output folder.")
    programs = tuple(programs)
    if "onnx" in programs:
        _require_onnx()
    temporary = output.with_name(f".{output.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        worst = _write(checkpoint, temporary, card=card, programs=programs)
        temporary.replace(output)  # which is not there, or empty
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Exported(output, tuple(sorted(path for path in output.iterdir() if path.is_file())), worst)


def _write(checkpoint: Checkpoint, output: Path, *, card: str, programs: tuple[str, ...]) -> float:
    """Write and check the folder. Returns the largest difference. Raises: UserError when it is too large."""
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        shutil.copyfile(checkpoint.path / name, output / name)
    (output / "config.yaml").write_text(dump_config(checkpoint), encoding="utf-8")
    (output / "README.md").write_text(card, encoding="utf-8")
    model = load_for_evaluation(str(checkpoint.path))
    examples = example_inputs(model)
    differences = [_check_open_clip(output, model, examples)]
    if "torch" in programs:
        differences += [_export_torch(output, side, tower, x) for side, tower, x in _sides(model, examples)]
    if "onnx" in programs:
        differences += [_export_onnx(output, side, tower, x) for side, tower, x in _sides(model, examples)]
    worst = float(torch.tensor(differences).max())  # NaN when any of them is
    if not worst <= TOLERANCE:
        raise UserError(
            f"The export differs from the trained model by {worst:.1e}, more than {TOLERANCE:g}: it is not kept. "
            "Other versions of torch or open_clip than those of the checkpoint may be the cause."
        )
    return worst


def dump_config(checkpoint: Checkpoint) -> str:
    """The run's resolved recipe as YAML."""
    import yaml

    text: str = yaml.safe_dump(dict(checkpoint.meta["config"]), sort_keys=False, allow_unicode=True)
    return text


def example_inputs(model: EvaluationModel, *, batch: int = 3) -> tuple[Tensor, Tensor]:
    """Random normalised images [B, 3, H, W] and tokens [B, L] that end where texts end, from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    size, words = model.image_size, int(model.architecture.model_cfg["text_cfg"].get("vocab_size", 49408))
    length = model.tokenize(["a"]).shape[1]
    text = torch.zeros(batch, length, dtype=torch.int64)
    for row, stop in enumerate(torch.randint(3, length + 1, (batch,), generator=generator).tolist()):
        text[row, :stop] = torch.randint(1, words - 2, (stop,), generator=generator)
        text[row, 0], text[row, stop - 1] = words - 2, words - 1
    return torch.randn(batch, 3, size, size, generator=generator), text


class ImageTower(nn.Module):
    """[B, 3, H, W] normalised images -> [B, d] unit-norm features."""

    def __init__(self, towers: Towers) -> None:
        super().__init__()
        self.towers = towers

    def forward(self, image: Tensor) -> Tensor:
        return self.towers.encode_image(image)


class TextTower(nn.Module):
    """[B, L] tokens -> [B, d] unit-norm features."""

    def __init__(self, towers: Towers) -> None:
        super().__init__()
        self.towers = towers

    def forward(self, text: Tensor) -> Tensor:
        return self.towers.encode_text(text)


def _sides(model: EvaluationModel, examples: tuple[Tensor, Tensor]) -> Iterator[tuple[str, nn.Module, Tensor]]:
    yield "image", ImageTower(model.towers).eval(), examples[0]
    yield "text", TextTower(model.towers).eval(), examples[1]


@torch.no_grad()
def _check_open_clip(folder: Path, model: EvaluationModel, examples: tuple[Tensor, Tensor]) -> float:
    """Features of open_clip's model of this folder against the trained towers'; its logits against f1 f2 / tau + b."""
    import open_clip

    theirs = open_clip.create_model(f"local-dir:{folder}").eval()
    image, text = examples
    ours = model.encode_image(image), model.encode_text(text)
    found = theirs.encode_image(image, normalize=True), theirs.encode_text(text, normalize=True)
    logits, _ = theirs.get_logits(image, text)
    scale, bias = logit_parameters(folder)
    # Logits in units of cosines, so that one tolerance holds for all.
    expected = ours[0] @ ours[1].T + bias / scale
    pairs = (*zip(ours, found, strict=True), (expected, logits / scale))
    return max(float((a - b).abs().max()) for a, b in pairs)


def logit_parameters(folder: Path) -> tuple[float, float]:
    """`(1 / tau, bias)` of a model folder."""
    from safetensors import safe_open

    with safe_open(folder / WEIGHTS_NAME, framework="pt") as file:
        names = set(file.keys())
        scale = float(file.get_tensor("logit_scale").exp())
        bias = float(file.get_tensor("logit_bias")) if "logit_bias" in names else 0.0
    return scale, bias


@contextmanager
def _traceable() -> Iterator[None]:
    """Without the fused inference kernel of torch's multi-head attention, which no exporter knows."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _export_torch(folder: Path, side: str, tower: nn.Module, example: Tensor) -> float:
    path = folder / f"{side}.pt2"
    with _traceable():
        program = torch.export.export(tower, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        torch.export.save(program, path)
        again = torch.export.load(path).module()
        return max(float((again(x) - tower(x)).abs().max()) for x in (example, example[:2]))


def _export_onnx(folder: Path, side: str, tower: nn.Module, example: Tensor) -> float:
    import onnxruntime

    logging.getLogger("onnxscript").setLevel(logging.ERROR)  # it tells of every constant that it does not fold
    path = folder / f"{side}.onnx"
    shapes: Any = ({0: torch.export.Dim("batch")},)
    with _traceable():
        torch.onnx.export(
            tower,
            (example,),
            path,
            input_names=[side],
            output_names=["features"],
            dynamic_shapes=shapes,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        worst = 0.0
        for x in (example, example[:2]):
            (found,) = session.run(None, {side: x.numpy()})
            worst = max(worst, float((torch.from_numpy(found) - tower(x)).abs().max()))
    return worst


def _require_onnx() -> None:
    import importlib.util

    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"ONNX export needs {', '.join(missing)}: pip install -c constraints.txt -e '.[onnx]'.")

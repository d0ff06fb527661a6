"""The model card of an export, from the run's own files only."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.checkpoint.layout import ADAPTERS_NAME
from pipeline.checkpoint.reader import Checkpoint
from pipeline.config import flatten
from pipeline.export.transformers_model import is_siglip
from pipeline.files import read_bounded
from pipeline.model.architectures import Architecture, load_open_clip
from pipeline.model.model_folder import weights_digest
from pipeline.model.starting_weights import HUB
from pipeline.pictures.pixels import colour_name
from pipeline.report.page import in_markdown
from pipeline.report.stored_scores import StoredEvaluation, read_evaluations
from pipeline.run_files import METRICS_NAME, MODEL_CONFIG_NAME, read_records

SHOWN_METRICS = ("loss", "tau", "normalizer_gap", "lr", "samples_per_second", "corrupt_samples")


def model_card(
    checkpoint: Checkpoint,
    *,
    logit: tuple[float, float | None] | None,
    programs: tuple[str, ...] = (),
    form: str = "open_clip",
    licence: str | None = None,
    average: bool = False,
) -> str:
    """README.md with the front matter that model hubs read.

    Args:
        checkpoint: The exported checkpoint.
        logit: log(1 / tau) and the bias of the logits, if there is one.
        programs: Kinds of additional files, "torch" and "onnx".
        form: What loads the folder, open_clip or transformers.
        licence: The hub's identifier of the weights' licence.
        average: The export has the average of the weights (EMA).
    """
    run = checkpoint.path.parent.parent
    config = checkpoint.meta["config"]
    model = json.loads(read_bounded(checkpoint.path / MODEL_CONFIG_NAME))
    method, arch = config["objective"]["name"], model["architecture"]
    snippet = _transformers_usage(model["model_cfg"]) if form == "transformers" else _USAGE_OPEN_CLIP
    snippet = snippet.replace('"white"', f'"{config["data"].get("background", "white")}"')
    parts = [
        _front_matter(form=form, method=method, licence=licence, base=_base_model(arch, config["model"])),
        f"# {arch}, trained with {method}",
        snippet,
        "## Training\n\n" + _table(("", ""), _facts(checkpoint, logit=logit)),
    ]
    metrics = _metrics(run / METRICS_NAME, step=checkpoint.step)
    if metrics:
        parts.append(f"Last record up to step {checkpoint.step:,}:\n\n" + _table(("metric", "value"), metrics))
    if average:
        decay = config["ema"]["decay"]
        parts.append(f"These weights are an exponential moving average of the trained ones (decay {decay:g}).")
    parts.append("## Evaluation\n\n" + _evaluation(run, checkpoint, average=average))
    if programs:
        kinds = {"torch": "`image.pt2`, `text.pt2` (torch.export)", "onnx": "`image.onnx`, `text.onnx` (ONNX)"}
        files = ", ".join(kinds[program] for program in programs)
        parts.append(
            f"## Further files\n\n{files}: normalised images [B, 3, H, W] or tokens [B, L] to unit-norm features "
            "[B, d], any batch size."
        )
    if form == "open_clip" and checkpoint.meta.get("adapters_of"):
        parts.append(
            f"## Adapters\n\nThe LoRA adapters are merged into the weights. `{ADAPTERS_NAME}/` has them alone, in "
            f"peft's format, for the weights of `{config['model']['pretrained']}`."
        )
    start = config["model"].get("pretrained")
    started = f", and of the starting weights, `{in_markdown(str(start))}`," if start else ""
    stated = licence or (
        f"not stated. It depends on the licences of the training data{started} which have to allow what you do with "
        "them: ask before you publish, and state it with `neuclip export --license`."
    )
    parts.append(f"## Licence\n\nOf these weights: {stated}.")
    if form == "open_clip":
        parts.append("Every setting is in `config.yaml`.")
    return "\n\n".join(parts) + "\n"


def foreign_card(spec: str, *, architecture: Architecture, form: str, licence: str | None) -> str:
    """README.md of a model that is no checkpoint of a run: where it is from, and how it is used."""
    snippet = _transformers_usage(architecture.model_cfg) if form == "transformers" else _USAGE_OPEN_CLIP
    snippet = snippet.replace('"white"', f'"{colour_name(architecture.background)}"')
    stated = licence or "not stated; that of the model it was made from applies"
    parts = (
        _front_matter(form=form, method=form, licence=licence),
        f"# {architecture.name}",
        snippet,
        f"Made from `{in_markdown(spec)}` by `neuclip export`.",
        f"## Licence\n\nOf these weights: {stated}.",
    )
    return "\n\n".join(parts) + "\n"


def _base_model(arch: str, model: Mapping[str, Any]) -> str:
    """The hub's name of the weights that a run started from; empty if there are none, or they are not on the hub."""
    start = str(model.get("pretrained") or "")
    if start.startswith(HUB):
        return start.removeprefix(HUB)
    if not start or Path(start).exists():
        return ""
    published = load_open_clip().get_pretrained_cfg(arch, start) or {}
    return "/".join(str(published.get("hf_hub") or "").split("/")[:2])


def _front_matter(*, form: str, method: str, licence: str | None, base: str = "") -> str:
    tags = "\n".join(f"- {tag}" for tag in dict.fromkeys(("clip", form, "neuclip", method)))
    stated = f"license: {licence}\n" if licence else ""
    stated += f"base_model: {base}\n" if base else ""
    return f"---\nlibrary_name: {form}\npipeline_tag: zero-shot-image-classification\n{stated}tags:\n{tags}\n---"


def _transformers_usage(model_cfg: Mapping[str, Any]) -> str:
    return _USAGE_TRANSFORMERS.format(**(_OF_SIGLIP if is_siglip(model_cfg) else _OF_CLIP))


_USAGE_OPEN_CLIP = """```python
import open_clip
import torch
from PIL import Image

FOLDER = "."  # this folder; for a hub repository give "hf-hub:OWNER/NAME" instead of "local-dir:..." below
model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{FOLDER}")
tokenizer = open_clip.get_tokenizer(f"local-dir:{FOLDER}")
model.eval()
picture = Image.new("RGBA", (640, 480), "red")  # yours: Image.open(...).convert("RGBA")
canvas = Image.new("RGB", picture.size, "white")  # as in training
canvas.paste(picture, mask=picture)
image = preprocess(canvas).unsqueeze(0)
classes = ["red", "green", "blue"]
with torch.no_grad():
    logits, _ = model.get_logits(image, tokenizer([f"a photo of something {name}" for name in classes]))
print(dict(zip(classes, logits[0].softmax(0).tolist())))
```"""

_USAGE_TRANSFORMERS = """```python
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModel, {tokenizer}

FOLDER = "."  # this folder, or a hub repository: "OWNER/NAME"
model = AutoModel.from_pretrained(FOLDER).eval()
tokenizer, processor = {tokenizer}.from_pretrained(FOLDER), AutoImageProcessor.from_pretrained(FOLDER)
picture = Image.new("RGBA", (640, 480), "red")  # yours: Image.open(...).convert("RGBA")
image = Image.new("RGB", picture.size, "white")  # as in training
image.paste(picture, mask=picture)
classes = ["red", "green", "blue"]
prompts = [f"a photo of something {{name}}" for name in classes]{lower}
texts = tokenizer(prompts, padding={padding}, truncation=True, return_tensors="pt")
with torch.no_grad():
    logits = model(input_ids=texts["input_ids"], **processor(image, return_tensors="pt")).logits_per_image
print(dict(zip(classes, logits[0].{activation}.tolist())))
```"""
_OF_CLIP = {"tokenizer": "CLIPTokenizer", "lower": "", "padding": "True", "activation": "softmax(0)"}
_OF_SIGLIP = {
    "tokenizer": "AutoTokenizer",
    "lower": "  # lower case, no punctuation, as in training",
    "padding": '"max_length"',
    "activation": "sigmoid()",
}


def _facts(checkpoint: Checkpoint, *, logit: tuple[float, float | None] | None) -> list[tuple[str, str]]:
    meta, config = checkpoint.meta, flatten(checkpoint.meta["config"])
    sources = ", ".join(source["manifest"] for source in config.get("data.sources", []))
    versions = ", ".join(f"{name} {version}" for name, version in meta.get("versions", {}).items())
    return [
        ("method", str(config["objective.name"])),
        ("steps", f"{checkpoint.step:,}"),
        ("samples seen", f"{meta['samples']:,}"),
        ("global batch", f"{config['batch_size']:,}"),
        ("ranks", str(meta.get("world_size", "?"))),
        *([("starting weights", str(start))] if (start := config.get("model.pretrained")) else []),
        ("data", sources),
        ("encoders' learning rate", f"{config['optimizer.lr']:g}"),
        ("weight decay", f"{config['optimizer.weight_decay']:g}"),
        *([("logit scale 1/tau", f"{math.exp(logit[0]):.4f} (tau {math.exp(-logit[0]):.5f})")] if logit else []),
        *([("logit bias", f"{logit[1]:.4f}")] if logit and logit[1] is not None else []),
        ("seed", str(config["seed"])),
        ("software", versions),
    ]


def _metrics(path: Path, *, step: int) -> list[tuple[str, str]]:
    """The figures of the last training record up to `step`."""
    last: Mapping[str, Any] = {}
    for record in read_records(path):
        if record.get("kind") == "train" and isinstance(at := record.get("step"), int) and at <= step:
            last = record
    return [(name, f"{last[name]:.6g}") for name in SHOWN_METRICS if isinstance(last.get(name), int | float)]


def _evaluation(run: Path, checkpoint: Checkpoint, *, average: bool) -> str:
    """The scores of the exported weights; digests distinguish trained weights from their average."""
    folders = [run / "evaluation", run / "evaluation-ema"]
    stored = [e for folder in folders for e in read_evaluations(folder, lambda _: None, [])]
    evaluations: list[StoredEvaluation] = [e for e in stored if e.checkpoint == checkpoint.path.name]
    if (weights := checkpoint.ema()) is not None:
        digest = weights_digest(weights if average else checkpoint.weights())
        evaluations = [
            e for e in evaluations if e.scores and all(s.inputs.get("checkpoint") == digest for s in e.scores)
        ]
    if not evaluations or not evaluations[0].scores:
        return "This checkpoint has not been evaluated."
    evaluation = evaluations[0]
    rows = []
    for score in evaluation.scores:
        chance = "" if score.chance is None else f"{score.chance:.4f}"
        rows.append((score.label, score.main_metric, f"{score.score:.4f}", chance, f"{score.samples:,}"))
    text = _table(("task", "metric", "score", "chance", "samples"), rows)
    if evaluation.failures:
        text += f"\n\nWithout a score, since they failed: {', '.join(sorted(evaluation.failures))}."
    return text


def _table(names: tuple[str, ...], rows: list[Any]) -> str:
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    lines += ["| " + " | ".join(in_markdown(str(cell)) for cell in row) + " |" for row in rows]
    return "\n".join(lines)

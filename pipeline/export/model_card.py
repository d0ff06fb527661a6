"""The model card of an export, from the run's own files only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import open_clip

from pipeline.checkpoint.reader import Checkpoint
from pipeline.errors import UserError
from pipeline.export.transformers_model import is_siglip
from pipeline.model.architectures import Architecture
from pipeline.model.model_folder import weights_digest
from pipeline.model.starting_weights import HUB
from pipeline.pictures.pixels import colour_name
from pipeline.report.page import in_markdown
from pipeline.report.stored_scores import StoredEvaluation, read_evaluations
from pipeline.run_files import META_NAME


def model_card(
    source: Checkpoint | str,
    architecture: Architecture,
    *,
    form: str = "open_clip",
    licence: str | None = None,
    average: bool = False,
    note: str = "",
) -> str:
    """README.md with the front matter that model hubs read: how to load the model, its data, settings and scores.

    Arguments are those of `export`; `note` is its sentence about what the form cannot hold.

    Raises:
        UserError: The checkpoint lacks settings of a run.
    """
    title, base, method = architecture.name, "", form
    if isinstance(source, Checkpoint):
        config = source.meta["config"]
        try:
            method, start = config["objective"]["name"], str(config["model"].get("pretrained") or "")
            title, base = f"{title}, trained with {method}", _base_model(architecture.name, start)
            parts = ["## Training\n\n" + _table(("", ""), _facts(source, average=average))]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{source.path / META_NAME} lacks settings of a run that the model card needs ({error!r}): it is "
                "forged, or of another version."
            ) from error
        if form == "open_clip":
            merged = " The LoRA adapters are merged into the weights; `adapters/` has them alone."
            adapted = merged if source.meta.get("adapters_of") else ""
            parts.append(f"Every setting is in `config.yaml`.{adapted}")
        parts.append("## Evaluation\n\n" + _evaluation(source, average=average))
        started = f", and of the starting weights, `{in_markdown(start)}`," if start else ""
        unstated = (
            f"not stated. It depends on the licences of the training data{started} which have to allow what you do "
            "with them: ask before you publish, and state it with `neuclip export --license`"
        )
    else:
        parts = [f"Made from `{in_markdown(source)}` by `neuclip export`."]
        unstated = "not stated; that of the model it was made from applies"
    parts.append(f"## Licence\n\nOf these weights: {licence or unstated}.")
    head = ["library_name: " + form, "pipeline_tag: zero-shot-image-classification"]
    head += [f"license: {licence}"] if licence else []
    head += [f"base_model: {base}"] if base else []
    head += ["tags:", *(f"- {tag}" for tag in dict.fromkeys(("clip", form, "neuclip", method)))]
    usage = _USAGE if form == "open_clip" else _USAGE_TRANSFORMERS
    if form != "open_clip" and is_siglip(architecture.model_cfg):
        usage = usage.replace("softmax(0)", "sigmoid()")
    usage = usage.replace('"white"', f'"{colour_name(architecture.background)}"')
    return "\n\n".join(filter(None, ("\n".join(("---", *head, "---")), f"# {title}", usage, note, *parts))) + "\n"


def _base_model(arch: str, start: str) -> str:
    """The hub's name of the weights that a run started from; empty if there are none, or they are not on the hub."""
    if start.startswith(HUB):
        return start.removeprefix(HUB)
    if not start or Path(start).exists():
        return ""
    published = open_clip.get_pretrained_cfg(arch, start) or {}
    return "/".join(str(published.get("hf_hub") or "").split("/")[:2])


_USAGE = """```python
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
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

FOLDER = "."  # this folder, or a hub repository: "OWNER/NAME"
model = AutoModel.from_pretrained(FOLDER).eval()
tokenizer, processor = AutoTokenizer.from_pretrained(FOLDER), AutoImageProcessor.from_pretrained(FOLDER)
picture = Image.new("RGBA", (640, 480), "red")  # yours: Image.open(...).convert("RGBA")
image = Image.new("RGB", picture.size, "white")  # as in training
image.paste(picture, mask=picture)
classes = ["red", "green", "blue"]
prompts = [f"a photo of something {name}" for name in classes]  # in lower case, as in training
texts = tokenizer(prompts, padding="max_length", truncation=True, return_tensors="pt")
with torch.no_grad():
    logits = model(input_ids=texts["input_ids"], **processor(image, return_tensors="pt")).logits_per_image
print(dict(zip(classes, logits[0].softmax(0).tolist())))
```"""


def _facts(checkpoint: Checkpoint, *, average: bool) -> list[tuple[str, str]]:
    meta, config = checkpoint.meta, checkpoint.meta["config"]
    start, decay = config["model"].get("pretrained"), config.get("ema", {}).get("decay")
    return [
        ("method", str(config["objective"]["name"])),
        ("data", ", ".join(source["manifest"] for source in config["data"].get("sources", []))),
        *([("starting weights", str(start))] if start else []),
        ("steps", f"{checkpoint.step:,}"),
        ("samples seen", f"{meta['samples']:,}"),
        ("global batch", f"{config['batch_size']:,}"),
        ("learning rate", f"{config['optimizer']['lr']:g}"),
        *([("weights", f"an exponential moving average of the trained ones (decay {decay:g})")] if average else []),
        ("software", ", ".join(f"{name} {version}" for name, version in meta.get("versions", {}).items())),
    ]


def _evaluation(checkpoint: Checkpoint, *, average: bool) -> str:
    """The scores of the exported weights; digests distinguish trained weights from their average."""
    run, digest = checkpoint.path.parent.parent, None
    if (weights := checkpoint.ema()) is not None:
        digest = weights_digest(weights if average else checkpoint.weights())

    def is_of_these(evaluation: StoredEvaluation) -> bool:
        of_weights = digest is None or all(s.inputs.get("checkpoint") == digest for s in evaluation.scores)
        return evaluation.checkpoint == checkpoint.path.name and bool(evaluation.scores) and of_weights

    stored = (e for name in ("evaluation", "evaluation-ema") for e in read_evaluations(run / name, lambda _: None, []))
    if (evaluation := next(filter(is_of_these, stored), None)) is None:
        return "This checkpoint has not been evaluated."
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

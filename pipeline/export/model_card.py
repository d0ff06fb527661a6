"""The model card of an export: what the run's own files say about it, and nothing they do not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.checkpoint.reader import Checkpoint
from pipeline.config import flatten
from pipeline.model.architectures import CONFIG_NAME
from pipeline.model.model_folder import WEIGHTS_NAME
from pipeline.report.run_page import in_markdown
from pipeline.report.stored_scores import StoredEvaluation, read_evaluations

METRICS_NAME = "metrics.jsonl"
SHOWN_METRICS = ("loss", "tau", "normalizer_gap", "lr", "samples_per_second", "corrupt_samples")


def model_card(checkpoint: Checkpoint, *, scale: float, bias: float, programs: tuple[str, ...] = ()) -> str:
    """README.md with the front matter that model hubs read.

    Args: scale, bias: of open_clip's logits. programs: kinds of further files, see `pipeline.export.exporter`.
    """
    run = checkpoint.path.parent.parent
    config = checkpoint.meta["config"]
    method, arch = config["objective"]["name"], json.loads((checkpoint.path / CONFIG_NAME).read_text())["architecture"]
    tags = "\n".join(f"- {tag}" for tag in ("clip", "open_clip", "neuclip", method))
    parts = [
        f"---\nlibrary_name: open_clip\npipeline_tag: zero-shot-image-classification\ntags:\n{tags}\n---",
        f"# {arch}, trained with {method}",
        _usage(arch, bias=bias, image_size=config["model"].get("image_size")),
        "## Training\n\n" + _table(("", ""), _facts(checkpoint, scale=scale, bias=bias)),
    ]
    metrics = _metrics(run / METRICS_NAME, step=checkpoint.step)
    if metrics:
        parts.append(f"Last record up to step {checkpoint.step:,}:\n\n" + _table(("metric", "value"), metrics))
    parts.append("## Evaluation\n\n" + _evaluation(run, checkpoint.path.name))
    if programs:
        kinds = {"torch": "`image.pt2`, `text.pt2` (torch.export)", "onnx": "`image.onnx`, `text.onnx` (ONNX)"}
        parts.append(
            "## Further files\n\n"
            + ", ".join(kinds[p] for p in programs)
            + ": normalised images [B, 3, H, W] or tokens "
            "[B, L] to unit-norm features [B, d], any batch size."
        )
    parts.append("Every setting is in `config.yaml`.")
    return "\n\n".join(parts) + "\n"


def _usage(arch: str, *, bias: float, image_size: int | None) -> str:
    extra = f", force_image_size={image_size}" if image_size else ""
    extra += ", init_logit_bias=0.0" if bias else ""
    return (
        "```python\nimport open_clip\n\n"
        '# This folder, or a hub repository with its files ("hf-hub:NAME"):\n'
        'model, _, preprocess = open_clip.create_model_and_transforms("local-dir:FOLDER")\n'
        'tokenizer = open_clip.get_tokenizer("local-dir:FOLDER")\n'
        "# Or the weights alone, for an architecture that open_clip knows:\n"
        f'model, _, preprocess = open_clip.create_model_and_transforms("{arch}", '
        f'pretrained="FOLDER/{WEIGHTS_NAME}"{extra})\n```'
    )


def _facts(checkpoint: Checkpoint, *, scale: float, bias: float) -> list[tuple[str, str]]:
    meta, config = checkpoint.meta, flatten(checkpoint.meta["config"])
    sources = ", ".join(source["manifest"] for source in config.get("data.sources", []))
    versions = ", ".join(f"{name} {version}" for name, version in meta.get("versions", {}).items())
    facts = [
        ("method", str(config["objective.name"])),
        ("steps", f"{checkpoint.step:,}"),
        ("samples seen", f"{meta['samples']:,}"),
        ("global batch", f"{config['batch_size']:,}"),
        ("ranks", str(meta.get("world_size", "?"))),
        ("data", sources),
        ("encoders' learning rate", f"{config['optimizer.lr']:g}"),
        ("weight decay", f"{config['optimizer.weight_decay']:g}"),
        ("logit scale 1/tau", f"{scale:.4f} (tau {1 / scale:.5f})"),
        ("seed", str(config["seed"])),
        ("software", versions),
    ]
    if bias:
        facts.insert(9, ("logit bias", f"{bias:.4f}"))
    return facts


def _metrics(path: Path, *, step: int) -> list[tuple[str, str]]:
    """The figures of the last training record up to `step`."""
    last: Mapping[str, Any] = {}
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue  # a line that a crash cut short
            if record.get("kind") == "train" and record["step"] <= step:
                last = record
    return [(name, f"{last[name]:.6g}") for name in SHOWN_METRICS if name in last]


def _evaluation(run: Path, checkpoint: str) -> str:
    found = [e for e in read_evaluations(run / "evaluation", lambda _: None, []) if e.checkpoint == checkpoint]
    if not found or not found[0].scores:
        return "This checkpoint has not been evaluated."
    evaluation: StoredEvaluation = found[0]
    rows = [
        (score.label, score.main_metric, f"{score.score:.4f}", "" if score.chance is None else f"{score.chance:.4f}",
         f"{score.samples:,}")
        for score in evaluation.scores
    ]  # fmt: skip
    text = _table(("task", "metric", "score", "chance", "samples"), rows)
    if evaluation.failures:
        text += f"\n\nWithout a score, since they failed: {', '.join(sorted(evaluation.failures))}."
    return text


def _table(names: tuple[str, ...], rows: list[Any]) -> str:
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    lines += ["| " + " | ".join(in_markdown(str(cell)) for cell in row) + " |" for row in rows]
    return "\n".join(lines)

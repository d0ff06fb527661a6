"""Where results go, and the files beside them: a summary that is a function of the results, timings that are not."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import UserError
from pipeline.evaluation.runner.aggregate import aggregate
from pipeline.evaluation.runner.results import read_results
from pipeline.files import write_json

if TYPE_CHECKING:
    from pipeline.evaluation.datasets.suite import Suite
    from pipeline.evaluation.runner.evaluator import Evaluation

SUMMARY_NAME, TIMINGS_NAME = "summary.json", "timings.json"


def output_folders(sources: Sequence[str], output: str | Path | None) -> list[Path]:
    """One folder per checkpoint. Raises: UserError when two checkpoints would share one."""
    if output is not None and len(sources) == 1:
        return [Path(output)]
    if output is not None:
        folders = [Path(output) / checkpoint_name(source) for source in sources]
    else:
        folders = [default_folder(source) for source in sources]
    twice = {folder for folder in folders if folders.count(folder) > 1}
    if twice:
        raise UserError(
            f"Several checkpoints would write to {min(twice)}: evaluate them in calls of their own, "
            "each with an --output of its own."
        )
    return folders


def checkpoint_name(source: str) -> str:
    """`step-00000500` for a folder, `ViT-B-32-openai` for ARCH:PRETRAINED."""
    name = Path(source).resolve().name if Path(source).is_dir() else source
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")


def default_folder(source: str) -> Path:
    """RUN/evaluation/<checkpoint> for RUN/checkpoints/<checkpoint>, else evaluation/<name> below the current folder."""
    path = Path(source).resolve()
    if path.is_dir() and path.parent.name == "checkpoints":
        return path.parent.parent / "evaluation" / path.name
    return Path("evaluation") / checkpoint_name(source)


def write_summaries(evaluations: Sequence[Evaluation], suite: Suite) -> None:
    """`summary.json` (scores, failures, aggregates) and `timings.json` beside every checkpoint's results.

    Results and failures of other suites or tasks of the same checkpoint, evaluated before, stay in the summary.
    """
    for evaluation in evaluations:
        now = {entry.task.key for entry in suite.entries}
        digest = evaluation.model.digest
        results = {
            key: result
            for key, result in read_results(evaluation.folder).items()
            if key not in now and result.inputs.get("checkpoint") == digest
        } | evaluation.results
        earlier = {key: text for key, text in _earlier_failures(evaluation.folder, digest).items() if key not in now}
        tree = {
            "checkpoint": digest,
            "scores": {
                key: {"name": r.name, "score": r.score, "chance": r.chance, "samples": r.samples}
                for key, r in sorted(results.items())
            },
            "failures": dict(sorted((earlier | evaluation.failures).items())),
            "aggregates": {name: asdict(value) for name, value in aggregate(results).items()},
        }
        write_json(evaluation.folder / SUMMARY_NAME, tree, durable=True)
        if evaluation.timings:
            earlier = _read(evaluation.folder / TIMINGS_NAME).get("tasks", {})
            timings = {"source": evaluation.model.source, "tasks": earlier | evaluation.timings}
            write_json(evaluation.folder / TIMINGS_NAME, timings, durable=True)


def _earlier_failures(folder: Path, digest: str) -> dict[str, str]:
    tree = _read(folder / SUMMARY_NAME)
    return dict(tree.get("failures", {})) if tree.get("checkpoint") == digest else {}


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}

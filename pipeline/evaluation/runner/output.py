"""Output folders, and the summary of results for one suite and one group of settings."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.checkpoint.layout import EMA_NAME, FOLDER_NAME, PREFIX
from pipeline.errors import UserError
from pipeline.evaluation.datasets.suite import Suite
from pipeline.evaluation.datasets.task_data import plain
from pipeline.evaluation.runner.aggregate import aggregate
from pipeline.evaluation.runner.checkpoint_evaluation import Evaluation, Summary
from pipeline.evaluation.runner.official_output import write_official
from pipeline.evaluation.runner.results import SETTINGS, TaskResult, read_results
from pipeline.evaluation.runner.suite_lock import LOCK_NAME
from pipeline.files import write_text

SUMMARY_NAME, TIMINGS_NAME = "summary.json", "timings.json"
LONGEST_NAME = 80


def output_folders(sources: Sequence[str], output: str | Path | None) -> list[Path]:
    """One folder per checkpoint.

    Raises:
        UserError: `output` cannot be a folder, or two checkpoints would share one.
    """
    if output is not None:
        check_output(Path(output))
        if len(sources) == 1:
            return [Path(output)]
        return [Path(output) / name for name in _distinct(sources)]
    folders = [default_folder(source) for source in sources]
    twice = {folder for folder in folders if folders.count(folder) > 1}
    if twice:
        raise UserError(
            f"Several checkpoints would write to {min(twice)}: evaluate them in calls of their own, "
            "each with an --output of its own."
        )
    return folders


def check_output(output: Path) -> None:
    """Check that results can be written to this path.

    Raises:
        UserError: They cannot.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise UserError(f"--output {output} is a file: give a folder, new or existing.") from error
    except OSError as error:
        shown = plain(output, longest=200)
        raise UserError(f"--output {shown} cannot be a folder: {error.strerror}. Give another.") from error
    if not os.access(output, os.W_OK | os.X_OK):
        raise UserError(f"Results cannot be written to {output}: it is read-only. Give another --output.")


def checkpoint_name(source: str) -> str:
    """A short folder name: `step-00000500` for a folder, `ViT-B-32-openai` for ARCH:PRETRAINED."""
    arch, colon, pretrained = source.partition(":")
    if Path(source).is_dir() or not colon:
        name = Path(source).resolve().name
    else:
        name = f"{Path(arch).stem if arch.endswith('.json') else arch}-{_stem(pretrained)}"
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 9]}-{_short_digest(source)}"


def default_folder(source: str) -> Path:
    """RUN/evaluation/<checkpoint> for RUN/checkpoints/<checkpoint>, else evaluation/<name> below the current folder.

    For the average of the weights in a checkpoint: RUN/evaluation-ema/<checkpoint>.
    """
    path = Path(source).resolve()
    if path.is_dir() and path.name == EMA_NAME and path.parent.parent.name == FOLDER_NAME:
        return path.parents[2] / "evaluation-ema" / path.parent.name
    if path.is_dir() and path.parent.name == FOLDER_NAME:
        return path.parent.parent / "evaluation" / path.name
    return Path("evaluation") / checkpoint_name(source)


def lock_path(folder: Path, *, several: bool) -> Path:
    """Where the lock of a suite is: one for all checkpoints of a run or of a call, else beside the results."""
    shared = several or (folder.name.startswith(PREFIX) and folder.parent.name == "evaluation")
    return (folder.parent if shared else folder) / LOCK_NAME


def summarize(evaluation: Evaluation, suite: Suite, settings: Mapping[str, Any]) -> Summary:
    """This evaluation's results, with those of the suite's other tasks from earlier evaluations that fit them.

    Args:
        evaluation: The current evaluation.
        suite: Its suite; results of other tasks are ignored.
        settings: What all results must have in common.
    """
    now = {entry.task.key for entry in suite.entries}
    digest, results, left_out = evaluation.model.digest, dict(evaluation.results), {}
    for key, result in read_results(evaluation.folder).items():
        if key in now or result.inputs.get("checkpoint") != digest:
            continue
        reason = _misfit(result, suite, settings, evaluation.lock.data_of(key))
        if reason:
            left_out[key] = reason
        else:
            results[key] = result
    earlier = _read(evaluation.folder / SUMMARY_NAME)
    same = earlier.get("checkpoint") == digest and _part(earlier, "suite").get("name") == suite.name
    failures = {key: str(text) for key, text in _part(earlier, "failures").items()} if same else {}
    failures = {k: text for k, text in failures.items() if k in suite.keys and k not in now and k not in results}
    order = {key: position for position, key in enumerate(suite.keys)}
    results = dict(sorted(results.items(), key=lambda item: order[item[0]]))
    return Summary(results, failures | evaluation.failures, dict(sorted(left_out.items())), aggregate(results))


def _misfit(result: TaskResult, suite: Suite, settings: Mapping[str, Any], locked: str | None) -> str:
    """Why an earlier result is not part of the summary; empty when it is."""
    if result.task not in suite.keys:
        return "it is a task of another suite"
    other = [name for name in SETTINGS if result.inputs.get(name) != settings[name]]
    if other:
        return "it has other settings: " + ", ".join(f"{name}={result.inputs.get(name)}" for name in other)
    if locked is not None and result.inputs.get("task_data") != locked:
        return "it is of other data"
    return ""


def write_summary(evaluation: Evaluation, suite: Suite, settings: Mapping[str, Any]) -> Summary:
    """Write `summary.json`, the tables that other tools read, and `timings.json` beside a checkpoint's results."""
    summary = summarize(evaluation, suite, settings)
    tree = {
        "checkpoint": evaluation.model.digest,
        "suite": {"name": suite.name, "identity": summary.identity, "tasks": len(suite.keys)},
        "settings": dict(settings),
        "scores": {
            key: {"name": r.name, "score": r.score, "chance": r.chance, "samples": r.samples}
            for key, r in sorted(summary.results.items())
        },
        "failures": dict(sorted(summary.failures.items())),
        "left_out": summary.left_out,
        "aggregates": {name: asdict(value) for name, value in summary.aggregates.items()},
        "notes": list(evaluation.notes),
    }
    write_text(evaluation.folder / SUMMARY_NAME, json.dumps(tree, indent=1) + "\n", durable=True)
    write_official(evaluation.folder, summary.results.values())
    if evaluation.timings:
        earlier = _part(_read(evaluation.folder / TIMINGS_NAME), "tasks")
        timings = {"source": evaluation.model.source, "tasks": earlier | evaluation.timings}
        write_text(evaluation.folder / TIMINGS_NAME, json.dumps(timings, indent=1) + "\n", durable=True)
    return summary


def _distinct(sources: Sequence[str]) -> list[str]:
    """Short names of checkpoints; names that would be equal get a digest of their source."""
    names = [checkpoint_name(source) for source in sources]
    count = Counter(names)
    found = [
        name if count[name] == 1 else f"{name}-{_short_digest(str(Path(source).resolve()))}"
        for name, source in zip(names, sources, strict=True)
    ]
    if len(set(found)) < len(found):
        raise UserError(f"The checkpoint {sources[0]} was given twice: give every checkpoint once.")
    return found


def _stem(pretrained: str) -> str:
    path = Path(pretrained)
    return path.stem if path.is_file() or len(path.parts) > 1 else pretrained


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _part(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A mapping within a stored file; empty when it is missing or something else."""
    found = tree.get(name)
    return found if isinstance(found, dict) else {}

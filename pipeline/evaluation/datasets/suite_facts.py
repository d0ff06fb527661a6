"""What a suite's own files say about its tasks: `suite.json`, and `evalsets.json` of sets that were fetched."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.evaluation.datasets.task_data import FACTS_NAME, plain

COUNTS = ("samples", "images", "classes", "captions")
"""What is counted in a task's data."""
FETCHED_NAME = "evalsets.json"


def read_facts(folder: Path) -> dict[str, dict[str, Any]]:
    """Counts (`samples`, `classes`, ...) and digests (`sha256`, by file) that a suite's tasks must have, by task.

    Raises:
        UserError: A file is damaged.
    """
    path = folder / FETCHED_NAME
    try:
        fetched = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        facts = {
            key: {"samples": entry["samples"], "sha256": {name: f["sha256"] for name, f in entry["files"].items()}}
            for key, entry in fetched.items()
        }
        path = folder / FACTS_NAME
        own = dict(json.loads(path.read_text(encoding="utf-8"))["tasks"]) if path.is_file() else {}
        return facts | {key: _checked_facts(key, task) for key, task in own.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is damaged ({plain(repr(error), longest=200)}): make or fetch the suite again."
        ) from error


def _checked_facts(key: str, task: Mapping[str, Any]) -> dict[str, Any]:
    """What `suite.json` says about a task: counts and digests. A misspelt name would check nothing."""
    for name, value in task.items():
        if name == "sha256":
            right = isinstance(value, dict) and all(isinstance(digest, str) for digest in value.values())
        elif name in COUNTS:
            right = isinstance(value, int) and not isinstance(value, bool)
        else:  # other facts, such as those that the scenes' generator writes, are for readers of the file
            right = not difflib.get_close_matches(name, (*COUNTS, "sha256"), cutoff=0.75)
        if not right:
            shown = plain(repr(value), longest=60)
            raise ValueError(f"{key}: {name} = {shown}; allowed are {', '.join(COUNTS)} (whole numbers) and sha256")
    return dict(task)

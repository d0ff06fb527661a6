"""Record what a suite's tasks must contain in `suite.json` beside the data; every later evaluation checks it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.evaluation.datasets.suite import Entry, open_suite, open_task
from pipeline.evaluation.datasets.suite_facts import FACTS_NAME, check_copies, check_digests, file_digests
from pipeline.files import write_json


def record_suite(folder: Path, *, on_note: Callable[[str], None] = lambda note: None) -> dict[str, str]:
    """Write counts and SHA-256 of every task's files to FOLDER/suite.json; check what is already recorded.

    Args:
        folder: The folder of the tasks.
        on_note: Called with a line per task.

    Returns:
        What is wrong, by task; such tasks are not recorded anew.

    Raises:
        UserError: There is no suite in the folder.
    """
    suite, problems = open_suite(folder), {}
    path = suite.folder / FACTS_NAME
    tree: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    tasks: dict[str, Any] = dict(tree.get("tasks", {}))
    for entry in suite.entries:
        key = entry.task.key
        try:
            tasks[key] = {**tasks.get(key, {}), **_facts(entry)}
        except UserError as error:
            problems[key] = str(error)
        recorded = tasks.get(key, {}).get("samples", 0)
        on_note(f"{key}: {problems.get(key) or f'{recorded:,} samples recorded'}")
    write_json(path, {**tree, "tasks": tasks})
    return problems


def _facts(entry: Entry) -> dict[str, Any]:
    data = open_task(entry)
    files = file_digests(data.files, data.folder)
    expected = entry.expected.get("sha256", {})
    check_digests(entry.task.key, files, expected, folder=entry.folder, written="was recorded with the data")
    check_copies(entry.task.key, files)
    return {**data.counts, "sha256": dict(sorted(files.items()))}

"""Which checkpoints of a run can be evaluated now, and whether the results of evaluated ones still exist."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from pipeline.checkpoint.layout import PREFIX, finished_checkpoints
from pipeline.evaluation.datasets.suite import Suite
from pipeline.evaluation.datasets.task_data import file_facts
from pipeline.evaluation.identity import Digests
from pipeline.evaluation.run.checkpoint import default_folder, is_complete, stated_files
from pipeline.evaluation.run.results import read_result
from pipeline.evaluation.run.summary import SUMMARY_NAME
from pipeline.model.architectures import CONFIG_NAME
from pipeline.model.model_folder import WEIGHTS_NAME

NAME = re.compile(rf"^{re.escape(PREFIX)}(\d+)$")
LEDGER_FOLDER = "evaluation-ledger"


class Candidates:
    """The checkpoints of one run, as one watcher sees them."""

    def __init__(self, run: Path, *, every: int) -> None:
        self.run, self._every = run, every
        self._complete: dict[Path, tuple[object, ...]] = {}
        self._weights = Digests(run / LEDGER_FOLDER / "weights.json")
        self._checked: dict[Path, tuple[int, frozenset[str]]] = {}

    def ready(self) -> list[Path]:
        """Checkpoints whose model files exist with their stated sizes, oldest first."""
        return [path for path in self._wanted() if self._is_complete(path)]

    def incomplete(self) -> list[Path]:
        """Checkpoints that are being copied, or are truncated."""
        return [path for path in self._wanted() if not self._is_complete(path)]

    def has_results(self, path: Path, suite: Suite) -> bool:
        """Whether every task of the suite has a readable result for this checkpoint, and a summary of them exists.

        A folder is read again only after something was added to it, renamed or removed.
        """
        folder = default_folder(str(path))
        try:
            changed = folder.stat().st_mtime_ns
        except OSError:
            return False
        if self._checked.get(folder, (None,))[0] != changed:
            found = (read_result(file, undigested=True) for file in sorted(folder.glob("*.json")))
            self._checked[folder] = (changed, frozenset(result.task for result in found if result is not None))
        return (folder / SUMMARY_NAME).is_file() and {e.task.key for e in suite.entries} <= self._checked[folder][1]

    def _wanted(self) -> list[Path]:
        """Folders that are named like a checkpoint; other files and folders are ignored."""
        found = [path for path in finished_checkpoints(self.run) if NAME.match(path.name)]
        return [path for path in sorted(found, key=step) if step(path) % self._every == 0]

    def weights(self, path: Path) -> str:
        """What tells a checkpoint from another one that takes its name: the digests of its files, stated or computed.

        Empty while a file cannot be read.
        """
        try:
            stated = {name: facts.get("sha256") for name, facts in stated_files(path).items()}
            if not stated or not all(stated.values()):
                stated = {name: self._weights.of(path / name) for name in (CONFIG_NAME, WEIGHTS_NAME)}
                self._weights.write()
        except (OSError, ValueError, AttributeError):
            return ""
        return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()[:16]

    def _is_complete(self, path: Path) -> bool:
        """Whether all files are there; looked at again when one was replaced."""
        try:
            facts = tuple(file_facts(path / name) for name in (CONFIG_NAME, WEIGHTS_NAME))
        except OSError:
            return False
        if self._complete.get(path) != facts and is_complete(path):
            self._complete[path] = facts
        return self._complete.get(path) == facts


def step(path: Path) -> int:
    """The step of a checkpoint's folder."""
    match = NAME.match(path.name)
    assert match is not None, path
    return int(match[1])


def forget_after(run: Path, last: int) -> None:
    """Remove scores and outcomes of steps after `last`: the run was rolled back, and their names will be reused."""
    for folder in ("evaluation", f"{LEDGER_FOLDER}/*"):
        for path in _checkpoint_folders(run.glob(f"{folder}/{PREFIX}*")):
            if step(path) > last:
                shutil.rmtree(path, ignore_errors=True)


def _checkpoint_folders(paths: Iterable[Path]) -> list[Path]:
    return [path for path in paths if NAME.match(path.name) and path.is_dir()]

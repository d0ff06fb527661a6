"""Evaluate a run's checkpoints as they appear, together with any number of other watchers."""

from __future__ import annotations

import functools
import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from pipeline.config import section
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.evaluation.datasets.suite import Suite
from pipeline.evaluation.datasets.task_data import file_facts, plain
from pipeline.evaluation.identity import suite_identity
from pipeline.evaluation.ledger import ATTEMPTS, DONE, FAILED, LEDGER_FOLDER, RELEASED, Lease, Ledger
from pipeline.evaluation.run.checkpoint import default_folder, load_checkpoint
from pipeline.evaluation.run.results import SUMMARY_NAME
from pipeline.evaluation.run.session import EvaluationConfig, attempt
from pipeline.files import sha256_of
from pipeline.model.model_folder import WEIGHTS_NAME, stated_files
from pipeline.run_files import META_NAME, MODEL_CONFIG_NAME, finished_checkpoints, step_of

SHOWN_FAILURES = 3
TOGETHER = 4
"""Waiting checkpoints that share one pass over the images; the newest is evaluated by itself."""
RETRY_SECONDS = 300.0
"""Before the same watcher tries a failed checkpoint again."""


@section
class WatchConfig:
    """How to watch."""

    interval: float = Field(default=30.0, gt=0)
    """Seconds between two listings of the folder."""
    every: int = Field(default=1, ge=1)
    """Evaluate only steps that are multiples of this."""


class Watcher:
    """Watches runs and evaluates their checkpoints on one suite, each of them once.

    Args:
        runs: The runs' folders.
        suite: The suite.
        config: How to watch.
        evaluation: How to evaluate.
        processes: Ranks and device, as for `evaluate`. Only the first rank decides.
        say: Called with a line for the log.
        on_scored: Called with a run's folder after some of its checkpoints were evaluated, on the first process.
    """

    def __init__(
        self,
        runs: Sequence[Path],
        *,
        suite: Suite,
        config: WatchConfig,
        evaluation: EvaluationConfig,
        processes: tuple[World, Any],
        say: Callable[[str], None],
        on_scored: Callable[[Path], None] = lambda run: None,
    ) -> None:
        self.suite, self.config, self.evaluation, self.processes = suite, config, evaluation, processes
        self._say, self._on_scored = say, on_scored
        self._retry_at: dict[Path, float] = {}
        self._mentioned: set[Path] = set()
        self._leases: dict[Path, Lease] = {}
        """Of the checkpoints that are being evaluated; on the first process only."""
        self._digests: dict[Path, tuple[object, str]] = {}
        """Sizes and dates of a checkpoint's files, and their digest."""
        known = runs[0] / LEDGER_FOLDER / "digests.json"
        mine = suite_identity(suite, evaluation, known=known) if processes[0].rank == 0 else ""
        self.identity: str = processes[0].gather_objects(mine)[0]
        self.ledgers = {run: Ledger(run / LEDGER_FOLDER / self.identity) for run in runs}

    def run(self, stop: threading.Event, *, once: bool = False) -> bool:
        """Work until `stop` is set; with `once`, until no checkpoint is left that this watcher can evaluate now.

        Returns whether every checkpoint has its scores.
        """
        count, waiting = len(self._ready()), len(self._waiting())
        self._log(f"{count:,} checkpoints on {self.suite.name}, {count - waiting:,} of them have an outcome.")
        for run, path in self.abandoned():
            folder = self.ledgers[run].folder / path.name
            self._log(f"{path.name} was abandoned: the reason is in {folder}; remove that folder to try again.")
        while not stop.is_set():
            if self.step():
                continue
            for path in self._incomplete() - self._mentioned:
                what = "a file is missing, or shorter than checkpoint.json says"
                self._log(f"{self._shown(path)} is not complete yet: {what}.")
                self._mentioned.add(path)
            if once:
                break
            stop.wait(self.config.interval)
        left = len(self._waiting())
        if left:
            self._log(f"{left:,} checkpoints are left: other watchers have them, or they failed and wait.")
        return not (left or self.abandoned() or self._incomplete())

    def abandoned(self) -> list[tuple[Path, Path]]:
        """(run, checkpoint) of the checkpoints that are no longer tried."""
        return [(run, path) for run, path in self._ready() if self._is_abandoned(run, path)]

    def step(self) -> bool:
        """Evaluate the next checkpoints. Returns whether there was anything to do."""
        world = self.processes[0]
        try:
            if world.rank == 0:
                self._claim()
            paths: list[Path] = world.gather_objects(list(self._leases))[0]
            if paths:
                self._evaluate(paths)
        except BaseException as error:
            for path in list(self._leases):
                self._end(path, RELEASED, reason=f"interrupted by {type(error).__name__}")
            if isinstance(error, OSError):
                raise UserError(f"{error.filename or 'A run'} cannot be written: {error.strerror}.") from error
            raise
        return bool(paths)

    def _weights(self, path: Path) -> str:
        """What tells a checkpoint from another one that takes its name: a digest of its model files.

        Empty while a file is missing, or has another size than is stated.
        """
        try:
            now = {name: file_facts(path / name) for name in (META_NAME, MODEL_CONFIG_NAME, WEIGHTS_NAME)}
            if self._digests.get(path, (None,))[0] != now:
                stated, digests = stated_files(path), {}
                for name in (MODEL_CONFIG_NAME, WEIGHTS_NAME):
                    facts = stated.get(name, {})
                    if facts.get("bytes", now[name][0]) != now[name][0]:
                        return ""
                    digests[name] = facts.get("sha256") or sha256_of(path / name)
                self._digests[path] = (now, hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:16])
            return self._digests[path][1]
        except (OSError, ValueError, AttributeError):
            return ""

    def _all(self) -> list[tuple[Path, Path]]:
        """(run, checkpoint) of all checkpoints that are wanted, oldest first."""
        every = self.config.every
        return [(run, path) for run in self.ledgers for path in finished_checkpoints(run) if step_of(path) % every == 0]

    def _ready(self) -> list[tuple[Path, Path]]:
        return [(run, path) for run, path in self._all() if self._weights(path)]

    def _incomplete(self) -> set[Path]:
        """Checkpoints that are being copied, or are truncated."""
        return {path for _, path in self._all() if not self._weights(path)}

    def _waiting(self) -> list[tuple[Path, Path]]:
        """(run, checkpoint) of all checkpoints without an outcome or whose results are gone, the newest first."""
        waiting = [(run, path) for run, path in self._ready() if self._why(run, path) is not None]
        return sorted(waiting, key=lambda item: step_of(item[1]), reverse=True)

    def _is_abandoned(self, run: Path, path: Path) -> bool:
        return self.ledgers[run].is_abandoned(path.name, weights=self._weights(path))

    def _why(self, run: Path, path: Path) -> str | None:
        """Why a checkpoint that is done is evaluated again; empty if it is not done, None if there is nothing to do."""
        outcome, weights = self.ledgers[run].outcome(path.name), self._weights(path)
        if outcome.get("how") != DONE:
            return None if self._is_abandoned(run, path) else ""
        if weights and outcome.get("weights") != weights:
            return "was replaced by other weights since it was evaluated"
        names = (SUMMARY_NAME, *(f"{entry.task.stem}.json" for entry in self.suite.entries))
        there = all((default_folder(str(path)) / name).is_file() for name in names)
        return None if there else "has no results, although it was evaluated"

    def _claim(self) -> None:
        """Take the leases on the next checkpoints: the newest by itself, older ones several at a time."""
        newest = dict(self._ready()).values()
        for run, path in self._waiting():
            alone = path in newest
            if (alone and self._leases) or time.monotonic() < self._retry_at.get(path, 0.0):
                continue
            reason = self._why(run, path)
            lease = self.ledgers[run].claim(path.name, weights=self._weights(path), again=bool(reason))
            if lease is None:
                continue
            if reason:
                self._log(f"{self._shown(path)} {reason}; it is evaluated again.")
            self._leases[path] = lease
            if alone or len(self._leases) == TOGETHER:
                break

    def _evaluate(self, paths: Sequence[Path]) -> None:
        """Evaluate checkpoints in one pass; one that cannot be loaded does not block the others."""
        from pipeline.evaluation import evaluate

        world, device = self.processes
        loaded = {path: attempt(functools.partial(load_checkpoint, str(path), device=device)) for path in paths}
        broken: dict[Path, str] = {}
        for errors in world.gather_objects({path: error for path, (_, error) in loaded.items() if error is not None}):
            broken.update(errors)
        models = [model for path, (model, _) in loaded.items() if model is not None and path not in broken]
        whole = [path for path in paths if path not in broken]
        for path, error in broken.items():
            self._give_up(path, error)
        if not whole:
            return
        self._log(f"Evaluating {', '.join(map(self._shown, whole))} on {self.suite.name}.")
        evaluations, problem = attempt(
            lambda: evaluate(models, suite=self.suite, config=self.evaluation, processes=self.processes)
        )
        for position, path in enumerate(whole):
            if evaluations is None:
                self._give_up(path, str(problem))
            elif evaluations[position].failures:
                self._give_up(path, brief(evaluations[position].failures))
            else:
                scores = {key: result.score for key, result in sorted(evaluations[position].results.items())}
                self._log(f"{self._shown(path)}: {len(scores)} tasks done.")
                self._end(path, DONE, suite=self.suite.name, scores=scores)
        if evaluations is not None and world.rank == 0:
            for run in dict.fromkeys(path.parent.parent for path in whole):
                self._on_scored(run)

    def _give_up(self, path: Path, reason: str) -> None:
        self._log(f"{self._shown(path)} failed, and is tried {ATTEMPTS} times at most: {reason}")
        self._retry_at[path] = time.monotonic() + RETRY_SECONDS
        if self._end(path, FAILED, reason=reason) >= ATTEMPTS:
            self._log(f"{self._shown(path)} is abandoned after {ATTEMPTS} attempts.")

    def _end(self, path: Path, how: str, **facts: Any) -> int:
        """End the lease on a checkpoint, if this process has it. Returns the number of attempts."""
        lease = self._leases.pop(path, None)
        if lease is None:
            return 0
        lease.end(how, **facts)
        return int(lease.attempt["attempts"])

    def _shown(self, path: Path) -> str:
        """A checkpoint's name; with that of its run where there are several."""
        return path.name if len(self.ledgers) == 1 else f"{path.parent.parent.name}/{path.name}"

    def _log(self, text: str) -> None:
        if self.processes[0].rank == 0:
            self._say(text)


def brief(failures: Mapping[str, str]) -> str:
    """A few failures in one line; the rest is in the checkpoint's summary.json."""
    shown = [f"{key}: {plain(text, longest=300)}" for key, text in list(failures.items())[:SHOWN_FAILURES]]
    more = len(failures) - len(shown)
    return "; ".join(shown) + (f"; and {more} more tasks failed, see summary.json" if more else "")

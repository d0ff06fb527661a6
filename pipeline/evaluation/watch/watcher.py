"""Evaluate a run's checkpoints as they appear, together with any number of other watchers.

`Candidates` says which checkpoints can be evaluated now, and whether the results of evaluated ones still exist.
"""

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
from pipeline.evaluation.datasets.suite import Suite
from pipeline.evaluation.datasets.task_data import file_facts, plain
from pipeline.evaluation.identity import suite_identity
from pipeline.evaluation.run.checkpoint import default_folder, load_checkpoint
from pipeline.evaluation.run.session import EvaluationConfig, attempt
from pipeline.evaluation.run.summary import SUMMARY_NAME
from pipeline.evaluation.watch.ledger import ATTEMPTS, DONE, FAILED, LEDGER_FOLDER, RELEASED, Lease, Ledger
from pipeline.files import sha256_of
from pipeline.model.model_folder import WEIGHTS_NAME, stated_files
from pipeline.run_files import META_NAME, MODEL_CONFIG_NAME, finished_checkpoints, step_of


class Candidates:
    """The checkpoints of one run, as one watcher sees them."""

    def __init__(self, run: Path, *, every: int) -> None:
        self.run, self._every = run, every
        self._known: dict[Path, tuple[object, str]] = {}

    def ready(self) -> list[Path]:
        """Checkpoints whose model files exist with their stated sizes, oldest first."""
        return [path for path in self._wanted() if self.weights(path)]

    def incomplete(self) -> list[Path]:
        """Checkpoints that are being copied, or are truncated."""
        return [path for path in self._wanted() if not self.weights(path)]

    def has_results(self, path: Path, suite: Suite) -> bool:
        """Whether every task of the suite has a result for this checkpoint, and a summary of them exists."""
        names = (SUMMARY_NAME, *(f"{entry.task.stem}.json" for entry in suite.entries))
        return all((default_folder(str(path)) / name).is_file() for name in names)

    def _wanted(self) -> list[Path]:
        return [path for path in finished_checkpoints(self.run) if step_of(path) % self._every == 0]

    def weights(self, path: Path) -> str:
        """What tells a checkpoint from another one that takes its name: its model files' digests, stated or computed.

        Empty while a file is missing, or has another size than is stated.
        """
        try:
            now = {name: file_facts(path / name) for name in (META_NAME, MODEL_CONFIG_NAME, WEIGHTS_NAME)}
            if self._known.get(path, (None,))[0] != now:
                stated, digests = stated_files(path), {}
                for name in (MODEL_CONFIG_NAME, WEIGHTS_NAME):
                    facts = stated.get(name, {})
                    if facts.get("bytes", now[name][0]) != now[name][0]:
                        return ""
                    digests[name] = facts.get("sha256") or sha256_of(path / name)
                self._known[path] = (now, hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:16])
            return self._known[path][1]
        except (OSError, ValueError, AttributeError):
            return ""


SHOWN_FAILURES = 3
RETRY_SECONDS = 300.0
"""Before the same watcher tries a failed checkpoint again."""


@section
class WatchConfig:
    """How to watch."""

    interval: float = Field(default=30.0, gt=0)
    """Seconds between two listings of the folder."""
    ttl: float = Field(default=180.0, gt=0)
    """Seconds without a heartbeat after which another watcher is considered dead; on a network file system more than
    its attribute cache keeps entries (60 by default)."""
    together: int = Field(default=4, ge=1)
    """How many waiting checkpoints share one pass over the images; the newest is evaluated by itself."""
    every: int = Field(default=1, ge=1)
    """Evaluate only steps that are multiples of this."""


class Watcher:
    """Watches runs and evaluates their checkpoints on one suite, each of them once.

    Args:
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
        self.runs, self.suite, self.config, self.evaluation = list(runs), suite, config, evaluation
        self.processes, self.say, self._on_scored = processes, say, on_scored
        self._retry_at: dict[Path, float] = {}
        self._mentioned: set[Path] = set()
        self.candidates = {run: Candidates(run, every=config.every) for run in self.runs}
        known = self.runs[0] / LEDGER_FOLDER / "digests.json"
        mine = suite_identity(suite, evaluation, known=known) if processes[0].rank == 0 else ""
        self.identity: str = processes[0].gather_objects(mine)[0]
        self.ledgers = {run: Ledger(run / LEDGER_FOLDER / self.identity, ttl=config.ttl) for run in self.runs}

    def run(self, stop: threading.Event, *, once: bool = False) -> bool:
        """Work until `stop` is set; with `once`, until no checkpoint is waiting and no lease of a dead watcher is left.

        Returns whether every checkpoint has its scores.
        """
        count = sum(len(candidates.ready()) for candidates in self.candidates.values())
        self._log(
            f"{count:,} checkpoints on {self.suite.name}, {count - len(self.waiting()):,} of them have an outcome."
        )
        for name, folder in self.abandoned():
            self._log(f"{name} was abandoned: the reasons are in {folder}; remove that folder to try again.")
        while not stop.is_set():
            if self.step():
                continue
            self._mention_incomplete()
            if once and not self._in_doubt():
                left = len(self.waiting())
                if left:
                    self._log(f"{left:,} checkpoints are left: other watchers have them, or they failed and wait.")
                return not left and self._all_scored()
            stop.wait(min(self.config.interval, self.config.ttl / 4) if once else self.config.interval)
        return not self.waiting() and self._all_scored()

    def abandoned(self) -> list[tuple[str, Path]]:
        """Checkpoints that are no longer tried, and their folders in the ledger."""
        return [
            (path.name, self.ledgers[run].folder / path.name)
            for run, candidates in self.candidates.items()
            for path in candidates.ready()
            if self.ledgers[run].is_abandoned(path.name, weights=candidates.weights(path))
        ]

    def step(self) -> bool:
        """Evaluate the next checkpoints. Returns whether there was anything to do."""
        mine: dict[Path, Lease] = {}
        try:
            items = self._claimed(mine)
            if items:
                self._evaluate(items)
        except BaseException as error:
            for lease in mine.values():
                lease.end(RELEASED, reason=f"interrupted by {type(error).__name__}")
            raise
        return bool(items)

    def waiting(self) -> list[tuple[Path, Path]]:
        """(run, checkpoint) of all checkpoints without an outcome or whose results are gone, in processing order."""
        found = [
            (run, path)
            for run, candidates in self.candidates.items()
            for path in candidates.ready()
            if self._why(run, path) is not None
        ]
        return sorted(found, key=lambda item: step_of(item[1]), reverse=True)

    def _why(self, run: Path, path: Path) -> str | None:
        """Why a checkpoint that is done is evaluated again; empty if it is not done, None if there is nothing to do."""
        ledger, candidates = self.ledgers[run], self.candidates[run]
        outcome, weights = ledger.outcome(path.name), candidates.weights(path)
        if outcome.get("how") != DONE:
            return None if ledger.is_abandoned(path.name, weights=weights) else ""
        if outcome.get("weights") and weights and outcome["weights"] != weights:
            return "was replaced by other weights since it was evaluated"
        return None if candidates.has_results(path, self.suite) else "has no results, although it was evaluated"

    def _claimed(self, mine: dict[Path, Lease]) -> Mapping[Path, Lease | None]:
        """The checkpoints that all processes work on now; the first process adds its leases to `mine`, one by one."""
        world = self.processes[0]
        if world.rank == 0:
            self._claim(mine)
        paths: list[Path] = world.gather_objects(list(mine))[0]
        return mine or dict.fromkeys(paths)

    def _claim(self, items: dict[Path, Lease]) -> None:
        """Leases on the next checkpoints: the newest by itself, older ones several at a time."""
        newest = {path for candidates in self.candidates.values() for path in candidates.ready()[-1:]}
        for run, path in self.waiting():
            alone = path in newest
            if (alone and items) or time.monotonic() < self._retry_at.get(path, 0.0):
                continue
            reason, weights = self._why(run, path), self.candidates[run].weights(path)
            lease = self.ledgers[run].claim(path.name, weights=weights, again=bool(reason))
            if lease is None:
                continue
            if reason:
                self._log(f"{self._shown(path)} {reason}; it is evaluated again.")
            items[path] = lease
            if alone or len(items) == self.config.together:
                break

    def _in_doubt(self) -> bool:
        """Whether there is a lease whose owner may be dead, as the first process sees it."""
        world = self.processes[0]
        doubt = world.rank == 0 and any(self.ledgers[run].in_doubt(path.name) for run, path in self.waiting())
        return bool(world.gather_objects(doubt)[0])

    def _all_scored(self) -> bool:
        return not self.abandoned() and not any(c.incomplete() for c in self.candidates.values())

    def _mention_incomplete(self) -> None:
        for candidates in self.candidates.values():
            for path in set(candidates.incomplete()) - self._mentioned:
                self._log(
                    f"{self._shown(path)} is not complete yet: a file is missing, or shorter than checkpoint.json says."
                )
                self._mentioned.add(path)

    def _evaluate(self, items: Mapping[Path, Lease | None]) -> None:
        """Evaluate checkpoints in one pass; one that cannot be loaded does not block the others."""
        from pipeline.evaluation import evaluate

        world, device = self.processes
        loaded = {path: attempt(functools.partial(load_checkpoint, str(path), device=device)) for path in items}
        broken: dict[Path, str] = {}
        for errors in world.gather_objects({path: error for path, (_, error) in loaded.items() if error is not None}):
            broken.update(errors)
        models = [model for path, (model, _) in loaded.items() if model is not None and path not in broken]
        whole = [path for path in items if path not in broken]
        for path in items:
            if path in broken:
                self._give_up(path, items[path], broken[path])
        if not whole:
            return
        self._log(f"Evaluating {', '.join(map(self._shown, whole))} on {self.suite.name}.")
        evaluations, error = attempt(
            lambda: evaluate(models, suite=self.suite, config=self.evaluation, processes=self.processes)
        )
        for position, path in enumerate(whole):
            if evaluations is None:
                self._give_up(path, items[path], str(error))
            elif evaluations[position].failures:
                self._give_up(path, items[path], brief(evaluations[position].failures))
            else:
                scores = {key: result.score for key, result in sorted(evaluations[position].results.items())}
                self._finish(path, items[path], scores)
        if evaluations is not None and world.rank == 0:
            for run in dict.fromkeys(path.parent.parent for path in whole):
                self._on_scored(run)

    def _finish(self, path: Path, lease: Lease | None, scores: Mapping[str, float]) -> None:
        if lease is None:
            return
        if lease.end(DONE, suite=self.suite.name, scores=scores):
            self._log(f"{self._shown(path)}: {len(scores)} tasks done.")
        else:
            self._log(f"{self._shown(path)}: another watcher took it over and was first; the results are the same.")

    def _give_up(self, path: Path, lease: Lease | None, reason: str) -> None:
        self._log(f"{self._shown(path)} failed, and is tried {ATTEMPTS} times at most: {reason}")
        if lease is not None:
            lease.end(FAILED, reason=reason)
            self._retry_at[path] = time.monotonic() + RETRY_SECONDS
            if self.ledgers[path.parent.parent].is_abandoned(path.name, weights=lease.owner["weights"]):
                self._log(f"{self._shown(path)} is abandoned after {ATTEMPTS} attempts.")

    def _shown(self, path: Path) -> str:
        """A checkpoint's name; with that of its run where there are several."""
        return path.name if len(self.runs) == 1 else f"{path.parent.parent.name}/{path.name}"

    def _log(self, text: str) -> None:
        if self.processes[0].rank == 0:
            self.say(text)


def brief(failures: Mapping[str, str]) -> str:
    """A few failures in one line; the rest is in the checkpoint's summary.json."""
    shown = [f"{key}: {plain(text, longest=300)}" for key, text in list(failures.items())[:SHOWN_FAILURES]]
    more = len(failures) - len(shown)
    return "; ".join(shown) + (f"; and {more} more tasks failed, see summary.json" if more else "")

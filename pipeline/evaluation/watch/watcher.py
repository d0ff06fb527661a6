"""Evaluate a run's checkpoints as they appear, together with any number of other watchers."""

from __future__ import annotations

import functools
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from pipeline.checkpoint.layout import PREFIX, finished_checkpoints, step_of
from pipeline.config import section
from pipeline.evaluation.datasets.suite import Suite
from pipeline.evaluation.runner.checkpoint_model import load_checkpoint
from pipeline.evaluation.runner.processes import Processes
from pipeline.evaluation.runner.session import EvaluationConfig, attempt
from pipeline.evaluation.watch.ledger import ABANDONED, RELEASED, Lease, Ledger

LEDGER_FOLDER = "evaluation-ledger"
Say = Callable[[str], None]


@section
class WatchConfig:
    """How to watch.

    interval: seconds between looks at the folder. ttl: seconds without a heartbeat after which another watcher is taken
    for dead; on a network file system more than its attribute cache holds (60 by default). attempts: how often a
    checkpoint is tried, by the same watcher not before `retry_after` seconds. order: which waiting checkpoint comes
    first; `newest` shows how training goes now and fills in the past when there is time. together: so many waiting
    checkpoints share one pass over the images, except that the newest goes alone. every: only steps that are multiples
    of this.
    """

    interval: float = Field(default=30.0, gt=0)
    retry_after: float = Field(default=300.0, ge=0)
    ttl: float = Field(default=180.0, gt=0)
    attempts: int = Field(default=3, ge=1)
    order: Literal["newest", "oldest"] = "newest"
    together: int = Field(default=4, ge=1)
    every: int = Field(default=1, ge=1)


def forget_after(run: Path, step: int) -> None:
    """Remove scores and outcomes of later steps than `step`: the run went back, other weights will bear their names."""
    for folder in ("evaluation", f"{LEDGER_FOLDER}/*"):
        for path in run.glob(f"{folder}/{PREFIX}*"):
            if step_of(path) > step:
                shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class WatchItem:
    """A checkpoint to evaluate now; the lease is held by the first process only."""

    path: Path
    lease: Lease | None


class Watcher:
    """Watches runs and evaluates their checkpoints on one suite, every one once.

    Args: runs: their folders. processes: ranks and device, as for `evaluate`; only the first rank decides.
    """

    def __init__(
        self,
        runs: Sequence[Path],
        *,
        suite: Suite,
        config: WatchConfig,
        evaluation: EvaluationConfig,
        processes: tuple[Processes, Any],
        say: Say,
    ) -> None:
        self.runs, self.suite, self.config, self.evaluation = list(runs), suite, config, evaluation
        self.processes, self.say = processes, say
        self._retry_at: dict[Path, float] = {}
        self.ledgers = {
            run: Ledger(run / LEDGER_FOLDER / suite.identity, ttl=config.ttl, attempts=config.attempts)
            for run in self.runs
        }

    def run(self, stop: threading.Event, *, once: bool = False) -> bool:
        """Work until `stop` is set; with `once` until nothing waits and no lease of a dead watcher is left.

        Returns: whether every checkpoint has its scores.
        """
        found = sum(step_of(path) % self.config.every == 0 for run in self.runs for path in finished_checkpoints(run))
        self._tell(f"{found:,} checkpoints on {self.suite.name}, {found - len(self.waiting()):,} of them dealt with.")
        for name, folder in self.abandoned():
            self._tell(f"{name} was abandoned: the reasons are in {folder}; remove that folder to try again.")
        while not stop.is_set():
            if self.step():
                continue
            if once and not self._in_doubt():
                left = len(self.waiting())
                if left:
                    self._tell(f"{left:,} checkpoints are left: other watchers have them, or they failed and wait.")
                return not left and not self.abandoned()
            stop.wait(min(self.config.interval, self.config.ttl / 4) if once else self.config.interval)
        return not self.waiting() and not self.abandoned()

    def abandoned(self) -> list[tuple[str, Path]]:
        """Checkpoints that nobody tries any more, and their folders in the ledger."""
        return [
            (name, ledger.folder / name)
            for ledger in self.ledgers.values()
            for name, outcome in ledger.outcomes().items()
            if outcome.get("outcome") == ABANDONED
        ]

    def step(self) -> bool:
        """Evaluate what comes first. Returns: whether there was anything to do."""
        mine: list[WatchItem] = []
        items = mine
        try:
            items = self._claimed(mine)
            if items:
                self._evaluate(items)
        except BaseException as error:
            for item in mine:
                if item.lease is not None:
                    item.lease.give_up(f"interrupted by {type(error).__name__}", how=RELEASED)
            raise
        return bool(items)

    def _claimed(self, mine: list[WatchItem]) -> list[WatchItem]:
        """What all processes work on now; leases are appended to `mine` as they are taken."""
        world = self.processes[0]
        if world.rank == 0:
            self._claim(mine)
        paths: list[Path] = world.gather_objects([item.path for item in mine])[0]
        return mine or [WatchItem(path, None) for path in paths]

    def waiting(self) -> list[tuple[Path, Path]]:
        """(run, checkpoint) of everything that is not done, what comes first in front."""
        found = [
            (run, path)
            for run in self.runs
            for path in finished_checkpoints(run)
            if step_of(path) % self.config.every == 0 and not self.ledgers[run].done(path.name)
        ]
        return sorted(found, key=lambda item: step_of(item[1]), reverse=self.config.order == "newest")

    def _claim(self, items: list[WatchItem]) -> None:
        """Leases on what comes first: the newest alone, what is left to fill in several at a time."""
        newest = {path for run in self.runs for path in finished_checkpoints(run)[-1:]}
        for run, path in self.waiting():
            alone = self.config.order == "newest" and path in newest
            if (alone and items) or time.monotonic() < self._retry_at.get(path, 0.0):
                continue
            lease = self.ledgers[run].claim(path.name)
            if lease is not None:
                items.append(WatchItem(path, lease))
                if alone or len(items) == self.config.together:
                    break
            elif path.name in dict(self.abandoned()):
                self._tell(f"{path.name} is abandoned after {self.config.attempts} attempts.")

    def _in_doubt(self) -> bool:
        """Whether a lease stands whose owner may be dead, as the first process sees it."""
        world = self.processes[0]
        doubt = world.rank == 0 and any(self.ledgers[run].in_doubt(path.name) for run, path in self.waiting())
        return bool(world.gather_objects(doubt)[0])

    def _evaluate(self, items: Sequence[WatchItem]) -> None:
        """Evaluate checkpoints in one pass; one that cannot be loaded does not keep the others back."""
        from pipeline.evaluation import evaluate

        world, device = self.processes
        loaded = {
            item.path: attempt(functools.partial(load_checkpoint, str(item.path), device=device)) for item in items
        }
        broken: dict[Path, str] = {}
        for errors in world.gather_objects({path: error for path, (_, error) in loaded.items() if error is not None}):
            broken.update(errors)
        models = [model for path, (model, _) in loaded.items() if model is not None and path not in broken]
        whole = [item for item in items if item.path not in broken]
        for item in items:
            if item.path in broken:
                self._give_up(item, broken[item.path])
        if not whole:
            return
        self._tell(f"Evaluating {', '.join(item.path.name for item in whole)} on {self.suite.name}.")
        found, error = attempt(
            lambda: evaluate(models, suite=self.suite, config=self.evaluation, processes=self.processes)
        )
        for position, item in enumerate(whole):
            if found is None:
                self._give_up(item, str(error))
            elif found[position].failures:
                self._give_up(item, "; ".join(f"{key}: {text}" for key, text in found[position].failures.items()))
            else:
                self._finish(item, {key: result.score for key, result in sorted(found[position].results.items())})

    def _finish(self, item: WatchItem, scores: Mapping[str, float]) -> None:
        if item.lease is None:
            return
        if item.lease.finish({"suite": self.suite.name, "outcome": "done", "scores": scores}):
            self._tell(f"{item.path.name}: {len(scores)} tasks done.")
        else:
            self._tell(f"{item.path.name}: another watcher took it over and was first; the results are the same.")

    def _give_up(self, item: WatchItem, reason: str) -> None:
        self._tell(f"{item.path.name} failed, and is tried {self.config.attempts} times at most: {reason}")
        if item.lease is not None:
            item.lease.give_up(reason)
            self._retry_at[item.path] = time.monotonic() + self.config.retry_after

    def _tell(self, text: str) -> None:
        if self.processes[0].rank == 0:
            self.say(text)

"""Evaluate a run's checkpoints as they appear, together with any number of other watchers.

Which watcher evaluates which checkpoint is recorded in one folder per checkpoint:

    RUN/evaluation-ledger/SUITE/step-00000500/
        lock           held by the watcher that evaluates the checkpoint, until it ends, however it ends
        attempt.json   done, failed or started: who, where, since when, at which weights, how many attempts

The locks are the file system's (`flock`), so that no clocks are compared: the kernel, or the server of a network file
system, releases those of a process that was killed. On a file system without them two watchers may evaluate the same
checkpoint. They write the same results, byte for byte. The ledger is for scheduling only: a checkpoint that is done but
has no results is evaluated again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from pipeline.config import section
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.evaluation.datasets.suite import Suite
from pipeline.evaluation.datasets.task_data import file_facts, plain
from pipeline.evaluation.identity import suite_identity
from pipeline.evaluation.run.evaluator import load_checkpoint
from pipeline.evaluation.run.results import SUMMARY_NAME, default_folder
from pipeline.evaluation.run.session import EvaluationConfig, attempt
from pipeline.files import NO_LOCKS, file_lock, lock_holder, read_tree, write_json
from pipeline.model.model_folder import WEIGHTS_NAME, stated_files
from pipeline.run_files import MODEL_CONFIG_NAME, PREFIX, finished_checkpoints, is_name, step_of

LEDGER_FOLDER = "evaluation-ledger"
LOCK_NAME, ATTEMPT_NAME = "lock", "attempt.json"
STARTED, DONE, FAILED, RELEASED = "started", "done", "failed", "released"
ATTEMPTS = 3
"""After so many that failed or killed their watcher, a checkpoint is abandoned: it cannot kill watchers forever."""
SHOWN_FAILURES = 3
TOGETHER = 4
"""Waiting checkpoints that share one pass over the images; the newest is evaluated by itself."""
RETRY_SECONDS = 300.0
"""Before any watcher tries a failed checkpoint again."""


@section
class WatchConfig:
    """How to watch."""

    interval: float = Field(default=30.0, gt=0)
    """Seconds between two listings of the folder."""
    every: int = Field(default=1, ge=1)
    """Evaluate only steps that are multiples of this."""


@dataclass
class Turn:
    """A checkpoint with its folder in the ledger."""

    checkpoint: Path
    folder: Path
    weights: str
    """What tells it from another checkpoint of the same name, at which attempts are not counted; empty while a file is
    missing, or has another size than is stated."""
    held: ExitStack = field(default_factory=ExitStack)
    """The lock, during an attempt of this process."""
    record: dict[str, Any] = field(default_factory=dict)
    """Of that attempt."""

    @property
    def last(self) -> dict[str, Any]:
        """The record of the last attempt; empty if there was none."""
        return read_tree(self.folder / ATTEMPT_NAME)

    @property
    def attempts(self) -> int:
        """How many attempts at these weights failed or did not end."""
        last = self.last
        others = last.get("weights") != self.weights or last.get("how") == DONE
        return 0 if others or not isinstance(count := last.get("attempts"), int) else count

    @property
    def is_abandoned(self) -> bool:
        """Whether `ATTEMPTS` at these weights are over and none gave a result."""
        return bool(self.weights) and self.attempts >= ATTEMPTS and not lock_holder(self.folder / LOCK_NAME)

    def claim(self, *, again: bool = False) -> bool:
        """Begin an attempt. Returns False when another watcher has the checkpoint, or it is abandoned or done, or it
        failed less than `RETRY_SECONDS` ago.

        Args:
            again: Also if it is done.
        """
        path = self.folder / ATTEMPT_NAME
        with ExitStack() as held:
            try:
                held.enter_context(file_lock(self.folder / LOCK_NAME, seconds=0))
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
            how, attempts = self.last.get("how"), self.attempts
            if attempts >= ATTEMPTS or (how == DONE and not again):
                return False
            # The difference is negative if a clock was set back.
            if how == FAILED and attempts and abs(time.time() - path.stat().st_mtime) < RETRY_SECONDS:
                return False
            process = {"host": socket.gethostname(), "pid": os.getpid()}
            at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            self.record = {"how": STARTED, "attempts": attempts + 1, "weights": self.weights, **process, "at": at}
            write_json(path, self.record, durable=True)
            self.held = held.pop_all()
            return True

    def end(self, how: str, **facts: Any) -> int:
        """Record how the attempt ended, and release the lock. Returns the attempts; `RELEASED` ones do not count."""
        attempts = int(self.record["attempts"]) - (how == RELEASED)
        with self.held:
            write_json(self.folder / ATTEMPT_NAME, {**self.record, "attempts": attempts, "how": how, **facts})
        return attempts


def weights_of(checkpoint: Path) -> str:
    """A digest of what is stated of a checkpoint's model files, else of their dates; empty while one is incomplete."""
    try:
        stated, digests = stated_files(checkpoint), dict[str, object]()
        for name in (MODEL_CONFIG_NAME, WEIGHTS_NAME):
            facts, now = stated.get(name, {}), file_facts(checkpoint / name)
            if facts.get("bytes", now[0]) != now[0]:
                return ""
            digests[name] = facts.get("sha256") or now
        return hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:16]
    except (OSError, ValueError, AttributeError):
        return ""


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
        self.runs, self.suite, self.config, self.evaluation, self.processes = runs, suite, config, evaluation, processes
        self._say, self._on_scored = say, on_scored
        self._mentioned: set[Path] = set()
        self._claimed: dict[Path, Turn] = {}
        """The checkpoints that are being evaluated; on the first process only."""
        known = runs[0] / LEDGER_FOLDER / "digests.json"
        mine = suite_identity(suite, evaluation, known=known) if processes[0].rank == 0 else ""
        self.identity: str = processes[0].gather_objects(mine)[0]

    def run(self, *, once: bool = False) -> bool:
        """Work until interrupted; with `once`, until no checkpoint is left that this watcher can evaluate now.

        Returns whether every checkpoint has its scores.
        """
        for turn in (turn for turn in self.turns() if turn.is_abandoned):
            name, folder = turn.checkpoint.name, turn.folder
            self._log(f"{name} was abandoned: the reason is in {folder}; remove that folder to try again.")
        while True:
            if self.step():
                continue
            turns = self.turns()
            incomplete = [turn.checkpoint for turn in turns if not turn.weights]
            for path in incomplete:
                if path not in self._mentioned:
                    what = "a file is missing, or shorter than checkpoint.json says"
                    self._log(f"{self._shown(path)} is not complete yet: {what}.")
                    self._mentioned.add(path)
            if once:
                break
            time.sleep(self.config.interval)
        if left := len(self._waiting()):
            self._log(f"{left:,} checkpoints are left: other watchers have them, or they failed and wait.")
        return not (left or incomplete or any(turn.is_abandoned for turn in turns))

    def turns(self) -> list[Turn]:
        """All checkpoints that are wanted, of each run the oldest first."""
        paths = [(run, path) for run in self.runs for path in finished_checkpoints(run)]
        return [
            Turn(path, run / LEDGER_FOLDER / self.identity / path.name, weights_of(path))
            for run, path in paths
            if step_of(path) % self.config.every == 0
        ]

    def step(self) -> bool:
        """Evaluate the next checkpoints. Returns whether there was anything to do."""
        world = self.processes[0]
        try:
            if world.rank == 0:
                self._claim()
            paths: list[Path] = world.gather_objects(list(self._claimed))[0]
            if paths:
                self._evaluate(paths)
        except BaseException as error:
            for path in list(self._claimed):
                self._end(path, RELEASED, reason=f"interrupted by {type(error).__name__}")
            if isinstance(error, OSError):
                raise UserError(f"{error.filename or 'A run'} cannot be written: {error.strerror}.") from error
            raise
        return bool(paths)

    def _waiting(self) -> list[tuple[Turn, str]]:
        """All checkpoints without an outcome or whose results are gone, the newest first; and `_why`."""
        waiting = [(turn, why) for turn in self.turns() if turn.weights and (why := self._why(turn)) is not None]
        return sorted(waiting, key=lambda item: step_of(item[0].checkpoint), reverse=True)

    def _why(self, turn: Turn) -> str | None:
        """Why a checkpoint that is done is evaluated again; empty if it is not done, None if there is nothing to do."""
        last = turn.last
        if last.get("how") != DONE:
            return None if turn.is_abandoned else ""
        if last.get("weights") != turn.weights:
            return "was replaced by other weights since it was evaluated"
        results = default_folder(str(turn.checkpoint))
        names = (SUMMARY_NAME, *(f"{entry.task.stem}.json" for entry in self.suite.entries))
        there = all((results / name).is_file() for name in names)
        return None if there else "has no results, although it was evaluated"

    def _claim(self) -> None:
        """Claim the next checkpoints: the newest by itself, older ones several at a time."""
        newest = {path.parent: path for path in (turn.checkpoint for turn in self.turns() if turn.weights)}.values()
        for turn, why in self._waiting():
            path = turn.checkpoint
            alone = path in newest
            if (alone and self._claimed) or not turn.claim(again=bool(why)):
                continue
            if why:
                self._log(f"{self._shown(path)} {why}; it is evaluated again.")
            self._claimed[path] = turn
            if alone or len(self._claimed) == TOGETHER:
                break

    def _evaluate(self, paths: Sequence[Path]) -> None:
        """Evaluate checkpoints in one pass; one that cannot be loaded does not block the others."""
        from pipeline.evaluation import evaluate

        world, device = self.processes
        loaded = {path: attempt(functools.partial(load_checkpoint, str(path), device=device)) for path in paths}
        broken: dict[Path, str] = {}
        for errors in world.gather_objects({path: error for path, (_, error) in loaded.items() if error is not None}):
            broken.update(errors)
        models = {path: model for path, (model, _) in loaded.items() if model is not None and path not in broken}
        if models:
            self._log(f"Evaluating {', '.join(map(self._shown, models))} on {self.suite.name}.")
            given = list(models.values())
            evaluations, problem = attempt(
                lambda: evaluate(given, suite=self.suite, config=self.evaluation, processes=self.processes)
            )
            for path, evaluation in zip(models, evaluations or (), strict=False):
                if evaluation.failures:
                    broken[path] = brief(evaluation.failures)
                else:
                    scores = {key: result.score for key, result in sorted(evaluation.results.items())}
                    self._log(f"{self._shown(path)}: {len(scores)} tasks done.")
                    self._end(path, DONE, suite=self.suite.name, scores=scores)
            if evaluations is None:
                broken |= dict.fromkeys(models, str(problem))
            elif world.rank == 0:
                for run in dict.fromkeys(path.parent.parent for path in models):
                    self._on_scored(run)
        for path, reason in broken.items():
            self._log(f"{self._shown(path)} failed, and is tried {ATTEMPTS} times at most: {reason}")
            if self._end(path, FAILED, reason=reason) >= ATTEMPTS:
                self._log(f"{self._shown(path)} is abandoned after {ATTEMPTS} attempts.")

    def _end(self, path: Path, how: str, **facts: Any) -> int:
        """End the attempt at a checkpoint, if this process has it. Returns the number of attempts."""
        turn = self._claimed.pop(path, None)
        return turn.end(how, **facts) if turn else 0

    def _shown(self, path: Path) -> str:
        """A checkpoint's name; with that of its run where there are several."""
        return path.name if len(self.runs) == 1 else f"{path.parent.parent.name}/{path.name}"

    def _log(self, text: str) -> None:
        if self.processes[0].rank == 0:
            self._say(text)


def brief(failures: Mapping[str, str]) -> str:
    """A few failures in one line; the rest is in the checkpoint's summary.json."""
    shown = [f"{key}: {plain(text, longest=300)}" for key, text in list(failures.items())[:SHOWN_FAILURES]]
    more = len(failures) - len(shown)
    return "; ".join(shown) + (f"; and {more} more tasks failed, see summary.json" if more else "")


def forget_after(run: Path, last: int) -> None:
    """Remove scores and outcomes of steps after `last`: the run was rolled back, and their names will be reused."""
    for folder in ("evaluation", f"{LEDGER_FOLDER}/*"):
        for path in run.glob(f"{folder}/{PREFIX}*"):
            if is_name(path.name) and path.is_dir() and step_of(path) > last:
                shutil.rmtree(path, ignore_errors=True)

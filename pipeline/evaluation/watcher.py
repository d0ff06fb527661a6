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
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
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
from pipeline.files import NO_LOCKS, file_lock, lock_holder, read_tree, sha256_of, write_json
from pipeline.model.model_folder import WEIGHTS_NAME, stated_files
from pipeline.run_files import META_NAME, MODEL_CONFIG_NAME, PREFIX, finished_checkpoints, is_name, step_of

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
        count = last.get("attempts")
        others = last.get("weights") != self.weights or last.get("how") == DONE
        return count if isinstance(count, int) and not others else 0

    @property
    def is_abandoned(self) -> bool:
        """Whether `ATTEMPTS` at these weights are over and none gave a result."""
        return self.attempts >= ATTEMPTS and not lock_holder(self.folder / LOCK_NAME)

    def _failed_just_now(self) -> bool:
        with suppress(OSError):
            seconds = time.time() - (self.folder / ATTEMPT_NAME).stat().st_mtime  # negative if a clock was set back
            return self.last.get("how") == FAILED and self.attempts > 0 and abs(seconds) < RETRY_SECONDS
        return False

    def claim(self, *, again: bool = False) -> bool:
        """Begin an attempt. Returns False when another watcher has the checkpoint, or it is abandoned or done, or it
        failed less than `RETRY_SECONDS` ago.

        Args:
            again: Also if it is done.
        """
        with ExitStack() as held:
            try:
                held.enter_context(file_lock(self.folder / LOCK_NAME, seconds=0))
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
            attempts = self.attempts
            if attempts >= ATTEMPTS or (self.last.get("how") == DONE and not again) or self._failed_just_now():
                return False
            process = {"host": socket.gethostname(), "pid": os.getpid()}
            at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            self.record = {"how": STARTED, "attempts": attempts + 1, "weights": self.weights, **process, "at": at}
            write_json(self.folder / ATTEMPT_NAME, self.record, durable=True)
            self.held = held.pop_all()
            return True

    def end(self, how: str, **facts: Any) -> int:
        """Record how the attempt ended, and release the lock. Returns the attempts; `RELEASED` ones do not count."""
        attempts = int(self.record["attempts"]) - (how == RELEASED)
        with self.held:
            write_json(self.folder / ATTEMPT_NAME, {**self.record, "attempts": attempts, "how": how, **facts})
        return attempts


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
        self._digests: dict[Path, tuple[object, str]] = {}
        """Sizes and dates of a checkpoint's files, and their digest."""
        known = runs[0] / LEDGER_FOLDER / "digests.json"
        mine = suite_identity(suite, evaluation, known=known) if processes[0].rank == 0 else ""
        self.identity: str = processes[0].gather_objects(mine)[0]

    def run(self, stop: threading.Event, *, once: bool = False) -> bool:
        """Work until `stop` is set; with `once`, until no checkpoint is left that this watcher can evaluate now.

        Returns whether every checkpoint has its scores.
        """
        count, waiting = sum(bool(turn.weights) for turn in self.turns()), len(self._waiting())
        self._log(f"{count:,} checkpoints on {self.suite.name}, {count - waiting:,} of them have an outcome.")
        for turn in self.abandoned():
            name, folder = turn.checkpoint.name, turn.folder
            self._log(f"{name} was abandoned: the reason is in {folder}; remove that folder to try again.")
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

    def turns(self) -> list[Turn]:
        """All checkpoints that are wanted, of each run the oldest first."""
        paths = [(run, path) for run in self.runs for path in finished_checkpoints(run)]
        return [
            Turn(path, run / LEDGER_FOLDER / self.identity / path.name, self._weights(path))
            for run, path in paths
            if step_of(path) % self.config.every == 0
        ]

    def abandoned(self) -> list[Turn]:
        """The checkpoints that are no longer tried."""
        return [turn for turn in self.turns() if turn.weights and turn.is_abandoned]

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

    def _weights(self, path: Path) -> str:
        """A digest of a checkpoint's model files; empty while they are not complete."""
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

    def _incomplete(self) -> set[Path]:
        """Checkpoints that are being copied, or are truncated."""
        return {turn.checkpoint for turn in self.turns() if not turn.weights}

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
        for path, error in broken.items():
            self._give_up(path, error)
        if not models:
            return
        self._log(f"Evaluating {', '.join(map(self._shown, models))} on {self.suite.name}.")
        given = list(models.values())
        evaluations, problem = attempt(
            lambda: evaluate(given, suite=self.suite, config=self.evaluation, processes=self.processes)
        )
        if evaluations is None:
            for path in models:
                self._give_up(path, str(problem))
            return
        for path, evaluation in zip(models, evaluations, strict=True):
            if evaluation.failures:
                self._give_up(path, brief(evaluation.failures))
            else:
                scores = {key: result.score for key, result in sorted(evaluation.results.items())}
                self._log(f"{self._shown(path)}: {len(scores)} tasks done.")
                self._end(path, DONE, suite=self.suite.name, scores=scores)
        if world.rank == 0:
            for run in dict.fromkeys(path.parent.parent for path in models):
                self._on_scored(run)

    def _give_up(self, path: Path, reason: str) -> None:
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

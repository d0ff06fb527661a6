"""How a run ended, which checkpoints are intact, and how to continue: from its folder, in which nothing is changed."""

from __future__ import annotations

import shlex
import signal
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.checkpoint.reader import damage
from pipeline.config import parse_yaml
from pipeline.distributed.exit_record import EXIT_STALLED, ExitRecord, read_ends
from pipeline.distributed.exit_record import FOLDER_NAME as HEARTBEATS
from pipeline.distributed.heartbeat import Beat
from pipeline.distributed.signals import EXIT_PREEMPTED
from pipeline.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_USER_ERROR, UserError
from pipeline.files import lock_holder, read_bounded
from pipeline.planning import DoctorFinding
from pipeline.run_files import (
    FOLDER_NAME,
    METRICS_NAME,
    RUN_CONFIG_NAME,
    checkpoint_folders,
    read_as,
    read_records,
    step_of,
)
from pipeline.training.recipe_file import consents_in
from pipeline.training.run_folder import LOCK_NAME, read_origin
from pipeline.training.run_state import EXIT_DONE, EXIT_NOT_SAVED, STOPPED_EARLY

REASON_LENGTH = 400
CRASHES = (128 + signal.SIGSEGV, 128 + signal.SIGABRT, 128 + signal.SIGBUS)
"""Exit codes of crashes in native code."""
HARMLESS = (EXIT_PREEMPTED, EXIT_INTERRUPTED, EXIT_DONE)

# From the exit code that says most about the cause to the one that says least.
CODES = {
    EXIT_NOT_SAVED: "its last checkpoint could not be written: free some space",
    128 + signal.SIGABRT: "its process aborted (SIGABRT), as NCCL's watchdog does when a collective fails",
    128 + signal.SIGSEGV: "its process crashed (SIGSEGV)",
    128 + signal.SIGBUS: "its process crashed (SIGBUS), often for lack of space in /dev/shm",
    EXIT_BUG: "an unexpected error; --debug prints the traceback",
    EXIT_USER_ERROR: "an error that you can fix",
    EXIT_STALLED: "another rank or a loading worker hung or was gone",
    EXIT_INTERRUPTED: "it was interrupted without a checkpoint (a second Ctrl-C)",
    EXIT_PREEMPTED: "it was stopped by a signal",
    EXIT_DONE: "it ended its budget of samples, which has been raised since",
}


class Evidence:
    """What a run's folder says about its last start; a `UserError` if it is not one."""

    def __init__(self, run: Path) -> None:
        if not any((run / name).exists() for name in (RUN_CONFIG_NAME, FOLDER_NAME, LOCK_NAME)):
            raise UserError(f"{run} is not the folder of a run: it has no {RUN_CONFIG_NAME} and no {FOLDER_NAME}/.")
        self.run = run
        self.config: dict[str, Any] = {}
        """The resolved settings; empty if they cannot be read."""
        with suppress(OSError, ValueError):
            tree = parse_yaml(read_bounded(run / RUN_CONFIG_NAME).decode())
            self.config = tree if isinstance(tree, dict) else {}
        samples, batch = self.config.get("samples"), self.config.get("batch_size")
        self.total_steps = samples // batch if isinstance(samples, int) and isinstance(batch, int) and batch else 0
        """0 if the settings cannot be read."""
        records = read_records(run / METRICS_NAME)
        steps = [step for r in records if r.get("kind") == "train" and isinstance(step := r.get("step"), int)]
        self.steps = max(steps, default=0)
        """The last step in metrics.jsonl."""
        events = [str(record["message"]) for record in records if record.get("kind") == "event" and "message" in record]
        starts = [number for number, message in enumerate(events) if message.startswith("Resumed from")]
        self.events = events[starts[-1] :] if starts else events
        """Messages of the last start, oldest first."""
        self.beats = [beat for path in sorted((run / HEARTBEATS).glob("rank-*.json")) if (beat := read_as(Beat, path))]
        """Heartbeats that are still there: a rank that reaches the end removes its own."""
        self.exits = read_ends(run / HEARTBEATS)
        order = [*CODES, *(record.code for record in self.exits)]
        self.cause = min(self.exits, key=lambda r: (order.index(r.code), r.time), default=None)
        """The exit that says most about the cause."""
        self.killed = [beat.rank for beat in self.beats if beat.rank not in {record.rank for record in self.exits}]
        """Ranks with a heartbeat and no record of their end: killed from outside, or their machine is gone."""
        self.holder = lock_holder(run / LOCK_NAME)
        """Who holds the folder's lock now, so trains in it; empty: nobody."""
        problems = dict[Path, str]()
        for path in [] if self.holder else checkpoint_folders(run):
            with suppress(FileNotFoundError):  # a run that has started meanwhile may remove it
                problems[path] = damage(path)
        self.damaged = {path: problem for path, problem in problems.items() if problem and path.is_dir()}
        self.intact = [path for path, problem in problems.items() if not problem]
        """Checkpoints, oldest first."""
        self.saved = max(map(step_of, self.intact), default=0)
        """The step of the newest intact checkpoint."""

    @property
    def end(self) -> str:
        """How the run finished; empty if it did not."""
        if self.cause is None or self.cause.code != EXIT_DONE or self.killed or not self.intact:
            return ""
        early = next((event for event in self.events if event.startswith(STOPPED_EARLY)), "")
        return early or (f"{self.total_steps:,} steps" if 0 < self.total_steps <= self.saved else "")


def diagnose(run: Path) -> Iterator[DoctorFinding]:
    """All findings: the outcome first, the command to continue last. Checkpoints of a run in progress are left alone.

    Raises:
        UserError: It is not the folder of a run.
    """
    evidence = Evidence(run)
    yield _outcome(evidence)
    codes = {record.rank: f"exit code {record.code}" for record in evidence.exits}
    for beat in evidence.beats:
        end = codes.get(beat.rank, "no record of its end")
        yield DoctorFinding(f"rank {beat.rank}", "note", f"last heartbeat: {beat}; {end}")
    total = f" of {evidence.total_steps:,}" if evidence.total_steps else ""
    last = f"; last message: {evidence.events[-1]}" if evidence.events else ""
    yield DoctorFinding("steps", "good" if evidence.steps else "note", f"{evidence.steps:,}{total} logged{last}")
    if evidence.holder:
        yield DoctorFinding("next", "good", "wait for it")
        return
    for path, problem in evidence.damaged.items():
        yield DoctorFinding(path.name, "broken", problem, "it is skipped by --resume latest; delete it")
    text = f"intact: {', '.join(path.name for path in evidence.intact)}"
    if (lost := evidence.steps - evidence.saved) > 0:
        text += f"; {lost:,} logged steps after the newest are trained again"
    if not evidence.intact:
        text = "none is intact" if evidence.damaged else "none was finished"
    yield DoctorFinding("checkpoints", "good" if evidence.intact else "note", text)
    yield _command(evidence)


def _outcome(evidence: Evidence) -> DoctorFinding:
    cause, killed = evidence.cause, evidence.killed
    if evidence.holder:
        return DoctorFinding("run", "good", f"is running ({evidence.holder})")
    if evidence.end:
        return DoctorFinding("run", "good", f"finished: {evidence.end}")
    if cause is None or (killed and cause.code in (EXIT_STALLED, EXIT_PREEMPTED, EXIT_DONE)):
        who = ("rank " if len(killed) == 1 else "ranks ") + ", ".join(map(str, killed)) if killed else "every rank"
        others = "; the other ranks noticed and ended" if evidence.exits else ""
        return DoctorFinding(
            "run",
            "note",
            f"{who} ended without a word: killed from outside (SIGKILL), crashed in native code (SIGSEGV, SIGABRT), "
            f"frozen, or the machine was lost{others}",
            "an out-of-memory kill is in `dmesg` and in the scheduler's log, a pre-emption in the scheduler's",
        )
    if cause.code == EXIT_DONE and 0 < evidence.total_steps <= evidence.steps:
        return DoctorFinding("run", "broken", "trained to its end, but its last checkpoint is damaged or missing")
    reason = f": {textwrap.shorten(cause.reason, REASON_LENGTH)}" if cause.reason else ""
    text = f"ended with {cause.code}: {CODES.get(cause.code, f'exit code {cause.code}')}{reason}"
    return DoctorFinding("run", "note" if cause.code in HARMLESS else "broken", text)


def _command(evidence: Evidence) -> DoctorFinding:
    run, intact = shlex.quote(str(evidence.run)), evidence.intact
    if evidence.end:
        return DoctorFinding("next", "good", f"neuclip report {run}")
    crashed = evidence.cause is not None and evidence.cause.code in CRASHES
    if crashed and max([evidence.steps, *(beat.step for beat in evidence.beats)]) <= evidence.saved:
        return DoctorFinding(
            "next",
            "broken",
            "--resume latest would crash again: the process has crashed in the first step after its start",
            "the stacks name the library: update it, or train on another device (engine.device), with another "
            "model.arch, or without what it computes (model.compile, model.packed_attention); then --resume latest",
        )
    last: list[Beat | ExitRecord] = [*evidence.beats, *evidence.exits]
    if not evidence.config or len({record.host for record in last}) > 1:
        return DoctorFinding("next", "good", "the command that started the run, with --resume latest")
    count = 1 + max((record.rank for record in last), default=0)
    ranks = f" --ranks {count}" if count > 1 else ""
    start = f"neuclip train --recipe {shlex.quote(str(evidence.run / RUN_CONFIG_NAME))}{ranks}"
    begun = read_origin(evidence.run)
    origin = f" --resume {shlex.quote(begun.checkpoint)}" if begun is not None else ""
    if evidence.damaged and not intact:
        again = shlex.quote(f"{evidence.run}-again")
        return DoctorFinding("next", "broken", f"no checkpoint is intact: {start}{origin} output={again}")
    command = f"{start}{origin if origin and not intact else ' --resume latest'} output={run}"
    if given := consents_in(evidence.config):  # not printed into a command that is copied without reading
        remedy = f"the run had {' '.join(given)}: add that only if you trust the run and its data"
        return DoctorFinding("next", "note", command, remedy)
    return DoctorFinding("next", "good", command)

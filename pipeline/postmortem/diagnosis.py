"""What happened to a run, what is intact, and how to continue: pure functions of the evidence."""

from __future__ import annotations

import shlex
import signal
import textwrap
from collections.abc import Iterator, Mapping

from pipeline.checkpoint.writer import NOT_WRITTEN
from pipeline.distributed.exit_record import EXIT_STALLED, ExitRecord
from pipeline.distributed.signals import EXIT_PREEMPTED
from pipeline.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_USER_ERROR
from pipeline.planning.node_checks import DoctorFinding
from pipeline.postmortem.evidence import FROZEN_SECONDS, RunEvidence, StoredCheckpoint
from pipeline.run_files import RUN_CONFIG_NAME
from pipeline.training.recipe_file import consents_in
from pipeline.training.trainer import EXIT_DONE, EXIT_NOT_SAVED
from pipeline.training.validation import STOPPED_EARLY

REASON_LENGTH = 400
CRASHES = frozenset(128 + number for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS))

# From the exit code that says most about the cause to the one that says least.
CODES: Mapping[int, tuple[str, str]] = {
    EXIT_NOT_SAVED: ("its last checkpoint could not be written", "free some space, or set checkpoint.fallback"),
    128 + signal.SIGABRT: (
        "its process aborted (SIGABRT), as NCCL's watchdog does when a collective fails, or a library without memory",
        "its last words are above, or in the launcher's log; check that GPU, its links (`nvidia-smi`) and `ulimit -v`",
    ),
    128 + signal.SIGSEGV: ("its process crashed (SIGSEGV)", "the stacks name the library"),
    128 + signal.SIGBUS: ("its process crashed (SIGBUS): often no space in /dev/shm", "the stacks name the library"),
    EXIT_BUG: ("an unexpected error", "read the reason; --debug prints the traceback"),
    EXIT_USER_ERROR: ("an error that you can fix", "follow the message"),
    EXIT_STALLED: ("another rank or a loading worker hung or was gone", "check what is named"),
    EXIT_INTERRUPTED: ("it was interrupted without a checkpoint (a second Ctrl-C)", ""),
    EXIT_PREEMPTED: ("it was stopped by a signal", ""),
    EXIT_DONE: ("it ended its budget of samples, which has been raised since", ""),
}


def diagnose(evidence: RunEvidence) -> list[DoctorFinding]:
    """All findings: the outcome first, the command to continue last."""
    return [
        _outcome(evidence),
        *_ranks(evidence),
        _progress(evidence),
        *_checkpoints(evidence),
        *_disk(evidence),
        *_evaluations(evidence),
        *_data(evidence),
        _command(evidence),
    ]


def _intact(evidence: RunEvidence) -> list[StoredCheckpoint]:
    return [checkpoint for checkpoint in evidence.checkpoints if not checkpoint.problem]


def _is_finished(evidence: RunEvidence) -> bool:
    intact = _intact(evidence)
    if not intact or _early_end(evidence):  # which is reported after the evaluation
        return bool(intact)
    return 0 < evidence.total_steps <= intact[-1].step and not evidence.unscored


def _early_end(evidence: RunEvidence) -> str:
    """The message with which `validation.patience` ended the last start; empty if it did not."""
    return next((event for event in evidence.events if event.startswith(STOPPED_EARLY)), "")


def _killed(evidence: RunEvidence) -> list[int]:
    """Ranks with a heartbeat but without a record of their end: killed from outside, or their machine is gone."""
    ended = {record.rank for record in evidence.exits}
    return [beat.rank for beat, _ in evidence.beats if beat.rank not in ended]


def _outcome(evidence: RunEvidence) -> DoctorFinding:
    if evidence.holder:
        return _running(evidence)
    if _is_finished(evidence):
        how = _early_end(evidence) or f"{evidence.total_steps:,} steps, its last checkpoint is intact"
        return DoctorFinding("run", "good", f"finished: {how}")
    first = _first_cause(evidence)
    killed = _killed(evidence)
    if 0 < evidence.total_steps <= evidence.steps and (not killed or evidence.unscored):
        if not _intact(evidence):
            return DoctorFinding("run", "broken", "trained to its end, but no checkpoint is intact")
        if _intact(evidence)[-1].step < evidence.total_steps and first is not None and first.code == EXIT_DONE:
            return DoctorFinding("run", "broken", "trained to its end, but its last checkpoint is damaged or missing")
        if evidence.unscored:
            how = ": it was killed in the evaluation" if killed else ""
            return DoctorFinding("run", "note", f"trained to its end, but its last weights were not evaluated{how}")
    if killed and (first is None or first.code in (EXIT_STALLED, EXIT_PREEMPTED)):
        return _was_killed(evidence, killed)
    if first is not None:
        what, remedy = CODES.get(first.code, (f"exit code {first.code}", ""))
        reason = f": {textwrap.shorten(first.reason, REASON_LENGTH)}" if first.reason else ""
        harmless = first.code in (EXIT_PREEMPTED, EXIT_INTERRUPTED, EXIT_DONE)
        return DoctorFinding(
            "run", "note" if harmless else "broken", f"ended with {first.code}: {what}{reason}", remedy
        )
    if not evidence.steps and not evidence.checkpoints:
        return DoctorFinding(
            "run",
            "note",
            "never took a step: it was killed while starting, or is from a version that did not record how it ended",
        )
    return DoctorFinding(
        "run", "note", "killed, or its machine was lost: no rank recorded its end, and none left a heartbeat"
    )


def _first_cause(evidence: RunEvidence) -> ExitRecord | None:
    """The exit that says most about the cause."""
    order = list(CODES)
    known = [record for record in evidence.exits if record.code in order]
    return min(known, key=lambda r: (order.index(r.code), r.time), default=next(iter(evidence.exits), None))


def _running(evidence: RunEvidence) -> DoctorFinding:
    age = max((age for _, age in evidence.beats), default=0.0)
    if age > FROZEN_SECONDS:
        return DoctorFinding(
            "run",
            "broken",
            f"its folder is locked by {evidence.holder}, but a heartbeat is {age:.0f} s old: that rank is frozen, or "
            "cannot write",
            "look at that process; kill the run and continue if it is stuck",
        )
    return DoctorFinding("run", "good", f"is running ({evidence.holder})")


def _was_killed(evidence: RunEvidence, killed: list[int]) -> DoctorFinding:
    ranks = ("rank " if len(killed) == 1 else "ranks ") + ", ".join(map(str, killed))
    while_writing = f", while {evidence.unfinished[-1]} was being written" if evidence.unfinished else ""
    others = "; the other ranks noticed and ended" if evidence.exits else ""
    return DoctorFinding(
        "run",
        "note",
        f"{ranks} ended without a word: killed from outside (SIGKILL), crashed in native code (SIGSEGV, SIGABRT), "
        f"frozen, or the machine was lost{while_writing}{others}",
        "an out-of-memory kill is in `dmesg` and in the scheduler's log, a pre-emption in the scheduler's",
    )


def _ranks(evidence: RunEvidence) -> Iterator[DoctorFinding]:
    """Where each rank was at its last heartbeat."""
    codes = {record.rank: record.code for record in evidence.exits}
    for beat, age in evidence.beats:
        end = f"; exit code {codes[beat.rank]}" if beat.rank in codes else ""
        yield DoctorFinding(
            f"rank {beat.rank}",
            "note",
            f"{beat.host}, process {beat.pid}: last heartbeat {_ago(age)}, in step {beat.step}, {beat.phase}{end}",
        )


def _progress(evidence: RunEvidence) -> DoctorFinding:
    total = f" of {evidence.total_steps:,}" if evidence.total_steps else ""
    last = f"; last message: {evidence.events[-1]}" if evidence.events else ""
    return DoctorFinding("steps", "good" if evidence.steps else "note", f"{evidence.steps:,}{total} logged{last}")


def _checkpoints(evidence: RunEvidence) -> Iterator[DoctorFinding]:
    intact = _intact(evidence)
    for checkpoint in evidence.checkpoints:
        if checkpoint.problem:
            yield DoctorFinding(
                checkpoint.path.name, "broken", checkpoint.problem, "it is skipped by --resume latest; delete it"
            )
    for name in evidence.unfinished:
        if not evidence.holder:
            yield DoctorFinding(name, "note", "was never finished; the next checkpoint removes it")
    if intact:
        names = ", ".join(checkpoint.path.name for checkpoint in intact)
        lost = max(0, evidence.steps - intact[-1].step)
        loss = f"; {lost:,} logged steps after the newest are trained again" if lost and not evidence.holder else ""
        yield DoctorFinding("checkpoints", "good", f"intact: {names}{loss}")
        outside = intact[-1].path.parents[1]
        if outside != evidence.run:
            yield DoctorFinding("checkpoints", "note", f"the newest is in {outside}; --resume latest finds it there")
    elif not evidence.checkpoints:
        yield DoctorFinding("checkpoints", "note", "none was finished")


def _disk(evidence: RunEvidence) -> Iterator[DoctorFinding]:
    failed = [event for event in evidence.events if NOT_WRITTEN in event]
    needed = max((checkpoint.size for checkpoint in evidence.checkpoints), default=0)
    if evidence.free < needed:
        yield DoctorFinding(
            "disk",
            "broken",
            f"{evidence.free / 1e9:.2f} GB free, less than one checkpoint ({needed / 1e9:.2f} GB)",
            "free some space before you continue",
        )
    if failed:
        yield DoctorFinding("disk", "note", f"{len(failed)} checkpoints failed; the last: {failed[-1]}")


def _evaluations(evidence: RunEvidence) -> Iterator[DoctorFinding]:
    waiting = [name for name, outcome in evidence.evaluations.items() if outcome == "unfinished"]
    abandoned = [name for name, outcome in evidence.evaluations.items() if outcome == "abandoned"]
    if abandoned:
        yield DoctorFinding("evaluations", "broken", f"abandoned after several attempts: {', '.join(abandoned)}")
    if waiting:
        yield DoctorFinding("evaluations", "note", f"not finished: {', '.join(waiting)}", "start `neuclip watch` again")


def _data(evidence: RunEvidence) -> Iterator[DoctorFinding]:
    if evidence.missing and not evidence.holder and not _is_finished(evidence):
        yield DoctorFinding("data", "note", f"not on this machine: {' '.join(evidence.missing)}", "put it back first")


def _would_crash_again(evidence: RunEvidence) -> bool:
    """Whether a rank has crashed in native code before it got beyond the newest checkpoint."""
    intact, crash = _intact(evidence), _first_cause(evidence)
    start = intact[-1].step if intact else 0
    if crash is None or crash.code not in CRASHES:
        return False
    return all(beat.step <= start for beat, _ in evidence.beats) and evidence.steps <= start


def _command(evidence: RunEvidence) -> DoctorFinding:
    run = shlex.quote(str(evidence.run))
    if evidence.holder:
        return DoctorFinding("next", "good", "wait for it")
    if _is_finished(evidence):
        return DoctorFinding("next", "good", f"neuclip report {run}")
    if _would_crash_again(evidence):
        return DoctorFinding(
            "next",
            "broken",
            "--resume latest would crash again: the process has crashed in the first step after its start",
            "the stacks name the library: update it, or train on another device (engine.device), with another "
            "model.arch, or without what it computes (model.compile, model.packed_attention); then --resume latest",
        )
    hosts = {beat.host for beat, _ in evidence.beats} | {record.host for record in evidence.exits}
    if not evidence.config or len(hosts) > 1:
        return DoctorFinding("next", "good", "the command that started the run, with --resume latest")
    if evidence.refusal:
        return DoctorFinding("next", "broken", f"its {RUN_CONFIG_NAME} cannot be continued with: {evidence.refusal}")
    ranks = f" --ranks {evidence.ranks}" if evidence.ranks > 1 else ""
    start, origin = f"neuclip train --recipe {shlex.quote(str(evidence.run / RUN_CONFIG_NAME))}{ranks}", ""
    if evidence.origin is not None:
        flag = " --new-batch-size" if evidence.origin.new_batch_size else ""
        origin = f" --resume {shlex.quote(evidence.origin.checkpoint)}{flag}"
    if evidence.checkpoints and not _intact(evidence):
        again = shlex.quote(f"{evidence.run}-again")
        return DoctorFinding("next", "broken", f"no checkpoint is intact: {start}{origin} output={again}")
    resume = " --resume latest" if evidence.checkpoints or not origin else origin
    if given := consents_in(evidence.config):  # not printed into a command that is copied without reading
        remedy = f"the run had {' '.join(given)}: add that only if you trust the run and its data"
        return DoctorFinding("next", "note", f"{start}{resume} output={run}", remedy)
    return DoctorFinding("next", "good", f"{start}{resume} output={run}")


def _ago(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"

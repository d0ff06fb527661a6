"""Training a run on one rank, from its start to its last checkpoint: `train`. The loop over steps is in `loop.py`."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

import torch

from pipeline.checkpoint.layout import restore_replaced
from pipeline.checkpoint.reader import Checkpoint
from pipeline.config import to_tree
from pipeline.distributed.devices import why_bf16_is_slow
from pipeline.distributed.exit_record import record_exit, stop_recording
from pipeline.distributed.heartbeat import Heartbeat
from pipeline.distributed.signals import StopSignals, ignore_stop_signals
from pipeline.distributed.start import LostRank, start_world
from pipeline.distributed.world import World, lost_contact
from pipeline.engine.engine_config import in_fp32
from pipeline.errors import UserError, exit_code_of, too_many_files, too_many_files_message
from pipeline.metrics.logger import Telemetry
from pipeline.metrics.trackers import check_trackers
from pipeline.model.starting_weights import check_fetched
from pipeline.model.trimming import why_not_trimmed
from pipeline.run_files import model_folder_in
from pipeline.training.build import check_stages, collectives_limit
from pipeline.training.inputs import open_step_features
from pipeline.training.loop import Trainer
from pipeline.training.periodic_tests import missed_tests
from pipeline.training.recipe import RunConfig, check_run, stage_at
from pipeline.training.run_folder import STARTING, changed_settings, find_start, folder_of_a_start, hold_folder
from pipeline.training.run_state import EXIT_NOT_SAVED


def train(
    run: RunConfig,
    *,
    resume: str | None = None,
    world: World | None = None,
    on_trainer: Callable[[Trainer], object] = lambda trainer: None,
) -> int:
    """Train one run on this rank to its last checkpoint, and return the exit code.

    Each stage of the run has a trainer, and so has the time after a roll-back. Each starts from a checkpoint, as a run
    that is resumed.

    Args:
        run: The configuration.
        resume: None (a new run), "latest" (a new run when there are no checkpoints) or the folder of a checkpoint.
        world: The ranks, if they are connected already.
        on_trainer: Called with each trainer before its first step.

    Raises:
        UserError: The run cannot start or go on.
    """
    lost_after, limit, signals = run.engine.lost_rank_seconds, 60 * collectives_limit(run), StopSignals()
    with (
        _end_recorded(),
        ranks_of(run) if world is None else nullcontext(world) as world,
        hold_folder(run, world=world),
        Heartbeat(Path(run.output, STARTING), world=world, lost_after=lost_after, limit=limit) as heartbeat,
        signals,
    ):
        with ExitStack() as refused:  # closes the trainer if the folder cannot be written
            with folder_of_a_start(run, heartbeat=heartbeat, resume=resume):
                trainer = refused.enter_context(setup(run, world=world, resume=resume))
            refused.pop_all()
        while True:
            with trainer:
                trainer.signals = signals
                on_trainer(trainer)
                with heartbeat.training(60 * run.engine.timeout_minutes):
                    end = trainer.fit()
                if end.start is None:
                    ignore_stop_signals()  # nothing follows
            if end.start is None:
                break
            del trainer
            gc.collect()  # towers, engine and optimizer refer to each other
            torch.cuda.empty_cache()
            trainer = setup(run, world=world, resume=end.start, first=False)
    problem = str(end) if end.code == EXIT_NOT_SAVED else ""
    if problem and run.telemetry.progress == "quiet":  # metrics.jsonl may be on the same disk
        print(f"The last checkpoint is not on disk: {problem}", file=sys.stderr, flush=True)
    record_exit(end.code, problem)
    stop_recording()
    return end.code


def ranks_of(run: RunConfig) -> AbstractContextManager[World]:
    """Connect this rank with the others of its run."""
    return start_world(timeout_minutes=collectives_limit(run), device=run.engine.device)


@contextmanager
def _end_recorded() -> Iterator[None]:
    """Inside, an error is recorded as the end of this rank; one that others have caused says so."""
    gc.freeze()  # imports leave half a million objects, and each of a start's full collections would look at them
    try:
        yield
    except BaseException as error:
        explained: UserError | None = None
        if isinstance(error, RuntimeError) and too_many_files(error):
            explained = UserError(too_many_files_message(error))
        elif isinstance(error, RuntimeError) and lost_contact(error):
            explained = LostRank(
                f"Lost contact with another rank: it is gone; its own message, if there is one, says why ({error})."
            )
        record_exit(exit_code_of(explained or error), str(explained or f"{type(error).__name__}: {error}"))
        stop_recording()
        if explained:
            raise explained from error
        raise
    finally:
        gc.unfreeze()


def setup(run: RunConfig, *, world: World, resume: str | Checkpoint | None, first: bool = True) -> Trainer:
    """Build every part of a run and, if asked, restore a checkpoint. Cheap checks come first.

    Nothing in the run's folder changes before every check has passed. `resume` is that of `train`, or the checkpoint to
    which the run rolls back. `first`: this process has not trained the run before; tests that were due at the
    checkpoint, but were prevented, are done, and the mirror is asked.

    Raises:
        UserError: Anything that keeps the run from starting.
    """
    check_run(run, world_size=world.size)
    notes: list[str] = []
    if first:
        world.work_on_main(lambda: _check_services(run))
    if isinstance(resume, Checkpoint):
        checkpoint: Checkpoint | None = resume
    else:
        mirror = run.checkpoint.mirror if first else None
        checkpoint = find_start(run, resume, world=world, mirror=mirror, on_event=notes.append)
    check_stages(run)
    step, missed = checkpoint.step if checkpoint else 0, set[str]()
    stage = stage_at(run, step)
    if checkpoint is not None and first:
        missed = missed_tests(run, checkpoint, world=world)
        if missed and stage.first == step:
            stage = stage_at(run, step - 1)  # its towers are tested, before they are resized
    telemetry = Telemetry(
        Path(run.output),
        config=run.telemetry,
        total_steps=run.total_steps,
        first_step=step,
        is_main=world.is_main,
        settings=to_tree(run),
    )
    trainer = Trainer(stage, world=world, telemetry=telemetry, resumed=checkpoint)
    with ExitStack() as refused:
        refused.enter_context(trainer)  # closed by an error
        trainer.missed = missed
        _report_start(trainer, notes, is_new=checkpoint is None)
        if checkpoint is not None:
            with checkpoint.restored():
                trainer.state.restore(checkpoint)
            if not isinstance(resume, Checkpoint):
                telemetry.event(f"Resumed from {checkpoint.path.name} (step {step} of {run.total_steps}).")
            before = stage_at(run, step - 1).run  # as the checkpoint's stage would be with today's settings
            if changes := changed_settings(checkpoint.meta["config"], to_tree(before)):
                telemetry.event(f"Settings that differ from the checkpoint's: {'; '.join(changes)}.")
        trainer.features = open_step_features(trainer.state, report=telemetry.event)
        if run.schedule.stages:
            telemetry.event(stage.describe(image_size=trainer.state.architecture.image_size))
        if trainer.gradient_check is not None:
            trainer.gradient_check.begin()
        world.barrier()  # every rank has passed all checks
        world.work_on_main(telemetry.begin)
        if world.is_main:
            trainer.writer.begin()
        refused.pop_all()
    return trainer


def _check_services(run: RunConfig) -> None:
    """Check that trackers have a login, and weights are here or can be fetched, and finish a killed renaming."""
    check_trackers(run.telemetry.trackers)
    check_fetched(run.model.arch, run.model.pretrained, tokenizer=run.model.tokenizer)
    restore_replaced(Path(run.output))


def _report_start(trainer: Trainer, notes: list[str], *, is_new: bool) -> None:
    """Report what the start found, and what makes this run slower than it could be."""
    run, world, engine, telemetry = trainer.run, trainer.world, trainer.state.engine, trainer.telemetry
    if untrimmed := why_not_trimmed(engine.module.clip):
        notes = [f"Texts are not trimmed to their lengths. {untrimmed}", *notes]
    if is_new:
        if (logit := engine.module.logit) is not None:
            weights = model_folder_in(Path(str(run.model.pretrained))) or run.model.pretrained
            theirs, initial = (math.exp(-log) for log in (logit[0], trainer.state.objective.logit_parameters()[0]))
            text = f"Starting from the weights {weights}, whose temperature is {theirs:.4g}"
            notes = [*notes, f"{text}; that of the objective starts at {initial:.4g}."]
        notes = [*notes, *engine.module.notes]
    for note in notes:
        telemetry.event(note)
    if engine.bf16 and world.is_main and (slow := why_bf16_is_slow(world.device)):
        file = in_fp32(run.engine, world_size=world.size, optimizer=run.optimizer)
        telemetry.warning(f"{slow} Training in fp32 is faster here: engine.deepspeed={file}.")

"""Training a run: `setup` checks everything and builds the parts; `train` runs one rank from start to end."""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import torch

from pipeline.checkpoint.layout import fallback_runs, restore_replaced
from pipeline.checkpoint.reader import Checkpoint
from pipeline.config import to_tree
from pipeline.distributed.exit_record import record_exit, stop_recording
from pipeline.distributed.peers import LostRank, start_watched
from pipeline.distributed.precision import why_bf16_is_slow
from pipeline.distributed.signals import StopSignals, ignore_stop_signals
from pipeline.distributed.start import start_world
from pipeline.distributed.world import World, lost_contact
from pipeline.engine.engine_config import in_fp32
from pipeline.errors import UserError, exit_code_of, too_many_files, too_many_files_message
from pipeline.metrics.logger import Telemetry
from pipeline.metrics.trackers import check_trackers
from pipeline.model.starting_weights import check_fetched
from pipeline.model.trimming import why_not_trimmed
from pipeline.training.build import build_state, build_trainer, collectives_limit, describe_start
from pipeline.training.observer import describe_hosts
from pipeline.training.periodic_tests import missed_tests
from pipeline.training.recipe import RunConfig, check_run
from pipeline.training.run_start import (
    changed_settings,
    check_features,
    describe,
    find_start,
    folder_of_a_start,
    hold_folder,
    prepare_folder,
    record_origin,
)
from pipeline.training.stages import check_stages, stage_at
from pipeline.training.step_features import open_step_features
from pipeline.training.trainer import EXIT_DONE, EXIT_NOT_SAVED, Trainer


@contextmanager
def setup(
    run: RunConfig, *, world: World, resume: str | Checkpoint | None, new_batch_size: bool = False, first: bool = True
) -> Iterator[Trainer]:
    """Build every part of a run and, if asked, restore a checkpoint. Cheap checks come first.

    Nothing in the run's folder changes before every check has passed.

    Args:
        run: The configuration.
        world: The ranks.
        resume: None (the output folder must have no checkpoints), "latest" (a new run when there are none), the folder
            of a checkpoint, or the checkpoint to which the run rolls back.
        new_batch_size: Allow a checkpoint of another batch size.
        first: This process has not trained the run before: tests that were due at the checkpoint, but were prevented,
            are done, and the mirror is asked. Later, it may be away, and the run's folder has the newest checkpoint.

    Raises:
        UserError: Anything that keeps the run from starting.
    """
    check_run(run, world_size=world.size)
    if first:
        _check_services(run, world=world)
    notes: list[str] = []
    if isinstance(resume, Checkpoint):
        checkpoint: Checkpoint | None = resume
    else:
        checkpoint = find_start(
            run,
            resume,
            world=world,
            new_batch_size=new_batch_size,
            mirror=run.checkpoint.mirror if first else None,
            on_event=notes.append,
        )
    with ExitStack() as stack:
        check_stages(run)
        stage, missed = stage_at(run, checkpoint.step if checkpoint else 0), set[str]()
        if checkpoint is not None and first:
            missed = missed_tests(run, checkpoint, world=world)
            if missed and stage.first == checkpoint.step:
                stage = stage_at(run, checkpoint.step - 1)  # its towers are tested, before they are resized
        state, architecture = stack.enter_context(build_state(stage.run, world=world, steps=stage.end - stage.first))
        telemetry = Telemetry(
            Path(run.output),
            config=run.telemetry,
            total_steps=run.total_steps,
            first_step=checkpoint.step if checkpoint else 0,
            is_main=world.is_main,
            settings=to_tree(run),
        )
        stack.callback(telemetry.close)
        trainer = build_trainer(state, architecture, telemetry=telemetry, end=stage.end, resumed=checkpoint)
        trainer.missed = missed
        stack.callback(trainer.writer.finish)
        if checkpoint is None:
            start = describe_start(run, state.engine.module.logit)
            notes += [note for note in (start, *state.engine.module.notes) if note]
        _report_start(trainer, notes)
        if checkpoint is not None:
            skipped = state.restore(checkpoint)
            if not isinstance(resume, Checkpoint):
                telemetry.event(f"Resumed from {checkpoint.path.name} (step {state.step} of {run.total_steps}).")
            if changed := describe(checkpoint, run, skipped=skipped):
                telemetry.event(changed)
            before = stage_at(run, checkpoint.step - 1).run  # as the checkpoint's stage would be with today's settings
            if changes := changed_settings(checkpoint.meta["config"], to_tree(before)):
                telemetry.event(f"Settings that differ from the checkpoint's: {'; '.join(changes)}.")
        trainer.features = open_step_features(state, architecture, report=telemetry.event)
        if checkpoint is not None:
            check_features(checkpoint, state.features)
        if run.schedule.stages:
            telemetry.event(stage.describe(image_size=architecture.image_size))
        if trainer.gradient_check is not None:
            trainer.gradient_check.begin()
        _begin(trainer)
        yield trainer


def _check_services(run: RunConfig, *, world: World) -> None:
    """Check on rank 0 that trackers have a login, and that weights are here or can be fetched. Collective.

    Raises:
        UserError: They do not, or cannot. On every rank.
    """
    problem = ""
    if world.is_main:
        try:
            check_trackers(run.telemetry.trackers)
            check_fetched(run.model.arch, run.model.pretrained, tokenizer=run.model.tokenizer)
        except UserError as error:
            problem = str(error)
    world.raise_together(problem)


def _report_start(trainer: Trainer, notes: Sequence[str]) -> None:
    """Report hosts, what the start found, and what makes this run slower than it could be. Collective."""
    run, world, engine, telemetry = trainer.run, trainer.world, trainer.state.engine, trainer.telemetry
    if hosts := describe_hosts(world):
        telemetry.event(hosts)
    if untrimmed := why_not_trimmed(engine.module.clip):
        telemetry.event(f"Texts are not trimmed to their lengths. {untrimmed}")
    for note in notes:
        telemetry.event(note)
    if engine.bf16 and world.is_main and (slow := why_bf16_is_slow(world.device)):
        file = in_fp32(run.engine, world_size=world.size, optimizer=run.optimizer)
        telemetry.warning(f"{slow} Training in fp32 is faster here: engine.deepspeed={file}.")


def _begin(trainer: Trainer) -> None:
    """Write into the run's folder for the first time: every rank has passed all checks. Collective."""
    world = trainer.world
    world.barrier()
    problem = ""
    try:
        trainer.telemetry.begin()
    except UserError as error:
        problem = str(error)
    world.raise_together(problem)
    prepare_folder(trainer.run, world=world)
    if world.is_main:
        trainer.writer.begin()


def stage_trainers(run: RunConfig, *, resume: str | None = None, new_batch_size: bool = False) -> Generator[Trainer]:
    """As `trainers`, in a process group and a locked folder of its own."""
    limit, lost_after = collectives_limit(run), run.engine.lost_rank_seconds
    with (
        start_world(timeout_minutes=limit, device=run.engine.device, lost_after=lost_after) as world,
        ExitStack() as held,
    ):
        with start_watched(world, lost_after=lost_after):
            held.enter_context(hold_folder(run, world=world))
        yield from trainers(run, world=world, resume=resume, new_batch_size=new_batch_size)


def trainers(run: RunConfig, *, world: World, resume: str | None, new_batch_size: bool = False) -> Generator[Trainer]:
    """Yield a trainer for each remaining stage of a run, and for each rollback; fit each before requesting the next.

    Stops after a trainer that was not fitted to the end of its stage.
    """
    start: str | Checkpoint | None = resume
    first, signals = True, StopSignals()
    if world.is_main:
        for folder in (Path(run.output), *fallback_runs(run.checkpoint.fallback, Path(run.output))):
            restore_replaced(folder)
    with ExitStack() as whole:
        whole.callback(signals.end)
        while True:
            with ExitStack() as stage:
                with (
                    start_watched(world, lost_after=run.engine.lost_rank_seconds),
                    folder_of_a_start(
                        run, world=world, note=lambda: record_origin(run, resume, new_batch_size=new_batch_size)
                    ),
                ):
                    trainer = stage.enter_context(
                        setup(run, world=world, resume=start, new_batch_size=new_batch_size, first=first)
                    )
                trainer.signals = signals
                yield trainer
                if not trainer.goes_on:
                    return
                start, first = trainer.rollback or "latest", False
            del trainer
            gc.collect()  # towers, engine and optimizer refer to each other
            torch.cuda.empty_cache()


def train(run: RunConfig, *, resume: str | None = None, new_batch_size: bool = False) -> int:
    """Train one run on this rank to its last checkpoint. Returns the exit code."""
    code, problem = EXIT_DONE, ""
    gc.freeze()  # imports leave half a million objects, and each of a start's full collections would look at them
    try:
        with closing(stage_trainers(run, resume=resume, new_batch_size=new_batch_size)) as trainers:
            for trainer in trainers:
                try:
                    code = trainer.fit()
                except KeyboardInterrupt:  # a second Ctrl-C
                    trainer.writer.give_up()
                    raise
                if code == EXIT_NOT_SAVED:
                    problem = trainer.writer.problem
                if code != EXIT_DONE or not trainer.goes_on:
                    ignore_stop_signals()  # nothing follows
                del trainer  # free its memory for the next stage's trainer
                if code != EXIT_DONE:
                    break
        if problem and run.telemetry.progress == "quiet":  # metrics.jsonl may be on the same disk
            print(f"The last checkpoint is not on disk: {problem}", file=sys.stderr, flush=True)
        record_exit(code, problem)
        return code
    except RuntimeError as error:
        found: BaseException = error
        if too_many_files(error):
            found = UserError(too_many_files_message(error))
        elif lost_contact(error):
            found = LostRank(
                f"Lost contact with another rank: it is gone; its own message, if there is one, says why ({error})."
            )
        record_exit(exit_code_of(found), str(found) if found is not error else f"{type(error).__name__}: {error}")
        raise found from (None if found is error else error)
    except BaseException as error:
        record_exit(exit_code_of(error), f"{type(error).__name__}: {error}")
        raise
    finally:
        gc.unfreeze()
        stop_recording()

"""Training a run: `setup` checks everything and builds the parts; `train` runs one rank from start to end."""

from __future__ import annotations

import gc
import math
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from pipeline.checkpoint.mirror import fetch_newest, refuse_taken
from pipeline.checkpoint.mirror_store import MirrorStore
from pipeline.checkpoint.reader import Checkpoint, agreed_checkpoint
from pipeline.checkpoint.writer import CheckpointWriter
from pipeline.config import Tree, flatten, to_tree
from pipeline.distributed.exit_record import record_exit, stop_recording
from pipeline.distributed.heartbeat import EXIT_STALLED
from pipeline.distributed.signals import ignore_stop_signals
from pipeline.distributed.timing import Meter
from pipeline.distributed.workers import preload
from pipeline.distributed.world import World, limit_collectives, lost_contact, start_world
from pipeline.engine.deepspeed_engine import DeepSpeedEngine
from pipeline.engine.ema import WeightAverage
from pipeline.engine.engine_config import in_fp32
from pipeline.engine.engine_protocol import Engine
from pipeline.errors import UserError, exit_code_of
from pipeline.evaluation.runner.images import WORKER_IMPORTS
from pipeline.evaluation.watch.watcher import forget_after
from pipeline.metrics.logger import Telemetry, open_telemetry
from pipeline.metrics.mfu import Utilization
from pipeline.metrics.trackers import check_installed
from pipeline.model.architectures import Architecture
from pipeline.model.towers import build_towers, without_weights
from pipeline.model.trimming import text_trimming, why_not_trimmed
from pipeline.precision import why_bf16_is_slow
from pipeline.training.build import loader_of, objective_of
from pipeline.training.gradient_check import GradientCheck
from pipeline.training.held_out_pairs import HeldOutPairs
from pipeline.training.image_features import open_image_features
from pipeline.training.new_batch_size import describe, in_new_steps
from pipeline.training.observer import Observer
from pipeline.training.periodic_eval import PeriodicEvaluation
from pipeline.training.periodic_tests import PeriodicTests
from pipeline.training.prefetch import PrefetchedBatches
from pipeline.training.recipe import RunConfig, check_run
from pipeline.training.run_folder import folder_of_a_start, hold_folder
from pipeline.training.run_state import RunState
from pipeline.training.skipped_steps import SkippedSteps
from pipeline.training.stages import check_stages, stage_at
from pipeline.training.starting_objective import describe_start, starting_objective
from pipeline.training.step import StepHooks, TrainStep, micro_batches
from pipeline.training.trainer import EXIT_DONE, Trainer
from pipeline.training.validation import Validation


class LostRank(UserError):
    """Another rank has ended, in a phase in which no heartbeat watches, such as the start."""

    exit_code = EXIT_STALLED


@contextmanager
def setup(run: RunConfig, *, world: World, resume: str | None, new_batch_size: bool = False) -> Iterator[Trainer]:
    """Build every part of a run and, if asked, restore a checkpoint. Cheap checks come first.

    Args:
        run: The configuration.
        world: The ranks.
        resume: None (the output folder must have no checkpoints), "latest" (a new run when there are none), or the
            folder of a checkpoint.
        new_batch_size: Allow a checkpoint of another batch size.

    Raises:
        UserError: Anything that keeps the run from starting.
    """
    check_run(run, world_size=world.size)
    check_installed(run.telemetry.trackers)
    folder = Path(run.output)
    if run.checkpoint.mirror:
        MirrorStore(run.checkpoint.mirror, folder)  # the writer opens it on rank 0 only; here, all ranks raise
    notes: list[str] = []
    if resume == "latest" and run.checkpoint.mirror:
        fetch_newest(folder, run.checkpoint.mirror, world=world, on_event=notes.append)
    checkpoint = agreed_checkpoint(folder, resume, world=world, on_event=notes.append, fallback=run.checkpoint.fallback)
    if resume != "latest" and run.checkpoint.mirror:
        step = checkpoint.step if checkpoint else -1
        refuse_taken(folder, run.checkpoint.mirror, resume=resume, step=step, world=world)
    if checkpoint is not None:
        checkpoint = in_new_steps(checkpoint, run, allowed=new_batch_size)
    with ExitStack() as stack:
        check_stages(run)
        stage = stage_at(run, checkpoint.step if checkpoint else 0)
        state, architecture = stack.enter_context(_build_state(stage.run, world=world))
        telemetry = open_telemetry(
            folder,
            config=run.telemetry,
            total_steps=run.total_steps,
            first_step=checkpoint.step if checkpoint else 0,
            is_main=world.is_main,
        )
        stack.callback(telemetry.close)
        trainer = _build_trainer(state, architecture, telemetry=telemetry, end=stage.end, resumed=checkpoint)
        stack.callback(trainer.writer.finish)
        if untrimmed := why_not_trimmed(trainer.engine.module.clip):
            telemetry.event(f"Texts are not trimmed to their lengths. {untrimmed}")
        if checkpoint is None and (start := describe_start(run, trainer.engine.module.logit)):
            notes += [start, *trainer.engine.module.notes]
        for note in notes:
            telemetry.event(note)
        if trainer.engine.bf16 and world.is_main and (slow := why_bf16_is_slow(world.device)):
            telemetry.warning(f"{slow} Training in fp32 is faster here: engine.deepspeed={in_fp32(run.engine)}.")
        if checkpoint is not None:
            skipped = state.restore(checkpoint)
            trainer.resumed_at = stage.first
            telemetry.event(f"Resumed from {checkpoint.path.name} (step {trainer.step} of {run.total_steps}).")
            if changed := describe(checkpoint, run, skipped=skipped):
                telemetry.event(changed)
            _report_changes(trainer, checkpoint)
        trainer.image_features = open_image_features(state, architecture, report=telemetry.event)
        if run.schedule.stages:
            telemetry.event(stage.describe(image_size=architecture.image_size))
        if trainer.gradient_check is not None:
            trainer.gradient_check.begin()
        yield trainer


@contextmanager
def _build_state(run: RunConfig, *, world: World) -> Iterator[tuple[RunState, Architecture]]:
    """The parts of a run that have state, in their initial state."""
    if run.evaluation.suite is not None and run.evaluation.workers != 0:
        preload(*WORKER_IMPORTS)  # the fork server starts with the loader, and serves the evaluation, too
    towers, architecture = build_towers(run.model, seed=run.seed)
    with loader_of(run, architecture=architecture, world=world) as loader:
        starting = replace(run, objective=starting_objective(run, towers.logit))
        objective = objective_of(starting, loader=loader, architecture=architecture, world=world)
        engine = DeepSpeedEngine(
            towers.to(world.device),
            config=run.engine,
            optimizer=run.optimizer,
            world=world,
            global_batch=run.batch_size,
            compile_towers=run.model.compile,
        )
        limit_collectives(_collectives_limit(run))
        engine.train()
        state = RunState(
            run=run,
            world=world,
            loader=loader,
            engine=engine,
            objective=objective,
            skipped=SkippedSteps(),
            ema=WeightAverage(run.ema, engine.state) if run.ema.decay is not None else None,
        )
        yield state, architecture


def _build_trainer(
    state: RunState, architecture: Architecture, *, telemetry: Telemetry, end: int, resumed: Checkpoint | None
) -> Trainer:
    """The training loop around the state of a run."""
    run, world, engine, folder = state.run, state.world, state.engine, Path(state.run.output)
    chunks = micro_batches(run.batch_size // world.size, run.engine.micro_batch)
    phases = world.phases
    assert phases is not None
    meter = Meter(run.batch_size, phases)
    batches = PrefetchedBatches(state.loader, steps=end, meter=meter, phases=phases, device=world.device)
    first_step = resumed.step if resumed else 0
    check = _gradient_check(run, engine, world=world, chunks=chunks) if first_step < end else None
    hooks = StepHooks(on_gradients=check.reference if check else None, before_update=batches.fetch_ahead)
    evaluation = None
    if run.evaluation.suite is not None:
        evaluation = PeriodicEvaluation(run.evaluation, run=folder, world=world)
    return Trainer(
        state=state,
        end=end,
        batches=batches,
        take_step=TrainStep(engine, state.objective, world=world, seed=run.seed, chunks=chunks, hooks=hooks),
        architecture=architecture,
        telemetry=telemetry,
        observer=Observer(
            folder, config=run.telemetry, telemetry=telemetry, world=world, tokenizer=architecture.tokenize
        ),
        meter=meter,
        utilization=Utilization(
            run.model,
            device=world.device,
            ranks=world.size,
            bf16=engine.bf16,
            peak_tflops=run.telemetry.peak_tflops,
        ),
        writer=CheckpointWriter(
            folder, config=run.checkpoint, world=world, architecture=architecture, on_event=telemetry.event
        ),
        gradient_check=check,
        tests=PeriodicTests(state, telemetry, _validation(state, telemetry=telemetry), evaluation),
        trimming=text_trimming(engine.module.clip, wanted=run.model.trim_text, longest=run.model.text_tokens),
        on_rollback=partial(forget_after, folder),
    )


def _validation(state: RunState, *, telemetry: Telemetry) -> Validation | None:
    """The validation, at the temperature with which the objective starts: call it before a checkpoint is restored."""
    config = state.run.validation
    if not config.sources:
        return None
    return Validation(
        config,
        pairs=HeldOutPairs(config, state.run.data, state.world),
        tau=math.exp(-state.objective.logit_parameters()[0]),
        history=state.validation,
        report=telemetry.event,
    )


def _gradient_check(run: RunConfig, engine: Engine, *, world: World, chunks: list[slice]) -> GradientCheck | None:
    """The check of the first gradient against an fp32 copy of the towers with open_clip's own attention."""
    if not run.engine.probe:
        return None
    model = replace(without_weights(run.model), grad_checkpointing=True, packed_attention=False, trim_image=False)
    plain, _ = build_towers(model, seed=run.seed)
    return GradientCheck(engine, plain, world=world, seed=run.seed, chunks=chunks)


@contextmanager
def open_run(run: RunConfig, *, resume: str | None = None) -> Iterator[Trainer]:
    """One rank's part of a run, from the process group to a trainer that is ready to `fit` its current stage."""
    with closing(stage_trainers(run, resume=resume)) as trainers:
        yield next(trainers)


def stage_trainers(run: RunConfig, *, resume: str | None = None, new_batch_size: bool = False) -> Generator[Trainer]:
    """Yield a trainer for each remaining stage of a run; fit each trainer before requesting the next one.

    Stops after a trainer that was not fitted to the end of its stage.
    """
    with (
        start_world(timeout_minutes=_collectives_limit(run), device=run.engine.device) as world,
        hold_folder(run, world=world),
    ):
        while True:
            with ExitStack() as stage:
                with folder_of_a_start(run, world=world):
                    trainer = stage.enter_context(setup(run, world=world, resume=resume, new_batch_size=new_batch_size))
                yield trainer
                if trainer.step < trainer.end or trainer.step >= run.total_steps:
                    return
            del trainer
            gc.collect()  # towers, engine and optimizer refer to each other
            torch.cuda.empty_cache()
            resume = "latest"


def _collectives_limit(run: RunConfig) -> float:
    """Minutes until a collective times out. The heartbeats come first: they report which rank is behind."""
    return 1.5 * run.engine.timeout_minutes + 1.0


def train(run: RunConfig, *, resume: str | None = None, new_batch_size: bool = False) -> int:
    """Train one run on this rank to its last checkpoint. Returns the exit code."""
    code = EXIT_DONE
    try:
        with closing(stage_trainers(run, resume=resume, new_batch_size=new_batch_size)) as trainers:
            for trainer in trainers:
                code = trainer.fit()
                if code != EXIT_DONE or not trainer.step == trainer.end < run.total_steps:
                    ignore_stop_signals()  # there is no other stage
                del trainer  # free its memory for the next stage's trainer
                if code != EXIT_DONE:
                    break
        record_exit(code)
        return code
    except RuntimeError as error:
        if not lost_contact(error):
            record_exit(exit_code_of(error), f"{type(error).__name__}: {error}")
            raise
        lost = LostRank(f"Lost contact with another rank: it is gone, and its own message says why ({error}).")
        record_exit(lost.exit_code, str(lost))
        raise lost from error
    except BaseException as error:
        record_exit(exit_code_of(error), f"{type(error).__name__}: {error}")
        raise
    finally:
        stop_recording()


def _report_changes(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Report every setting that differs from the checkpoint's: a longer budget, for one, changes the schedule."""
    if changed := changed_settings(checkpoint.meta["config"], to_tree(trainer.run)):
        trainer.telemetry.event(f"Settings that differ from the checkpoint's: {'; '.join(changed)}.")


def changed_settings(before: Tree, now: Tree) -> list[str]:
    """The settings that differ, without `output`.

    One that only one of both has differs, too: the default of a new setting may compute in another way than the version
    that did not have it.
    """
    old, new = flatten(before), flatten(now)
    return [
        f"{key} {old.get(key, 'absent')} -> {new.get(key, 'absent')}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key, "absent") != new.get(key, "absent") and key != "output"
    ]

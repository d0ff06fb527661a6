"""Training a run: `setup` puts the parts together, checks before work; `train` is the whole of it on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from pipeline.checkpoint.writer import Checkpoint, CheckpointWriter
from pipeline.config import flatten, to_tree
from pipeline.distributed.world import World, limit_collectives, start_world
from pipeline.engine.deepspeed_engine import DeepSpeedEngine
from pipeline.metrics.logger import Telemetry
from pipeline.metrics.mfu import Utilization
from pipeline.model.towers import build_towers
from pipeline.model.trimming import text_trimming, why_not_trimmed
from pipeline.training.build import loader_of, objective_of
from pipeline.training.gradient_check import GradientProbe
from pipeline.training.observer import Observer
from pipeline.training.periodic_eval import InTraining
from pipeline.training.recipe import RunConfig, check_run
from pipeline.training.run_folder import hold_folder, prepare_folder
from pipeline.training.step import TrainStep
from pipeline.training.trainer import Trainer, agreed_checkpoint


@contextmanager
def setup(run: RunConfig, *, world: World, resume: str | None) -> Iterator[Trainer]:
    """Build every part of a run and, when asked, continue it. Checks come before work, cheap ones first.

    Args: resume: None (the output folder must hold no checkpoints), "latest" (start fresh when there are none) or a
      checkpoint's folder.
    """
    check_run(run, world_size=world.size)
    folder = Path(run.output)
    notes: list[str] = []
    checkpoint = agreed_checkpoint(folder, resume, world, notes)
    with ExitStack() as stack:
        towers, architecture = build_towers(run.model, seed=run.seed)
        trimming, untrimmed = text_trimming(towers.clip, wanted=run.model.trim_text), why_not_trimmed(towers.clip)
        loader = stack.enter_context(loader_of(run, architecture=architecture, world=world))
        objective = objective_of(run, loader=loader, architecture=architecture, world=world)
        engine = DeepSpeedEngine(towers.to(world.device), config=run.engine, optimizer=run.optimizer, world=world,
                        global_batch=run.batch_size, compile_towers=run.model.compile)  # fmt: skip
        limit_collectives(_collectives_limit(run))
        engine.train()
        take_step = TrainStep(engine, objective, world=world, seed=run.seed, local_batch=run.batch_size // world.size,
                              micro_batch=run.engine.micro_batch)  # fmt: skip
        telemetry = Telemetry(folder, config=run.telemetry, total_steps=run.total_steps,
                              first_step=checkpoint.step if checkpoint else 0, is_main=world.is_main)  # fmt: skip
        stack.callback(telemetry.close)
        observer = Observer(folder, config=run.telemetry, telemetry=telemetry, world=world,
                            tokenizer=architecture.tokenize)  # fmt: skip
        utilization = Utilization(run.model, device=world.device, ranks=world.size, bf16=engine.bf16,
                                  peak_tflops=run.telemetry.peak_tflops)  # fmt: skip
        writer = CheckpointWriter(folder, config=run.checkpoint, world=world, architecture=architecture,
                                  on_event=telemetry.event)  # fmt: skip
        stack.callback(writer.wait)
        trainer = Trainer(run, world, loader, architecture, engine, objective, take_step, telemetry, observer,
                          utilization, writer, trimming=trimming)  # fmt: skip
        if untrimmed:
            telemetry.event(f"Texts are not trimmed to their lengths. {untrimmed}")
        if run.evaluation.suite is not None:
            trainer.in_training = InTraining(run.evaluation, run=folder, model=run.model, world=world)
        for note in notes:
            telemetry.event(note)
        if checkpoint is not None:
            trainer.restore(checkpoint)
            telemetry.event(f"Resumed from {checkpoint.path.name} (step {trainer.step} of {run.total_steps}).")
            _tell_changes(trainer, checkpoint)
        if run.engine.probe and trainer.step < run.total_steps:
            trainer.probe = _arm_probe(trainer)
        yield trainer


@contextmanager
def open_run(run: RunConfig, *, resume: str | None = None) -> Iterator[Trainer]:
    """One rank's part of a run, from process group to trainer, ready to `fit`."""
    with (
        start_world(timeout_minutes=_collectives_limit(run), device=run.engine.device) as world,
        hold_folder(run, world=world),
    ):
        prepare_folder(run, world=world)
        with setup(run, world=world, resume=resume) as trainer:
            yield trainer


def _collectives_limit(run: RunConfig) -> float:
    """Minutes. The collectives' own limit is the second line: by then the heartbeats have told who is behind."""
    return 1.5 * run.engine.timeout_minutes + 1.0


def train(run: RunConfig, *, resume: str | None = None) -> int:
    """Train one run on this rank to its last checkpoint. Returns the exit code."""
    with open_run(run, resume=resume) as trainer:
        return trainer.fit()


def _arm_probe(trainer: Trainer) -> GradientProbe:
    """A probe that listens to the next step: an fp32 copy of the towers with open_clip's own attention.

    It uses activation checkpointing, because there is no memory for the activations of a second model.
    """
    model = replace(trainer.run.model, pretrained=None, grad_checkpointing=True, packed_attention=False)
    plain, _ = build_towers(model, seed=trainer.run.seed)
    return GradientProbe(plain, trainer.take_step, world=trainer.world)


def _tell_changes(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Name every setting that differs from the checkpoint's: a longer budget, say, also changes the schedule."""
    before, now = flatten(checkpoint.meta["config"]), flatten(to_tree(trainer.run))
    changed = [f"{key} {before.get(key)} -> {now.get(key)}" for key in sorted(before.keys() | now.keys())
               if before.get(key) != now.get(key) and key != "output"]  # fmt: skip
    if changed:
        trainer.telemetry.event(f"Settings that differ from the checkpoint's: {'; '.join(changed)}.")

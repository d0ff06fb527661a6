"""The parts of a run, built from its configuration. Loader and objective are also built to analyze a run afterwards."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.checkpoint.reader import Checkpoint
from pipeline.checkpoint.writer import CheckpointWriter
from pipeline.data.loading.decode import normalize
from pipeline.data.loading.loader import Loader, build_loader
from pipeline.data.loading.tokenize import fast_tokenizer
from pipeline.distributed.timing import Meter
from pipeline.distributed.workers import preload
from pipeline.distributed.world import World, limit_collectives
from pipeline.engine.engine_protocol import ENGINES
from pipeline.engine.state import WeightAverage
from pipeline.evaluation.run.images import WORKER_IMPORTS
from pipeline.metrics.logger import Telemetry
from pipeline.metrics.mfu import Utilization
from pipeline.model.architectures import Architecture
from pipeline.model.towers import build_towers, check_start, without_weights
from pipeline.objectives import Objective, ObjectiveConfig, ObjectiveContext, build_objective
from pipeline.objectives.temperature import TAU_MAX
from pipeline.pictures.pixels import colour_of
from pipeline.run_files import model_folder_in
from pipeline.training.auto import choose_micro_batch, compiled_towers
from pipeline.training.gradient_check import GradientCheck
from pipeline.training.inputs import PrefetchedBatches, text_layout
from pipeline.training.loop import Trainer
from pipeline.training.observer import Observer, StepProfiler
from pipeline.training.periodic_tests import PeriodicEvaluation, PeriodicTests
from pipeline.training.recipe import RunConfig
from pipeline.training.run_state import RunState, SkippedSteps
from pipeline.training.saving import Saver
from pipeline.training.stages import Stage
from pipeline.training.step import TrainStep, micro_batches
from pipeline.training.validation import HeldOutPairs, Validation


def loader_of(run: RunConfig, *, architecture: Architecture, world: World) -> Loader:
    """The loader of this rank, at the start of epoch 0.

    Raises:
        UserError: The data cannot be read, or does not fit the run.
    """
    return build_loader(
        run.data,
        world=world,
        global_batch=run.batch_size,
        seed=run.seed,
        image_size=architecture.image_size,
        tokenize=fast_tokenizer(architecture.tokenize),
    )


def objective_of(run: RunConfig, *, loader: Loader, architecture: Architecture, world: World) -> Objective:
    """The run's objective in its initial state."""
    return build_objective(
        run.objective,
        context=ObjectiveContext(
            dim=architecture.dim,
            batch_size=run.batch_size,
            dataset_size=loader.n,
            steps_per_epoch=loader.steps_per_epoch,
            total_steps=run.total_steps,
            world=world,
            device=world.device,
            seed=run.seed,
            beta2=run.optimizer.betas[1],
            adam_eps=run.optimizer.eps,
        ),
    )


def starting_objective(run: RunConfig, logit: tuple[float, float | None] | None) -> ObjectiveConfig:
    """The run's objective with the temperature (and bias) of the pretrained weights as its initial values.

    A temperature outside the objective's bounds starts at the nearest bound. Objectives with a fixed temperature keep
    theirs, which is a setting. `logit` is log(1/tau) and bias of the weights; None without pretrained weights.
    """
    config = run.objective
    if logit is None or not run.model.pretrained_temperature:
        return config
    names = {field.name for field in fields(config)}
    changes: dict[str, Any] = {}
    if "tau_init" in names:
        tau = math.exp(-logit[0])
        changes["tau_init"] = min(max(tau, getattr(config, "tau_min", tau)), TAU_MAX)
    if "bias_init" in names and logit[1] is not None:
        changes["bias_init"] = logit[1]
    return replace(config, **changes)


def describe_start(run: RunConfig, logit: tuple[float, float | None] | None) -> str:
    """A log message about the weights a run starts from; empty without pretrained weights."""
    if logit is None:
        return ""
    tau, bias = math.exp(-logit[0]), "" if logit[1] is None else f" and bias {logit[1]:.4g}"
    weights = model_folder_in(Path(str(run.model.pretrained))) or run.model.pretrained
    start = f"Starting from the weights {weights}, whose temperature is {tau:.4g}{bias}"
    if not run.model.pretrained_temperature:
        return f"{start}; the objective starts at its own (model.pretrained_temperature=false)."
    config = starting_objective(run, logit)
    initial = getattr(config, "tau_init", None)
    if initial is None:
        return f"{start}; {config.name} has a fixed temperature, which is a setting: objective.tau."
    if not math.isclose(initial, tau, rel_tol=1e-3):
        return f"{start}; the objective starts at {initial:.4g}, its bound nearest to that (objective.tau_min, 1)."
    return f"{start}; the objective starts there."


def build_trainer(stage: Stage, *, world: World, telemetry: Telemetry, resumed: Checkpoint | None) -> Trainer:
    """The trainer of a stage in its initial state; `resumed` will be restored. It closes the telemetry, too."""
    run, end = stage.run, stage.end
    with ExitStack() as parts:
        parts.callback(telemetry.close)
        state, architecture = _build_state(stage, world=world, parts=parts)
        engine, phases = state.engine, world.phases
        assert phases is not None
        normalized = partial(
            normalize,
            mean=architecture.mean,
            std=architecture.std,
            dtype=engine.dtype,
            memory_format=engine.module.image_format,
        )
        meter = Meter(run.batch_size, phases)
        trains = (resumed.step if resumed else 0) < end
        plain = None
        if run.engine.probe and trains:  # in fp32 and with open_clip's own attention
            model = replace(without_weights(run.model), grad_checkpointing=True, packed_attention=False)
            plain, _ = build_towers(model, seed=run.seed)
        if run.engine.micro_batch == "auto" and trains:
            telemetry.event(choose_micro_batch(state, normalized, plain=plain, resumed=resumed))
        local = run.batch_size // world.size
        chunks = micro_batches(local, state.micro_batch or run.engine.rows(local))
        check = None
        if plain is not None:
            check = GradientCheck(
                engine,
                plain,
                world=world,
                seed=run.seed,
                chunks=chunks,
                clipping=run.engine.gradient_clipping,
                report=telemetry.event,
            )
        batches = PrefetchedBatches(
            state.loader,
            texts=text_layout(engine, run.model, chunks, device=world.device),
            steps=end,
            meter=meter,
            device=world.device,
        )
        take_step = TrainStep(
            engine,
            state.objective,
            world=world,
            seed=run.seed,
            chunks=chunks,
            on_gradients=check.reference if check else None,
        )
        writer = CheckpointWriter(
            Path(run.output),
            config=run.checkpoint,
            world=world,
            architecture=architecture,
            on_event=telemetry.event,
            resumed_from=resumed.path if resumed else None,
            mirror_minutes=run.engine.timeout_minutes * 2 / 3,  # rank 0 would be reported as stalled after all of it
        )
        parts.callback(writer.finish)
        utilization = Utilization(
            run.model,
            device=world.device,
            ranks=world.size,
            bf16=engine.bf16,
            peak_tflops=run.telemetry.peak_tflops,
            images=run.data.image_features is None,
        )
        evaluation = None
        if run.evaluation.suite is not None:
            evaluation = PeriodicEvaluation(run.evaluation, run=Path(run.output), world=world)
        tests = PeriodicTests(state, telemetry, _validation(state, telemetry=telemetry), evaluation)
        observer = Observer(
            state=state,
            telemetry=telemetry,
            tokenizer=architecture.tokenize,
            meter=meter,
            utilization=utilization,
            end=end,
        )
        saver = Saver(state, writer, telemetry, end)
        profiler = None
        if run.telemetry.profile is not None and world.is_main:
            profiler = StepProfiler(state, telemetry, run.telemetry.profile)
        optional = [hook for hook in (check, profiler) if hook is not None]
        return Trainer(
            state=state,
            architecture=architecture,
            end=end,
            batches=batches,
            normalized=normalized,
            take_step=take_step,
            telemetry=telemetry,
            meter=meter,
            utilization=utilization,
            writer=writer,
            gradient_check=check,
            profiler=profiler,
            tests=tests,
            saver=saver,
            hooks=[state.average, *optional, observer, tests.validate, saver, tests.evaluate],
            parts=parts.pop_all(),
        )


def _build_state(stage: Stage, *, world: World, parts: ExitStack) -> tuple[RunState, Architecture]:
    """What has state, in its initial state. `parts` closes the loader."""
    run = stage.run
    if run.evaluation.suite is not None and run.evaluation.workers != 0:
        preload(*WORKER_IMPORTS)  # the fork server starts with the loader, and serves the evaluation, too
    check_start(run.model)
    towers, architecture = build_towers(run.model, seed=run.seed)
    architecture = replace(architecture, background=colour_of(run.data.background))
    loader = parts.enter_context(loader_of(run, architecture=architecture, world=world))
    starting = replace(run, objective=starting_objective(run, towers.logit))
    objective = objective_of(starting, loader=loader, architecture=architecture, world=world)
    make_engine = ENGINES[run.engine.name]
    facts = make_engine.facts(run.engine, optimizer=run.optimizer, global_batch=run.batch_size, world_size=world.size)
    engine = make_engine(
        towers.to(world.device),
        config=run.engine,
        optimizer=run.optimizer,
        world=world,
        global_batch=run.batch_size,
        compile_towers=compiled_towers(run, facts, world=world, steps=stage.end - stage.first),
    )
    limit_collectives(collectives_limit(run))
    engine.train()
    ema = WeightAverage(run.ema, engine.state) if run.ema.decay is not None else None
    state = RunState(
        run=run, world=world, loader=loader, engine=engine, objective=objective, skipped=SkippedSteps(), ema=ema
    )
    return state, architecture


def _validation(state: RunState, *, telemetry: Telemetry) -> Validation | None:
    """The validation, at the temperature with which the objective starts: call it before a checkpoint is restored."""
    config = state.run.validation
    if not config.sources:
        return None
    return Validation(
        config,
        pairs=HeldOutPairs(config, state.run.data, state.world),
        tau=config.tau or math.exp(-state.objective.logit_parameters()[0]),
        report=telemetry.event,
    )


def collectives_limit(run: RunConfig) -> float:
    """Minutes until a collective times out. The heartbeats come first: they report which rank is behind."""
    return 1.5 * run.engine.timeout_minutes + 1.0

"""The parts of a run, built from its configuration. Loader and objective are also built to analyze a run afterwards."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from pipeline.data.loading.loader import Loader, build_loader
from pipeline.data.loading.tokenize import fast_tokenizer
from pipeline.distributed.workers import preload
from pipeline.distributed.world import World, limit_collectives
from pipeline.engine.engine_protocol import ENGINES
from pipeline.engine.state import WeightAverage
from pipeline.evaluation.run.images import WORKER_IMPORTS
from pipeline.model.architectures import Architecture
from pipeline.model.towers import build_towers, check_start
from pipeline.objectives import Objective, ObjectiveConfig, ObjectiveContext, build_objective
from pipeline.objectives.temperature import TAU_MAX
from pipeline.pictures.pixels import colour_of
from pipeline.run_files import model_folder_in
from pipeline.training.auto import compiled_towers
from pipeline.training.recipe import RunConfig
from pipeline.training.run_state import RunState
from pipeline.training.stages import Stage


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


def build_state(stage: Stage, *, world: World, parts: ExitStack) -> RunState:
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
    return RunState(
        run=run, world=world, architecture=architecture, loader=loader, engine=engine, objective=objective, ema=ema
    )


def collectives_limit(run: RunConfig) -> float:
    """Minutes until a collective times out. The heartbeats come first: they report which rank is behind."""
    return 1.5 * run.engine.timeout_minutes + 1.0

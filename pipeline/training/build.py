"""The parts of a run, built from its configuration. Loader and objective are also built to analyze a run afterwards."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from pipeline.checkpoint.reader import Checkpoint
from pipeline.data.loading.decode import fast_tokenizer
from pipeline.data.loading.loader import Loader, build_loader
from pipeline.distributed.processes import preload
from pipeline.distributed.world import World, limit_collectives
from pipeline.engine.engine_protocol import ENGINES, EngineFacts
from pipeline.errors import UserError, is_out_of_memory
from pipeline.evaluation.run.images import WORKER_IMPORTS
from pipeline.metrics.mfu import known_peak, training_flops
from pipeline.model.architectures import Architecture
from pipeline.model.model_folder import resized_state
from pipeline.model.towers import Towers, build_towers, text_batching, without_weights
from pipeline.objectives import Objective, ObjectiveConfig, ObjectiveContext, build_objective
from pipeline.objectives.temperature import TAU_MAX
from pipeline.pictures.pixels import colour_of
from pipeline.training.recipe import RunConfig, Stage, stages_of
from pipeline.training.run_state import RunState
from pipeline.training.step import batch_norms_of, frozen_statistics, seeded

COMPILING_SECONDS = 75.0
"""What compiling the towers of ViT-B/16 took on an H200 (torch 2.11)."""
SAVED = 0.1
"""Share of a step that compiled towers save (ViT-B/16 there, bf16 weights, patches as a product: 203 to 188 ms)."""
USUAL_MFU, UNKNOWN_PEAK = 0.3, 100.0
"""Share of a GPU's peak that training reaches, and the peak in TFLOP/s that is assumed of a GPU outside the table."""


def loader_of(run: RunConfig, *, architecture: Architecture, world: World) -> Loader:
    """The loader of this rank, at the start of epoch 0. Raises a `UserError` if the data does not fit the run."""
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
    tau, names = math.exp(-logit[0]), {field.name for field in fields(config)}
    values = {"tau_init": min(max(tau, getattr(config, "tau_min", tau)), TAU_MAX), "bias_init": logit[1]}
    changes: dict[str, Any] = {key: value for key, value in values.items() if key in names and value is not None}
    return replace(config, **changes)


def check_stages(run: RunConfig) -> None:
    """Raise a `UserError` if a stage's towers cannot be built, or cannot start from the weights of the stage before.
    Only shapes are computed."""
    if not run.schedule.stages:
        return
    before: dict[str, Tensor] = {}
    for stage in stages_of(run):
        towers, _ = build_towers(without_weights(stage.run.model), seed=0, device="meta")
        text_batching(towers.clip, stage.run.model, by_kernel=True)  # whatever the device
        weights = towers.clip.state_dict()
        resized_state(before, shapes={name: value.shape for name, value in weights.items()})
        before = weights


def build_state(stage: Stage, *, world: World, parts: ExitStack) -> RunState:
    """What has state, in its initial state. `parts` closes the loader."""
    run = stage.run
    if run.evaluation.suite is not None and run.evaluation.workers != 0:
        preload(*WORKER_IMPORTS)  # the fork server starts with the loader, and serves the evaluation, too
    towers, arch = build_towers(run.model, seed=run.seed)
    arch = replace(arch, background=colour_of(run.data.background))
    loader = parts.enter_context(loader_of(run, architecture=arch, world=world))
    starting = replace(run, objective=starting_objective(run, towers.logit))
    objective = objective_of(starting, loader=loader, architecture=arch, world=world)
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
    engine.module.train()
    return RunState(
        run=run, end=stage.end, world=world, architecture=arch, loader=loader, engine=engine, objective=objective
    )


def collectives_limit(run: RunConfig) -> float:
    """Minutes until a collective times out. The heartbeats come first: they report which rank is behind."""
    return 1.5 * run.engine.timeout_minutes + 1.0


def compiled_towers(run: RunConfig, facts: EngineFacts, *, world: World, steps: int) -> bool | Literal["auto"]:
    """Whether to compile the towers for a number of steps; "auto": if they can be.

    The answer is the same on every rank and after a restart: a resumed run computes what an uninterrupted one does.
    """
    setting = run.model.compile
    if setting != "auto":
        return setting
    if world.device.type != "cuda" or not facts.bf16 or facts.stage == 3 or run.model.lora.rank is not None:
        return False  # in fp32, packed texts are in groups: other shapes with every batch
    peak = known_peak(torch.cuda.get_device_name(world.device)) or UNKNOWN_PEAK
    seconds = training_flops(run.model) * run.batch_size * steps / (world.size * USUAL_MFU * peak * 1e12)
    return "auto" if seconds * SAVED > COMPILING_SECONDS else False


def choose_micro_batch(state: RunState, *, plain: Towers | None, resumed: Checkpoint | None) -> str:
    """Set `state.micro_batch` to the largest one, of those found by halving, that fits on every rank. Collective.

    A forward and a backward pass of the uncompiled towers are tried, on each rank alone. Weights, gradients, running
    statistics and random states stay as they are. A run that goes on with as many samples a rank begins with its former
    number, with which it computes the same bits. On a CPU, where lack of memory ends the process, everything fits.
    `plain` are the towers of the gradient check, which compute in fp32. Returns a sentence for the log.

    Raises:
        UserError: A single sample does not fit.
    """
    engine, world, local = state.engine, state.world, state.run.batch_size // state.world.size
    before = None
    if resumed is not None and resumed.batch_size == local * resumed.meta["world_size"]:
        before = resumed.meta.get("micro_batch")
    size = before or local
    tried = [(engine.module, engine.dtype, engine.bf16 and engine.dtype == torch.float32)]
    if plain is not None:
        tried.append((plain.to(world.device).train(), torch.float32, False))
    batch = state.loader.stand_in()
    image, text = state.normalized(batch.image.to(world.device)), batch.text.to(world.device)
    text = text[:, : state.run.model.text_tokens]  # of the widest batch
    while True:
        fits = all(_fits(*each, image=image[:size], text=text[:size]) for each in tried)
        torch.cuda.empty_cache()  # for libraries that have allocators of their own, such as NCCL
        if not world.all_reduce(torch.tensor(float(not fits), device=world.device), "max"):
            break
        if size == 1:
            raise UserError(
                "engine.micro_batch=auto: not even one sample of a rank fits into memory. Set "
                "model.grad_checkpointing=true, or see docs/cluster.md, 'A large batch on few GPUs'."
            )
        size = max(part for part in range(1, size // 2 + 1) if local % part == 0)
    state.micro_batch = size
    why = "" if size == local else ", as before" if size == before else "; more do not fit into memory"
    return f"engine.micro_batch=auto: {size} of a rank's {local} samples at a time{why}."


def _fits(towers: Towers, dtype: torch.dtype, autocast: bool, *, image: Tensor, text: Tensor) -> bool:
    """Whether a forward and a backward pass fit, beside two fp32 copies of what is trained: the moments that some
    optimizers allocate in their first step, and room for what else a step needs."""
    trained = [p for p in towers.parameters() if p.requires_grad]
    try:
        room = [torch.empty(2, *p.shape, device=p.device) for p in trained]
        with (
            seeded(0, 0, 0, 0),
            frozen_statistics(batch_norms_of(towers)),
            torch.autocast(image.device.type, torch.bfloat16, enabled=autocast),
        ):
            features = [f for f in towers.forward(image.to(dtype), text) if f.requires_grad]
        torch.autograd.grad(features, trained, [torch.ones_like(f) for f in features], allow_unused=True)
        del room
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True

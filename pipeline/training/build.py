"""A run's loader and objective, built from its configuration: for training, and for analyzing a run afterwards."""

from __future__ import annotations

from pipeline.data.loading.loader import Loader, build_loader
from pipeline.data.loading.tokenize import fast_tokenizer
from pipeline.distributed.world import World
from pipeline.model.architectures import Architecture
from pipeline.objectives import Objective, ObjectiveContext, build_objective
from pipeline.training.recipe import RunConfig


def loader_of(run: RunConfig, *, architecture: Architecture, world: World) -> Loader:
    """The loader of this rank, at the start of epoch 0.

    Raises:
        UserError: As `build_loader`.
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
        ),
    )

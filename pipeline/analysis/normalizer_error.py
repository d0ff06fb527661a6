"""Exact log-normalizers of a checkpoint over its whole dataset, and the error of the method's own estimates.

    log(eps + g_i), g_i = 1/(n - 1) sum_{j != i} exp((s_ij - s_ii) / tau_i)      NeuCLIP, equation (9), appendix B.6

with the method's own eps, since its estimates include it (openclip and amorlip add none).

The n x n similarities are never stored: each batch of anchors is compared with all pairs in blocks, with a running
log-sum-exp, in both directions. The pairs are those of one epoch of the training's own loader (same crops, same
batches), because some methods estimate from within a batch. Every rank keeps the features of its own pairs only, 2 n/K
d numbers, and sums over them for the anchors of all ranks.

Shape legend: n pairs encoded, K ranks, B global batch, b this rank's part of it, d feature dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline import config as cfg
from pipeline.checkpoint.reader import Checkpoint, open_checkpoint
from pipeline.data.loading.decode import normalize
from pipeline.data.loading.loader import Loader
from pipeline.distributed.devices import true_fp32
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.model.finetuning import LoraConfig
from pipeline.model.towers import build_towers, without_weights
from pipeline.model.trimming import text_trimming, without_padding
from pipeline.objectives.pairwise import CPU_BLOCK, GPU_BLOCK
from pipeline.objectives.softmax import SoftmaxObjective
from pipeline.run_files import finished_checkpoints
from pipeline.training.build import loader_of, objective_of
from pipeline.training.recipe import RunConfig, parse_recipe
from pipeline.training.recipe_file import stored_recipe


def exact_log_normalizers(
    anchors_bd: Tensor, others_nd: Tensor, *, tau_b: Tensor, first: int, eps: float = 0.0, world: World | None = None
) -> Tensor:
    """log(eps + g) of each of this rank's anchors over all ranks' pairs but the anchor's own, [b]; collective.

    Features are unit-norm; `others_nd` is this rank's part of the other side, of the same length on every rank, whose
    row `first` is the partner of the first anchor, which the others follow. `tau_b` are the anchors' temperatures, and
    `eps` is the method's small constant.
    """
    world = world or World()
    positive = (anchors_bd * others_nd[first : first + len(anchors_bd)]).sum(1)
    anchors, tau, own = world.all_gather(anchors_bd), world.all_gather(tau_b), world.rows(len(anchors_bd))
    scaled, n = anchors / tau[:, None], len(others_nd)
    step = max(1, (GPU_BLOCK if scaled.is_cuda else CPU_BLOCK) // len(scaled))
    sums = scaled.new_full((len(scaled),), -math.inf)  # log sum_j exp(s_ij / tau_i) over this rank's columns
    for start in range(0, n, step):
        z = scaled @ others_nd[start : start + step].T
        low, high = max(first, start), min(first + own.stop - own.start, start + z.shape[1])
        if low < high:  # partners among these columns
            rows = slice(own.start + low - first, own.start + high - first)
            z[rows, low - start : high - start].fill_diagonal_(-math.inf)
        sums = torch.logaddexp(sums, z.logsumexp(1))
    total = world.all_gather(sums[None]).logsumexp(0)[own] - positive / tau_b
    log_g = total - math.log(world.size * len(others_nd) - 1)
    return torch.logaddexp(log_g, log_g.new_full((), math.log(eps))) if eps else log_g


def run_of(checkpoint: Checkpoint, *, changes: cfg.Tree | None = None) -> RunConfig:
    """The configuration that a checkpoint was written with, with `changes` (to the path of the data, for example).

    Consents (`recipe_file.CONSENTS`) are taken from `changes` only.

    Raises:
        UserError: The checkpoint holds none.
    """
    tree = checkpoint.meta.get("config")
    if not tree:
        raise UserError(
            f"{checkpoint.path} does not hold its run's configuration: it was not written by `neuclip train`."
        )
    return parse_recipe(cfg.merge(stored_recipe(tree, file=checkpoint.path), changes or {}))


def measure(run: RunConfig, checkpoint: Checkpoint, *, world: World, limit: int | None = None) -> dict[str, Any]:
    """Exact normalizers of a checkpoint and the errors of its method's estimates; collective, the same on every rank.

    With a `limit`, about as many anchors are compared (whole batches, from the front of the shuffled epoch); the sums
    still run over the whole dataset.

    Returns:
        `pairs`, n, and `left_over`, those of the dataset that fill no batch; `rows`, the anchors compared in each
        direction, and `tau`, their mean temperature; `mean` and `variance` of the exact values, the latter being the
        error of an estimator that knows only their mean. `cold` and `in_use` have the mean squared error `mse` and the
        mean error `bias` of estimates from the stored state alone, and of those after a step's updates on the batch.

    Raises:
        UserError: The objective has no normalizers (siglip), the weights do not fit `run`, or stored features that the
            run uses are not there.
    """
    ids, values, sizes = compare(run, checkpoint, world=world, limit=limit)
    exact, cold, in_use, tau = (values[:, 2 * kind : 2 * kind + 2].T.flatten() for kind in range(4))

    def errors(estimates: Tensor) -> dict[str, float]:
        difference = estimates.double() - exact.double()
        return {"mse": float(difference.square().mean()), "bias": float(difference.mean())}

    return {
        "step": checkpoint.step,
        "samples": int(checkpoint.meta["samples"]),
        "batch_size": run.batch_size,
        **sizes,
        "rows": len(ids),
        "tau": float(tau.mean()),
        "mean": float(exact.mean()),
        "variance": float(exact.var(correction=0)),
        "cold": errors(cold),
        "in_use": errors(in_use),
    }


@torch.no_grad()
def compare(
    run: RunConfig, checkpoint: Checkpoint, *, world: World, limit: int | None
) -> tuple[Tensor, Tensor, dict[str, int]]:
    """What `measure` sums up: sample ids of the anchors, [r]; exact normalizers, cold and in-use estimates and
    temperatures of both sides, [r, 8]; and the numbers of `pairs` and of those `left_over`."""
    plain = replace(without_weights(run.model), patch_dropout=None, compile=False, lora=LoraConfig())
    towers, architecture = build_towers(plain, seed=run.seed)
    try:
        towers.clip.load_state_dict(checkpoint.weights())
    except RuntimeError as error:
        raise UserError(
            f"The weights of {checkpoint.path} do not fit the towers of {run.model.arch}: leave model.arch, "
            "model.image_size and model.context_length as the run has them."
        ) from error
    towers.to(world.device).eval()
    with loader_of(run, architecture=architecture, world=world) as loader:
        objective = objective_of(run, loader=loader, architecture=architecture, world=world)
        if not isinstance(objective, SoftmaxObjective):
            raise UserError(
                f"{run.objective.name} has no normalizers to compare: choose a run with a softmax objective."
            )
        objective.load_state_dict(checkpoint.objective())
        objective.load_row_state_dict(checkpoint.read_rows)
        image, text, ids = _encode_epoch(loader, towers, architecture, world)
        steps = loader.steps_per_epoch
        sizes = {"pairs": world.size * len(ids), "left_over": loader.n - steps * run.batch_size}
    local = run.batch_size // world.size
    wanted = steps if limit is None else min(steps, max(1, -(-limit // run.batch_size)))
    batches = [slice(step * local, (step + 1) * local) for step in range(wanted)]
    values = []
    for own in batches:
        estimates = objective.log_normalizers(image[own], text[own], sample_ids=ids[own])
        where: dict[str, Any] = {"first": own.start, "eps": objective.eps, "world": world}
        with true_fp32(world.device):
            exact = [
                exact_log_normalizers(anchors[own], others, tau_b=estimates[2][side], **where)
                for side, (anchors, others) in enumerate(((image, text), (text, image)))
            ]
        columns = [*exact, *(side for pair in estimates for side in pair)]
        values.append(world.all_gather(torch.stack(columns, 1)).cpu())
    return torch.cat([world.all_gather(ids[own]) for own in batches]).cpu(), torch.cat(values), sizes


def _encode_epoch(loader: Loader, towers: Any, architecture: Any, world: World) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's part of an epoch, in batches: features, [n/K, d] each, and sample ids, [n/K]."""
    stored: list[Tensor] = []
    trimming = text_trimming(towers.clip)
    for step in range(loader.steps_per_epoch):
        batch = next(loader)
        image = normalize(batch.image.to(world.device), mean=architecture.mean, std=architecture.std)
        parts = (*towers(image, without_padding(batch.text, trimming).to(world.device)), batch.sample_id)
        size, n = len(image), len(image) * loader.steps_per_epoch
        stored = stored or [part.new_empty((n, *part.shape[1:]), device=world.device) for part in parts]
        for whole, part in zip(stored, parts, strict=True):
            whole[step * size : (step + 1) * size] = part
    image, text, ids = stored  # the loader refuses datasets smaller than a batch
    return image, text, ids


def checkpoints_of(run: Path, *, on_damage: Callable[[str], None]) -> list[Checkpoint]:
    """The undamaged checkpoints of a run's folder (or `run` itself, if it is a checkpoint), oldest first.

    `on_damage` is called with a message for each damaged one.

    Raises:
        UserError: There is no undamaged checkpoint.
    """
    checkpoints = []
    for path in finished_checkpoints(run) or [run]:
        try:
            checkpoints.append(open_checkpoint(path))
        except UserError as error:
            on_damage(f"{path} is skipped: {error}")
    if not checkpoints:
        raise UserError(f"There are no good checkpoints in {run}: give a run's folder, or one of its checkpoints.")
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)

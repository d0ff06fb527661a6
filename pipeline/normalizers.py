"""Exact log-normalizers of a checkpoint over its whole dataset, and how far each method's own are from them.

    log g_i = log [ 1/(n - 1) sum_{j != i} exp((s_ij - s_ii) / tau_i) ]      NeuCLIP, equation (9) and appendix B.6

The n x n similarities are never stored: rows are taken in blocks, with a log-sum-exp over all columns. The pairs are
those of one epoch of the training's own loader (same crops, same batches), so that a method that answers from within a
batch is asked about batches as it met them. Both directions, all ranks share the rows.

Shape legend: n pairs encoded, B global batch, b this rank's part of it, d feature dimension.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline import config as cfg
from pipeline.assemble import loader_of, objective_of
from pipeline.checkpoint import META_NAME, Checkpoint, damage, finished_checkpoints
from pipeline.data.decode import normalize
from pipeline.data.loader import Loader
from pipeline.errors import UserError
from pipeline.model import ModelConfig, build_towers
from pipeline.objectives.frame import Pair, SoftmaxObjective, true_fp32
from pipeline.objectives.pairwise import anchor_statistics
from pipeline.recipe import RunConfig, parse_recipe
from pipeline.world import World

SIDES = ("image", "text")


@dataclass(frozen=True)
class Errors:
    """Mean squared error and mean error (bias) of log-normalizers, over both directions."""

    mse: float
    bias: float


@dataclass(frozen=True)
class Measurement:
    """One checkpoint's log-normalizers.

    pairs: n, over which the exact ones sum; left_over: pairs of the dataset that fill no batch and are not among them.
    rows: anchors compared, per direction. tau: their mean temperature. mean, variance: of the exact log-normalizers;
    an estimator that knows nothing but the mean has an error of `variance`. cold: the method's lasting state alone;
    in_use: with what a step on the anchors' batch learns first.
    """

    step: int
    samples: int
    batch_size: int
    pairs: int
    left_over: int
    rows: int
    tau: float
    mean: float
    variance: float
    cold: Errors
    in_use: Errors

    def record(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Rows:
    """What was compared, on the CPU: sample ids [r] and, for each direction, [r] values."""

    sample_id: Tensor
    exact: Pair
    cold: Pair
    in_use: Pair
    tau: Pair


def exact_log_normalizers(anchors_bd: Tensor, others_nd: Tensor, *, tau_b: Tensor, first: int) -> Tensor:
    """log g of each anchor over all n others but its own, [b], in row blocks.

    Args: anchors_bd: [b, d] unit-norm. others_nd: [n, d] unit-norm; row `first + i` is anchor i's own partner.
    """
    positive = (anchors_bd * others_nd[first : first + len(anchors_bd)]).sum(1)
    return anchor_statistics(anchors_bd, others_nd, positive_b=positive, tau_b=tau_b, first=first)[0]


def run_of(checkpoint: Checkpoint, *, changes: cfg.Tree | None = None) -> RunConfig:
    """The configuration that a checkpoint was written with, and `changes` to it (where the data lies now, say)."""
    tree = checkpoint.meta.get("config")
    if not tree:
        raise UserError(
            f"{checkpoint.path} does not hold its run's configuration: it was not written by `neuclip train`."
        )
    return parse_recipe(cfg.merge(tree, changes or {}))


@torch.no_grad()
def measure(
    run: RunConfig, checkpoint: Checkpoint, *, world: World, limit: int | None = None
) -> tuple[Measurement, Rows]:
    """Exact normalizers of a checkpoint and the errors of its method's own; collective, the same on every rank.

    Args: limit: compare about so many anchors only (whole batches, from the front of the shuffled epoch); the sums
      still run over the whole dataset. Default: all.
    Raises: UserError for an objective without normalizers (siglip).
    """
    towers, architecture = build_towers(_from_scratch(run.model), seed=run.seed)
    towers.clip.load_state_dict(checkpoint.weights())
    towers.to(world.device).eval()
    with loader_of(run, architecture=architecture, world=world) as loader:
        objective = objective_of(run, loader=loader, architecture=architecture, world=world)
        if not isinstance(objective, SoftmaxObjective):
            raise UserError(
                f"{run.objective.name} has no normalizers: nothing can be compared. Give a softmax objective."
            )
        objective.load_state_dict(checkpoint.objective())
        objective.load_row_state_dict(checkpoint.read_rows)
        batches = [_encode(batch, towers, architecture, world) for batch in _epoch(loader)]
        left_over = loader.n - loader.steps_per_epoch * run.batch_size
    columns = tuple(torch.cat([world.all_gather(batch[side]) for batch in batches]) for side in (0, 1))
    wanted = batches if limit is None else batches[: max(1, -(-limit // run.batch_size))]
    rows = [
        _compare(objective, batch, columns=(columns[0], columns[1]), first=number * run.batch_size, world=world)
        for number, batch in enumerate(wanted)
    ]
    found = _join(rows)
    exact, tau = torch.cat(found.exact), torch.cat(found.tau)
    measurement = Measurement(
        step=checkpoint.step,
        samples=checkpoint.step * run.batch_size,
        batch_size=run.batch_size,
        pairs=len(columns[0]),
        left_over=left_over,
        rows=len(found.sample_id),
        tau=float(tau.mean()),
        mean=float(exact.mean()),
        variance=float(exact.var(correction=0)),
        cold=_errors(torch.cat(found.cold), exact),
        in_use=_errors(torch.cat(found.in_use), exact),
    )
    return measurement, found


def save_rows(path: Path, rows: Rows) -> None:
    """All compared values as one .npz: sample_id, and exact, cold, in_use and tau of both directions (image_exact)."""
    columns = {
        f"{side}_{name}": getattr(rows, name)[number].numpy()
        for number, side in enumerate(SIDES)
        for name in ("exact", "cold", "in_use", "tau")
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        np.savez(file, sample_id=rows.sample_id.numpy(), **columns)


def _from_scratch(model: ModelConfig) -> ModelConfig:
    return replace(model, pretrained=None, patch_dropout=None, compile=False)


def _epoch(loader: Loader) -> Iterator[Any]:
    for _ in range(loader.steps_per_epoch):
        yield next(loader)


def _encode(batch: Any, towers: Any, architecture: Any, world: World) -> tuple[Tensor, Tensor, Tensor]:
    image = normalize(batch.image.to(world.device), mean=architecture.mean, std=architecture.std)
    first, second = towers(image, batch.text.to(world.device))
    return first, second, batch.sample_id.to(world.device)


def _compare(
    objective: SoftmaxObjective, batch: tuple[Tensor, Tensor, Tensor], *, columns: Pair, first: int, world: World
) -> Rows:
    """This global batch's rows of every rank: exact values and the method's own."""
    image, text, ids = batch
    beliefs = objective.log_normalizers(image, text, sample_ids=ids)
    own = first + world.rows(len(image)).start
    with true_fp32():
        exact = [
            exact_log_normalizers(features, columns[1 - side], tau_b=beliefs.tau[side], first=own)
            for side, features in enumerate((image, text))
        ]
    values = torch.stack([*exact, *beliefs.cold, *beliefs.in_use, *beliefs.tau], 1)
    gathered = world.all_gather(values).cpu().unbind(1)
    pairs = [(gathered[i], gathered[i + 1]) for i in range(0, 8, 2)]
    return Rows(world.all_gather(ids).cpu(), *pairs)


def _join(parts: list[Rows]) -> Rows:
    def joined(name: str) -> Pair:
        return tuple(torch.cat([getattr(part, name)[side] for part in parts]) for side in (0, 1))  # type: ignore[return-value]

    ids = torch.cat([part.sample_id for part in parts])
    return Rows(ids, joined("exact"), joined("cold"), joined("in_use"), joined("tau"))


def _errors(given: Tensor, exact: Tensor) -> Errors:
    difference = given.double() - exact.double()
    return Errors(mse=float(difference.square().mean()), bias=float(difference.mean()))


def checkpoints_of(run: Path, *, on_damage: Callable[[str], None]) -> list[Checkpoint]:
    """The good checkpoints of a run's folder (or the one that `run` itself is), oldest first; damaged ones are named.

    Raises: UserError when no good one is there.
    """
    found = []
    for path in finished_checkpoints(run) or [run]:
        problem = damage(path)
        if problem is None:
            found.append(Checkpoint(path, json.loads((path / META_NAME).read_text(encoding="utf-8"))))
        else:
            on_damage(f"{path} is left out: {problem}")
    if not found:
        raise UserError(f"There are no good checkpoints in {run}: give a run's folder, or one of its checkpoints.")
    return sorted(found, key=lambda checkpoint: checkpoint.step)

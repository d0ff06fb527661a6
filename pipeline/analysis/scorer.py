"""Build the scorer of `neuclip score` from a model and a dataset."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from pipeline.analysis.normalizer_error import run_of
from pipeline.analysis.pair_scores import Scorer, ScoringFacts, reference_pairs
from pipeline.analysis.shard_pairs import PairReader, whole
from pipeline.checkpoint.reader import open_checkpoint
from pipeline.data.shards.manifest_format import Manifest
from pipeline.data.shards.tar_reader import CaptionField
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.model.evaluation_model import EvaluationModel, load_for_evaluation
from pipeline.objectives import build_objective
from pipeline.objectives.npn.neuclip import NeuClip
from pipeline.objectives.npn.prototypes import Anchors
from pipeline.run_files import META_NAME, model_folder_in


class NetworkNormalizers:
    """The prediction of the network of a trained `neuclip` objective."""

    def __init__(self, objective: NeuClip) -> None:
        self._npn = objective.npn
        self.tau = math.exp(-objective.logit_parameters()[0])

    def __call__(self, image: Tensor, text: Tensor, sample_ids: Tensor) -> tuple[Tensor, Tensor]:
        positive = (image * text).sum(1)
        tau, unused = positive.new_tensor(self.tau), torch.zeros_like(positive)
        # Without the method's eps: in it, all pairs that fit much better than chance would have the score -log(eps).
        sides = [Anchors(side, positive, unused, tau, -math.inf) for side in (image, text)]
        first, second = self._npn.predict((sides[0], sides[1]))
        return first + positive / tau, second + positive / tau


class SampledNormalizers:
    """Means over a sample of the dataset's pairs, [m, d] unit-norm features; a pair is left out of its own mean."""

    def __init__(self, image: Tensor, text: Tensor, sample_ids: Tensor, *, tau: float) -> None:
        self._others, self._ids, self.tau = (text, image), sample_ids, tau

    def __call__(self, image: Tensor, text: Tensor, sample_ids: Tensor) -> tuple[Tensor, Tensor]:
        own = sample_ids[:, None] == self._ids
        counted = (len(self._ids) - own.sum(1)).log()
        first, second = (
            (side @ others.T / self.tau).masked_fill(own, -math.inf).logsumexp(1) - counted
            for side, others in zip((image, text), self._others, strict=True)
        )
        return first, second


def make_scorer(
    spec: str,
    manifest: Manifest,
    *,
    caption: CaptionField,
    normalizers: str,
    reference: int,
    batch_size: int,
    workers: int,
    world: World,
) -> tuple[Scorer, ScoringFacts]:
    """The scorer, and the facts that its scores depend on.

    It is the same on every rank without communication: each one encodes the whole sample itself.

    Args:
        spec: The model: a checkpoint, a run, or what else `load_for_evaluation` takes.
        manifest: The dataset.
        caption: Where captions are.
        normalizers: "network", "sample", or "auto": the network where the checkpoint has one.
        reference: Pairs of the sample.
        batch_size: Pairs that are encoded at a time.
        workers: Decoding threads.
        world: The ranks.

    Raises:
        UserError: There is no model, it has no temperature, or no network where that was chosen.
    """
    # Chosen once, on one rank: a run that is still training may write another checkpoint while models are loaded.
    spec = world.gather_objects(str(model_folder_in(Path(spec)) or spec))[0]
    model = load_for_evaluation(spec, device=world.device)
    pairs = PairReader(
        manifest,
        caption,
        whole(model.preprocess, model.architecture.background),
        batch_size=batch_size,
        workers=workers,
    )
    facts = partial(ScoringFacts, model.digest, manifest.digest, str(caption))
    network = None if normalizers == "sample" else load_network(spec, device=world.device)
    if network is not None:
        return Scorer(model, pairs, network, network.tau), facts("network", 0, network.tau)
    if normalizers == "network":
        raise UserError(f"{spec} is not a checkpoint of a run with NeuCLIP's prototypes: use --normalizers sample.")
    tau = temperature_of(model, spec)
    image, text, ids = reference_pairs(model, pairs, count=reference)
    sampled = SampledNormalizers(image, text, ids, tau=tau)
    return Scorer(model, pairs, sampled, tau), facts("sample", reference, tau)


def load_network(spec: str, *, device: torch.device) -> NetworkNormalizers | None:
    """The network of the checkpoint at `spec`, a folder of one step or a run; None where there is none.

    Raises:
        UserError: The checkpoint is damaged.
    """
    folder = model_folder_in(Path(spec))
    if folder is None or not (folder / META_NAME).is_file():
        return None
    try:
        checkpoint = open_checkpoint(folder)
    except UserError as error:
        raise UserError(f"{folder} is damaged: {error}") from error
    run, state = run_of(checkpoint), checkpoint.objective()
    if "npn.weight" not in state:
        return None
    objective = build_objective(
        run.objective,
        dim=state["npn.weight"].shape[-1],
        batch_size=run.batch_size,
        dataset_size=max(run.samples, 2),  # which the prediction does not depend on
        total_steps=run.total_steps,
        world=World(),  # each rank predicts for its own pairs
        device=device,
    )
    objective.load_state_dict(state)
    return NetworkNormalizers(objective) if isinstance(objective, NeuClip) else None


def temperature_of(model: EvaluationModel, spec: str) -> float:
    """The temperature that is stored with a model's weights.

    Raises:
        UserError: There is none.
    """
    if model.towers.logit is None:
        raise UserError(f"{spec} has no logit scale, and so no temperature.")
    return math.exp(-model.towers.logit[0])

"""Joint selection of examples (JEST; Evans et al. 2024, arXiv 2406.17711): the pairs of a larger batch to train on.

The learnability of a batch is the learner's loss minus a reference model's. The selected pairs are drawn in chunks, as
in block Gibbs sampling: the first one by the learnability of each pair alone, every later one by what a pair would add
to the learnability of those selected so far. Pairs that are hard for each other are thus found together.

Shape legend: S pairs of the super-batch, C pairs selected so far, d feature dimension.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from pipeline.config import section
from pipeline.errors import UserError
from pipeline.objectives.pairwise import row_blocks


@section
class SelectionConfig:
    """Joint selection of examples (JEST): each step reads more pairs than it trains on, and trains on those of the
    highest learnability, the learner's loss minus that of a reference model. `batch_size` and `samples` count the pairs
    that are trained on; epochs count those that are read."""

    ratio: float | None = Field(default=None, gt=0, lt=1)
    """Share of the pairs read that is not trained on: at 0.8, five times `batch_size` is read. None: train on all."""
    features: str | None = None
    """Folder of `neuclip features`: the reference's features of `data.sources`."""
    chunks: int = Field(default=16, ge=1)
    """Parts in which the pairs of a batch are selected, each by its learnability together with those before."""
    image_size: int | None = Field(default=None, ge=8)
    """Side in pixels of the images by which the learner is scored, with its position embeddings interpolated; for
    open_clip's own ViTs. None: as in training."""

    def read_batch(self, batch_size: int) -> int:
        """Pairs that are read to train on `batch_size`, rounded to a whole number."""
        return batch_size if self.ratio is None else max(round(batch_size / (1 - self.ratio)), batch_size + 1)

    def check(self, batch_size: int, *, streams: int) -> None:
        """Check what a step reads to train on `batch_size` pairs; `streams` is `data.streams`.

        Raises:
            UserError: It is no whole number, or the streams do not divide it; with a ratio that would fit.
        """
        if self.ratio is None:
            return
        exact, size = batch_size / (1 - self.ratio), self.read_batch(batch_size)
        if abs(exact - size) > 0.01 or size % streams:
            fitting = streams * max(round(exact / streams), batch_size // streams + 1)
            rounded = (float(f"{1 - batch_size / fitting:.{digits}g}") for digits in range(1, 18))
            ratio = next(ratio for ratio in rounded if ratio < 1 and abs(batch_size / (1 - ratio) - fitting) <= 0.01)
            raise UserError(
                f"selection.ratio = {self.ratio} with batch_size = {batch_size} would read {exact:.7g} pairs in a "
                f"step: it must be a whole number that data.streams = {streams} divides. Use "
                f"selection.ratio={ratio}, which reads {fitting}."
            )


@dataclass(frozen=True)
class View:
    """A model's unit-norm features of the super-batch, [S, d] each, and how it turns similarities into logits."""

    image: Tensor
    text: Tensor
    tau: float
    bias: float | None = None
    """Of the pairwise sigmoid loss; None: the softmax loss."""

    def positive(self) -> Tensor:
        """The logit of each pair, [S]."""
        return (self.image * self.text).sum(1) / self.tau + (self.bias or 0.0)

    @property
    def sides(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Each side's features as anchors, and the other side's."""
        return (self.image, self.text), (self.text, self.image)


def pair_losses(view: View) -> Tensor:
    """The loss of each pair, [S]: its cross-entropy within the super-batch, mean of both sides; with the sigmoid, that
    of its own logit."""
    positive = view.positive()
    if view.bias is not None:
        return F.softplus(-positive)
    loss = -positive
    for own, other in view.sides:
        for rows in row_blocks(len(own), len(other), device=own.device):
            loss[rows] += (own[rows] @ other.T / view.tau).logsumexp(1) / 2
    return loss


def added_losses(view: View, chosen: Tensor) -> Tensor:
    """What each pair would add, [S], to the summed loss of the chosen rows, [C]; of these themselves it means nothing.

    It is the pair's own loss among them, and what it adds to theirs as a negative.
    """
    positive = view.positive()
    added = F.softplus(-positive) if view.bias is not None else torch.zeros_like(positive)
    totals = [(own[chosen] @ other[chosen].T / view.tau).logsumexp(1) for own, other in view.sides]
    for side, (own, other) in enumerate(view.sides):
        for rows in row_blocks(len(own), len(chosen), device=own.device):
            z = own[rows] @ other[chosen].T / view.tau
            if view.bias is not None:
                added[rows] += F.softplus(z + view.bias).sum(1)
                continue
            pull = positive[rows]
            added[rows] += (torch.logaddexp(z.logsumexp(1), pull) - pull + F.softplus(z - totals[1 - side]).sum(1)) / 2
    return added


def select(learner: View, reference: View, *, count: int, chunks: int, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Draw the pairs to train on.

    Args:
        learner: The model that is trained.
        reference: The model that shows which losses can be lowered.
        count: Pairs to select, at most S.
        chunks: In which they are selected; at most `count` matter.
        noise: Gumbel noise [chunks, S], which makes the largest sums draws without replacement.

    Returns:
        The rows in ascending order, [count], and the learnability of each pair alone, [S].
    """
    alone = pair_losses(learner) - pair_losses(reference)
    ends = sorted({count * (number + 1) // chunks for number in range(chunks)})
    chosen, scores = noise.new_empty(0, dtype=torch.int64), alone
    for draw, (first, end) in zip(noise, itertools.pairwise((0, *(e for e in ends if e))), strict=False):
        if first:
            scores = added_losses(learner, chosen) - added_losses(reference, chosen)
        keys = (scores + draw.to(scores.dtype)).index_fill(0, chosen, -torch.inf)
        chosen = torch.cat([chosen, keys.topk(end - first).indices])
    return chosen.sort().values, alone


def gumbel_noise(chunks: int, size: int, *, seed: int, step: int) -> Tensor:
    """Gumbel noise [chunks, size] on the CPU, a function of the arguments."""
    name = hashlib.blake2b(f"selection {seed} {step}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(name, "big"))
    return -torch.empty(chunks, size).exponential_(generator=generator).log()

"""What the studies of small towers share: synthetic pairs, towers, training steps, exact normalizers, and retrieval.

The pairs are hierarchical, long-tailed and noisy, so that methods differ. A latent vector is the sum of a super-class,
a sub-class within it and an individual part. Sub-classes are drawn with Zipf frequencies. Each side sees its own noisy
nonlinear view of the latent vector, so that pairs of the same sub-class overlap irreducibly: retrieval cannot become
perfect, and normalizers differ between anchors.

Shape legend: n pairs, D input features of a side, L latent dimensions, d embedding dimensions, B pairs in a batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.objectives import Objective, build_objective

WORLD_SEED = 1234
"""Seed of the class centres and views: the same for training and held-out pairs, and for all runs."""
INPUTS, LATENT = 64, 32
"""D and L."""
SUPER_CLASSES, SUB_CLASSES = 32, 16
"""Super-classes, and sub-classes in each of them."""
ZIPF, NOISE = 1.0, 0.15
"""Exponent of the frequencies of all sub-classes; standard deviation of the noise on inputs of unit variance."""
OF_SUPER, OF_SUB, OF_INDIVIDUAL = 1.0, 0.8, 0.5
"""Lengths of the three parts of a latent vector."""
NCE_TEMPERATURES = tuple(0.02 * 1.2**i for i in range(18))


def draw_pairs(n: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Draw n pairs of inputs for the image and text towers, [n, D] each; depends only on n and the seed."""
    world, generator = torch.Generator().manual_seed(WORLD_SEED), torch.Generator().manual_seed(seed)
    supers = F.normalize(torch.randn(SUPER_CLASSES, LATENT, generator=world), dim=1)
    subs = F.normalize(torch.randn(SUPER_CLASSES, SUB_CLASSES, LATENT, generator=world), dim=2)
    mixing = [torch.randn(LATENT, 2 * LATENT, generator=world) for _ in range(2)]
    views = [torch.randn(2 * LATENT, INPUTS, generator=world) / math.sqrt(LATENT) for _ in range(2)]
    count = SUPER_CLASSES * SUB_CLASSES
    frequency = (torch.arange(count) + 1.0) ** -ZIPF
    ranks = torch.multinomial(frequency / frequency.sum(), n, replacement=True, generator=generator)
    classes = torch.randperm(count, generator=world)[ranks]
    individual = F.normalize(torch.randn(n, LATENT, generator=generator), dim=1)
    of_super, of_sub = classes // SUB_CLASSES, classes % SUB_CLASSES
    latent = OF_SUPER * supers[of_super] + OF_SUB * subs[of_super, of_sub] + OF_INDIVIDUAL * individual
    sides = []
    for mix, view in zip(mixing, views, strict=True):
        clean = torch.tanh(latent @ mix) @ view
        sides.append(clean / clean.std() + NOISE * torch.randn(n, INPUTS, generator=generator))
    return sides[0], sides[1]


class Tower(nn.Module):
    """D -> hidden -> d with GELU, unit-norm output."""

    def __init__(self, inputs: int, *, hidden: int, dim: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(inputs, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[b, D] inputs -> [b, d] unit-norm features."""
        return F.normalize(self.last(F.gelu(self.first(x))), dim=1)


def make_towers(inputs: Mapping[str, int], *, hidden: int, dim: int, seed: int) -> nn.ModuleDict:
    """A tower per side, with as many inputs, initialized from `seed` only; the global random state is not changed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.ModuleDict({side: Tower(size, hidden=hidden, dim=dim) for side, size in inputs.items()})


def orders(pairs: int, batch: int, *, seed: int) -> Iterator[Tensor]:
    """Sample ids of the batches, [B] each, without end; every epoch is a new permutation."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(pairs, generator=generator)[: pairs // batch * batch].split(batch)


def lr_scale(step: int, steps: int) -> float:
    """Learning rate as a fraction of the peak: linear warm-up in 5% of the steps, then cosine decay to 0."""
    return min(1.0, (step + 1) / max(1.0, 0.05 * steps)) * 0.5 * (1 + math.cos(math.pi * step / steps))


@dataclass(frozen=True)
class CourseStep:
    """A step's number, sample ids, features of both sides with a graph, and learning rate as a fraction of the peak."""

    number: int
    ids: Tensor
    image: Tensor
    text: Tensor
    scale: float


@dataclass
class Course:
    """The parts of a run that do not depend on the method."""

    pairs: tuple[Tensor, Tensor]
    """Inputs of both sides, [n, D] each."""
    towers: nn.ModuleDict
    """See `make_towers`."""
    optimizer: torch.optim.Optimizer
    """Of the towers; the `lr` that it was made with is the peak."""
    batches: Iterator[Tensor]
    """Sample ids of the batches."""
    steps: int
    """Length of the run."""

    def embed(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        """Features of both sides, [b, d] each."""
        return self.towers["image"](image), self.towers["text"](text)

    def walk(self) -> Iterator[CourseStep]:
        """The steps of the run; `descend` must be called in each."""
        for number in range(self.steps):
            ids = next(self.batches)
            features = self.embed(self.pairs[0][ids], self.pairs[1][ids])
            yield CourseStep(number, ids, *features, lr_scale(number, self.steps))

    def descend(self, loss: Tensor, *, scale: float) -> None:
        """One step of the optimizer on `loss`."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.optimizer.defaults["lr"] * scale
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    @torch.no_grad()
    def exact(self, rows: Tensor, *, tau: float) -> tuple[Tensor, Tensor]:
        """log g of the anchors `rows` over all training pairs under the current towers, [len(rows)] each."""
        return exact_log_normalizers(*self.embed(*self.pairs), tau=tau, rows=rows)


@torch.no_grad()
def exact_log_normalizers(
    image_nd: Tensor, text_nd: Tensor, *, tau: float, rows: Tensor, block: int = 1024
) -> tuple[Tensor, Tensor]:
    """log g1_i and log g2_i of the anchors `rows` over all n pairs, [len(rows)] each, in blocks of rows.

    g1_i = mean over j != i of exp((s_ij - s_ii) / tau).
    """
    n, positive = len(image_nd), (image_nd[rows] * text_nd[rows]).sum(1)
    found = []
    for anchors, others in ((image_nd, text_nd), (text_nd, image_nd)):
        parts = []
        for at in rows.split(block):
            logits = anchors[at] @ others.T / tau
            logits[torch.arange(len(at)), at] = -math.inf
            parts.append(logits.logsumexp(1))
        found.append(torch.cat(parts) - positive / tau - math.log(n - 1))
    return found[0], found[1]


def make_objective(config: Mapping[str, Any], setting: Any, *, seed: int) -> Objective:
    """The objective of `config` for a setting with `dim`, `batch`, `pairs` and `steps`."""
    return build_objective(
        {"drift_check_every": 0, **config},
        dim=setting.dim,
        batch_size=setting.batch,
        dataset_size=setting.pairs,
        total_steps=setting.steps,
        seed=seed,
    )


def oracle_loss(image: Tensor, text: Tensor, *, tau: float, exact: tuple[Tensor, Tensor]) -> Tensor:
    """The oracle's loss: tau mean_i (g1_i / exp(a1_i) + g2_i / exp(a2_i)), a exact and held constant."""
    similarity, size = image @ text.T, len(image)
    positive, own = similarity.diagonal()[:, None], torch.eye(size, dtype=torch.bool)
    loss = similarity.new_zeros(())
    for logits, normalizer in zip((similarity, similarity.T), exact, strict=True):
        exponents = ((logits - positive) / tau - normalizer[:, None]).masked_fill(own, -math.inf)
        loss = loss + tau * exponents.exp().sum(1).mean() / (size - 1)
    return loss


def squared_error(found: Iterable[Tensor], exact: Iterable[Tensor]) -> float:
    """The mean squared error of log-normalizers, averaged over both sides."""
    return float(torch.stack([(a - b).square().mean() for a, b in zip(found, exact, strict=True)]).mean())


def retrieval(similarity: Tensor) -> dict[str, float]:
    """NCE at its best temperature, MRR and R@1 of a square similarity matrix, averaged over both directions."""
    positive = similarity.diagonal()
    ranks = [(side > positive[:, None]).sum(1) + 1 for side in (similarity, similarity.T)]
    reciprocal, first = (
        torch.stack([of_rank(r).mean() for r in ranks]).mean()
        for of_rank in (lambda r: 1 / r.double(), lambda r: (r == 1).double())
    )
    nce = [_cross_entropy(similarity / tau) for tau in NCE_TEMPERATURES]
    return {"nce": min(nce), "mrr": 100 * float(reciprocal), "recall_at_1": 100 * float(first)}


def _cross_entropy(logits: Tensor) -> float:
    positive = logits.diagonal()
    return float((logits.logsumexp(1) + logits.logsumexp(0) - 2 * positive).mean() / 2)

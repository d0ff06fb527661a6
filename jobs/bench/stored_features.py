"""What stored features of a model are worth, on synthetic pairs: as a teacher, and for choosing pairs.

    python -m jobs.bench.stored_features                 # 4 seeds; clean pairs, and 30% of them with a wrong text

Pairs and towers are those of `neuclip study separation`, the loss is openclip's. Score: recall at 1 on clean held-out
pairs, mean of both directions; differences from `plain` are paired by seed. Cost: forward passes of the towers, a
backward pass counted as two, relative to `plain`. The stored features are computed once for all runs; neither they nor
the training of the model that makes them is counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from jobs.bench.harness import Value, parser, show
from jobs.studies.outcomes import Spread
from jobs.studies.separation import HELD_OUT_PAIRS, SeparationSetting, course_of
from jobs.studies.small_towers import (
    Course,
    Hierarchy,
    draw_pairs,
    exact_log_normalizers,
    make_objective,
    orders,
    retrieval,
)
from pipeline.objectives.distill import Teacher
from pipeline.objectives.selection import View, gumbel_noise, select
from pipeline.objectives.softmax import SoftmaxObjective
from pipeline.objectives.temperature import LearnedTemperature

SETTING = SeparationSetting(pairs=2048, batch=128, epochs=4, held_out=2048)
STRONG = replace(SETTING, hidden=512, epochs=8)
CHUNKS = 8
WRONG_SEED, OTHER_SEED = 70_000, 50


def noisy_course(setting: SeparationSetting, *, seed: int, wrong: float, weights: int | None = None) -> Course:
    """A course in which a share of the training pairs has the text of another pair.

    Args:
        setting: Of the course.
        seed: Of pairs and order.
        wrong: The share.
        weights: The seed of the initial weights, if another.
    """
    course = course_of(setting, seed=seed)
    if weights is not None:
        course.towers.load_state_dict(course_of(setting, seed=weights).towers.state_dict())
    rows = torch.randperm(setting.pairs, generator=torch.Generator().manual_seed(WRONG_SEED + seed))
    rows = rows[: round(wrong * setting.pairs)]
    text = course.pairs[1].clone()
    text[rows] = text[rows.roll(1)]
    course.pairs = course.pairs[0], text
    return course


def train(
    course: Course,
    setting: SeparationSetting,
    *,
    seed: int,
    stored: View | None = None,
    selects: bool = False,
    distill: float = 0.0,
) -> View:
    """Train with the softmax loss; returns the features that the model has of its training pairs.

    Args:
        course: What is trained.
        setting: Of the course.
        seed: Of the objective and of the selection's noise.
        stored: Features of all training pairs.
        selects: Every batch is the more learnable half of two.
        distill: Weight of the distillation loss.
    """
    objective = make_objective({"name": "openclip", "distill": distill}, setting, seed=seed)
    assert isinstance(objective, SoftmaxObjective)
    temperature = objective.temperature
    assert isinstance(temperature, LearnedTemperature)
    if selects and stored is not None:
        plain = course.batches
        course.batches = selected(course, plain, stored, temperature.value, count=setting.batch, seed=seed)
    for step in course.walk():
        teacher = Teacher(stored.image[step.ids], stored.text[step.ids], stored.tau) if distill and stored else None
        course.descend(objective.loss(step.image, step.text, sample_ids=step.ids, teacher=teacher), scale=step.scale)
        objective.commit(lr_scale=step.scale)
    with torch.no_grad():
        return View(*course.embed(*course.pairs), temperature.value().item())


def selected(
    course: Course, plain: Iterator[Tensor], stored: View, tau: Callable[[], Tensor], *, count: int, seed: int
) -> Iterator[Tensor]:
    """Of every two batches of `plain` the more learnable pairs, as `pipeline.objectives.selection` does it."""
    for step in itertools.count():
        ids = torch.cat([next(plain), next(plain)])
        with torch.no_grad():
            learner = View(*course.embed(course.pairs[0][ids], course.pairs[1][ids]), tau().item())
        reference = View(stored.image[ids], stored.text[ids], stored.tau)
        noise = gumbel_noise(CHUNKS, len(ids), seed=seed, step=step)
        yield ids[select(learner, reference, count=count, chunks=CHUNKS, noise=noise)[0]]


def better_half(stored: View) -> Tensor:
    """Rows of the pairs that score above the median: similarity over temperature, minus both log-normalizers."""
    rows = torch.arange(len(stored.image))
    of_image, of_text = exact_log_normalizers(stored.image, stored.text, tau=stored.tau, rows=rows)
    return (of_image + of_text).argsort()[: len(rows) // 2]


def batches_of(rows: Tensor, setting: SeparationSetting, *, steps: int, seed: int) -> Iterator[Tensor]:
    """The first steps on the pairs `rows` only, the rest on all pairs."""
    for ids in itertools.islice(orders(len(rows), setting.batch, seed=seed), steps):
        yield rows[ids]
    yield from orders(setting.pairs, setting.batch, seed=seed)


@torch.no_grad()
def score_of(course: Course, setting: SeparationSetting, *, seed: int) -> float:
    """Recall at 1 on held-out pairs, mean of both directions, in percent."""
    image, text = course.embed(*draw_pairs(Hierarchy(), setting.held_out, seed=HELD_OUT_PAIRS + seed))
    return retrieval(image @ text.T)["recall_at_1"]


def one_seed(seed: int, *, wrong: float) -> dict[str, tuple[float, float]]:
    """Score and cost of every arm."""
    own, strong = (noisy_course(s, seed=seed, wrong=wrong, weights=OTHER_SEED + seed) for s in (SETTING, STRONG))
    stored = {"own": train(own, SETTING, seed=seed), "strong": train(strong, STRONG, seed=seed)}
    untrained = noisy_course(SETTING, seed=seed, wrong=wrong, weights=OTHER_SEED + seed)
    with torch.no_grad():
        stored["untrained"] = View(*untrained.embed(*untrained.pairs), SETTING.tau)
    found = {}

    def arm(name: str, cost: float = 1.0, *, longer: float = 1.0, half: float = 0.0, **options: Any) -> None:
        setting = replace(SETTING, epochs=SETTING.epochs * longer)
        course = noisy_course(setting, seed=seed, wrong=wrong)
        if half:
            rows = better_half(stored["own"])
            course.batches = batches_of(rows, setting, steps=round(half * setting.steps), seed=seed)
        train(course, setting, seed=seed, **options)
        found[name] = score_of(course, setting, seed=seed), cost * longer

    arm("plain")
    arm("plain, 5/3 of the steps", longer=5 / 3)
    arm("plain, twice the steps", longer=2.0)
    for name in ("strong", "own", "untrained"):
        arm(f"selection, reference {name}", 5 / 3, stored=stored[name], selects=True)
    for name in ("strong", "own", "untrained"):
        arm(f"distillation, teacher {name}", stored=stored[name], distill=1.0)
    arm("selection and distillation, strong", 5 / 3, stored=stored["strong"], selects=True, distill=1.0)
    arm("better half", half=1.0)
    arm("better half, then all", half=0.5)
    found["(the strong model)"] = score_of(strong, STRONG, seed=seed), STRONG.epochs / SETTING.epochs
    return found


def main() -> None:
    given = parser(__doc__, rounds=4)
    arguments = given.parse_args()
    torch.set_num_threads(arguments.threads)
    for wrong in (0.0, 0.3):
        runs = [one_seed(seed, wrong=wrong) for seed in range(arguments.rounds)]
        rows: dict[str, tuple[Value, ...]] = {}
        for name, (_, cost) in runs[0].items():
            scores = [run[name][0] for run in runs]
            gain = Spread(tuple(run[name][0] - run["plain"][0] for run in runs))
            interval = f"{gain.mean:+.2f}" + (f" ± {gain.half_width:.2f}" if gain.half_width else "")
            rows[name] = fmean(scores), interval, cost
        show(
            f"{arguments.rounds} seeds, {wrong:.0%} of the texts wrong",
            {"R@1, %": ".1f", "against plain (95%)": "", "cost": ".2f"},
            rows,
            output=arguments.json,
        )


if __name__ == "__main__":
    main()

"""How well scores find wrong captions: the score of `neuclip score` compared with the cosine.

    python -m jobs.bench.curator RUN SHARDS                # 20% of the captions are exchanged among themselves

Prints the area under the ROC curve of "the caption is the pair's own", with 95% bootstrap intervals over pairs, and of
the difference. The model has usually seen the right captions in training: give a run on other data for a fair question.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from pipeline.analysis.pair_normalizers import SampledNormalizers
from pipeline.analysis.pair_scores import encode
from pipeline.analysis.scorer import make_scorer
from pipeline.analysis.shard_pairs import read_pairs
from pipeline.data.shards.caption_field import CaptionField
from pipeline.data.shards.manifest_format import load_manifest
from pipeline.distributed.world import World


def exchanged(count: int, *, share: float, seed: int) -> np.ndarray:
    """A permutation that moves `share` of the places, each to another one, and keeps the others."""
    generator = np.random.default_rng(seed)
    moved = generator.permutation(count)[: max(2, int(share * count))]
    places = np.arange(count)
    places[moved] = np.roll(moved, 1)
    return places


@dataclass(frozen=True)
class Area:
    """An area under the ROC curve, with 95% bootstrap intervals over pairs."""

    value: float
    interval: tuple[float, float]
    above_cosine: tuple[float, float]
    """Interval of the difference from the cosine's area."""

    def __str__(self) -> str:
        (low, high), (less, more) = self.interval, self.above_cosine
        return f"AUC {self.value:.4f} [{low:.4f}, {high:.4f}], above cosine by [{less:+.4f}, {more:+.4f}]"


def roc_areas(right: NDArray[np.bool_], values: Mapping[str, NDArray[Any]]) -> dict[str, Area]:
    """How well each of the values finds the right captions. `values` contains one by the name `cosine`."""
    drawn = np.random.default_rng(1).integers(0, len(right), (500, len(right)))
    found = {name: np.array([roc_auc_score(right[i], value[i]) for i in drawn]) for name, value in values.items()}

    def interval(areas: NDArray[Any]) -> tuple[float, float]:
        low, high = np.quantile(areas, (0.025, 0.975))
        return float(low), float(high)

    return {
        name: Area(float(roc_auc_score(right, value)), interval(found[name]), interval(found[name] - found["cosine"]))
        for name, value in values.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("shards")
    parser.add_argument("--share", type=float, default=0.2, help="captions that are exchanged")
    parser.add_argument("--pairs", type=int, default=8192, help="pairs that are scored")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    manifest, caption = load_manifest(options.shards), CaptionField()
    common = {"caption": caption, "reference": 8192, "batch_size": 64, "workers": 0, "world": World()}
    scorer, facts = make_scorer(options.run, manifest, normalizers="auto", **common)  # type: ignore[arg-type]
    parts = []
    for batch in read_pairs(
        manifest,
        range(len(manifest.shards)),
        caption=caption,
        preprocess=scorer.model.preprocess,
        batch_size=64,
        workers=0,
    ):
        if batch.captions:
            parts.append(encode(scorer.model, batch))
        if sum(len(image) for image, _ in parts) >= options.pairs:
            break
    image, text = (torch.cat(side)[: options.pairs] for side in zip(*parts, strict=True))
    places = exchanged(len(image), share=options.share, seed=options.seed)
    right, text = places == np.arange(len(image)), text[torch.from_numpy(places)]
    cosine, ids = (image * text).sum(1), torch.arange(len(image))
    of_sample = SampledNormalizers(image, text, ids, tau=facts.tau)
    values = {"cosine": cosine.numpy()}
    for name, normalizers in ((facts.normalizers, scorer.normalizers), ("these pairs", of_sample)):
        first, second = normalizers(image, text, ids)
        values[f"score, normalizers of {name}"] = (cosine / facts.tau - (first + second) / 2).numpy()
    print(f"{len(right):,} pairs, {int((~right).sum()):,} with another's caption; tau = {facts.tau:.4f}")
    for name, area in roc_areas(right, values).items():
        print(f"{name:<34} {area}")


if __name__ == "__main__":
    main()

"""Training on the better half of noisy pairs, by `neuclip score`, against training on all of them.

    python -m jobs.bench.curation SHARDS SUITE FOLDER                          # 3 seeds of the recipe desk
    python -m jobs.bench.curation SHARDS SUITE FOLDER --seeds 1 samples=6400   # SECTION.KEY=VALUE changes every run

A fifth of the captions are exchanged among themselves. Per seed, one run (neuclip) trains on all pairs and scores
them; then others train from scratch on the half with the best scores, on that with the best cosines, and on a random
half, all for the same number of samples. Prints the share of right captions in each half, the area under the ROC curve
of all three criteria with 95% intervals over pairs, the scores of the runs on SUITE, and their differences paired by
seed. Run again, it continues.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.dataset import canonical_tar
from jobs.bench.curator import exchanged, roc_areas
from jobs.studies.outcomes import average, retrieval
from jobs.studies.unit import curve_of
from pipeline.data.shards.manifest_format import MANIFEST_NAME, Manifest, load_manifest, make_manifest
from pipeline.report.run_data import read_run

CRITERIA = ("score", "cosine")
CHANCE = "chance"
"""A half chosen at random, to separate the choice of pairs from repeating fewer pairs more often."""
Place = tuple[str, int]
"""A sample: its shard's name and its row."""


def rewrite(source: Manifest, target: Path, *, captions: Mapping[Place, bytes], kept: Collection[Place]) -> None:
    """Copy the kept samples of a dataset to `target` with these captions."""
    entries = []
    for shard in source.shards:
        samples = enumerate(canonical_tar.samples(source.url(shard)))
        chosen = [(key, parts, row) for row, (key, parts) in samples if (shard.name, row) in kept]

        def members(name: str = shard.name, chosen: list = chosen) -> Iterator[tuple[str, bytes]]:
            for key, parts, row in chosen:
                changed = {**parts, "txt": captions[name, row]}
                yield from ((f"{key}.{suffix}", changed[suffix]) for suffix in sorted(changed))

        path = target / shard.name
        path.parent.mkdir(parents=True, exist_ok=True)
        if chosen:
            entries.append((shard.name, len(chosen), *canonical_tar.write(path, members())))
    make_manifest(entries, root=target).save(target)


def all_captions(source: Manifest) -> dict[Place, bytes]:
    """The caption of every sample."""
    return {
        (shard.name, row): parts["txt"]
        for shard in source.shards
        for row, (_, parts) in enumerate(canonical_tar.samples(source.url(shard)))
    }


def run(*words: str) -> None:
    """Run a neuclip command, with its output on this program's error stream."""
    subprocess.run([sys.executable, "-m", "jobs.cli", *words], check=True, stdout=sys.stderr)


def train(output: Path, data: Path, suite: str, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Train on `data`, or continue. Returns the last scores on the suite, in percent."""
    settings = [f"data.sources={data}", f"output={output}", f"seed={seed}", f"evaluation.suite={suite}"]
    fixed = ["evaluation.every=100000000", "checkpoint.every=100000000", "checkpoint.keep_every=100000000"]
    chosen = [*settings, *fixed, *options.overrides]
    run("train", "--recipe", options.recipe, *chosen, *(["--resume", "latest"] if output.exists() else []))
    scores = curve_of(read_run(output), suite=suite)[-1]["scores"]
    return {"average": 100 * (average(scores) or 0.0), "retrieval": 100 * (retrieval(scores) or 0.0)}


def scored(folder: Path, data: Path, trained: Path, right: Mapping[Place, bool]) -> dict[str, Any]:
    """Score the noisy pairs with the run that was trained on them.

    Returns:
        For each criterion its better half, the share of right captions in it, and the area under the ROC curve.
    """
    import pyarrow.parquet as pq

    run("score", str(trained), "--data", str(data), "--output", str(folder / "scores"))
    table = pq.read_table(folder / "scores" / "scores.parquet", columns=["shard", "row", *CRITERIA]).to_pydict()
    places = list(zip(table["shard"], table["row"], strict=True))
    truth = np.array([right[place] for place in places])
    values = {criterion: np.array(table[criterion], dtype=float) for criterion in CRITERIA}
    values[CHANCE] = np.random.default_rng(0).random(len(truth))
    areas = roc_areas(truth, values)
    found: dict[str, Any] = {}
    for criterion, value in values.items():
        best = np.argsort(-value, kind="stable")[: len(truth) // 2]
        half = {places[index] for index in best}
        found[criterion] = {"half": half, "area": areas[criterion], "right": truth[best].mean()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards")
    parser.add_argument("suite")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipe", default="desk")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.2, help="captions that are exchanged")
    parser.add_argument("overrides", nargs="*", metavar="SECTION.KEY=VALUE")
    options = parser.parse_intermixed_args()
    source, noisy = load_manifest(options.shards), options.folder / "noisy"
    own = all_captions(source)
    places = list(own)
    order = exchanged(len(places), share=options.share, seed=0)
    captions = {place: own[places[index]] for place, index in zip(places, order, strict=True)}
    right = {place: own[place] == captions[place] for place in places}
    if not (noisy / MANIFEST_NAME).exists():
        rewrite(source, noisy, captions=captions, kept=right.keys())
    results = []
    for seed in range(options.seeds):
        folder = options.folder / f"seed{seed}"
        scores = {"all": train(folder / "all", noisy, options.suite, seed, options)}
        halves = scored(folder, noisy, folder / "all", right)
        for criterion, found in halves.items():
            data = folder / f"better-{criterion}"
            if not (data / MANIFEST_NAME).exists():
                rewrite(source, data, captions=captions, kept=found.pop("half"))
            scores[criterion] = train(folder / f"run-{criterion}", data, options.suite, seed, options)
            print(f"seed {seed}, {criterion}: {found['area']}; right in its half: {found['right']:.1%}")
        results.append(scores)
        print(f"seed {seed}: {json.dumps(scores)}", flush=True)
    for measure in ("average", "retrieval"):
        for criterion in (*CRITERIA, CHANCE):
            gains = [scores[criterion][measure] - scores["all"][measure] for scores in results]
            spread = f" ± {statistics.stdev(gains):.1f}" if len(gains) > 1 else ""
            print(f"{measure}, half by {criterion} against all: {statistics.fmean(gains):+.1f}{spread} points")


if __name__ == "__main__":
    main()

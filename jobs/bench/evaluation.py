"""Four checkpoints in one evaluation against four evaluations of one, on the same task, interleaved.

    python -m jobs.bench.evaluation --images 512 --arch scenes-vit-tiny --arch ViT-S-32-alt

One process with one thread, charged with the CPU time that it takes: other users of the machine hardly matter. A cheap
architecture shows what a fast device sees, where decoding is what takes time; an expensive one what a CPU sees.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from jobs.bench.loader import photo
from pipeline.evaluation import evaluate
from pipeline.evaluation.runner.session import EvaluationConfig
from pipeline.model.evaluation_model import EvaluationModel, for_evaluation
from pipeline.model.towers import ModelConfig, build_towers

CLASSES, TEMPLATES = 20, 8


def make_task(root: Path, *, images: int, shorter: int) -> Path:
    """A zero-shot task of photos in the benchmark's layout."""
    rng, folder = np.random.default_rng(0), root / "wds_bench_test"
    (folder / "test").mkdir(parents=True)
    with tarfile.open(folder / "test" / "0.tar", "w") as tar:
        for number in range(images):
            out = io.BytesIO()
            photo(rng, shorter=shorter).save(out, "JPEG", quality=90)
            for suffix, body in (("cls", str(number % CLASSES).encode()), ("jpg", out.getvalue())):
                info = tarfile.TarInfo(f"s{number:07d}.{suffix}")
                info.size = len(body)
                tar.addfile(info, io.BytesIO(body))
    (folder / "test" / "nshards.txt").write_text("1\n")
    (folder / "classnames.txt").write_text("\n".join(f"thing {k}" for k in range(CLASSES)) + "\n")
    templates = "\n".join(f"a photo of a {{c}}, view {k}" for k in range(TEMPLATES))
    (folder / "zeroshot_classification_templates.txt").write_text(templates + "\n")
    return root


def make_models(arch: str, count: int) -> list[EvaluationModel]:
    """Models of one architecture with different weights; speed does not depend on what they have learned."""
    models = []
    for seed in range(count):
        towers, architecture = build_towers(ModelConfig(arch=arch), seed=seed)
        models.append(for_evaluation(towers, architecture, source=f"{arch}-{seed}"))
    return models


def seconds(run: Callable[[], object]) -> float:
    """CPU time of this process."""
    start = time.process_time()
    run()
    return time.process_time() - start


def compare(arch: str, suite: Path, *, images: int, checkpoints: int, rounds: int) -> str:
    """One line: what `checkpoints` cost together, relative to one and to all of them one by one."""
    models = make_models(arch, checkpoints)
    config = EvaluationConfig(workers=0, threads=1, recompute=True)

    def run(chosen: Sequence[EvaluationModel]) -> None:
        with tempfile.TemporaryDirectory() as output:  # no classifier of an earlier round is found
            found = evaluate(list(chosen), suite=suite, output=output, config=dataclasses.replace(config))
        assert all(not evaluation.failures and not evaluation.reused for evaluation in found)

    run(models[:1])  # file caches and allocators
    together, apart = [], []
    for _ in range(rounds):
        together.append(seconds(lambda: run(models)))
        apart.append([seconds(lambda model=model: run([model])) for model in models])  # type: ignore[misc]
    to_one = [t / statistics.mean(a) for t, a in zip(together, apart, strict=True)]
    to_all = [t / sum(a) for t, a in zip(together, apart, strict=True)]
    speed = images / statistics.mean(statistics.mean(a) for a in apart)
    rounds_seen = f"(rounds {min(to_one):.2f} to {max(to_one):.2f})"
    return (
        f"{arch}: one checkpoint {speed:.0f} images/s; {checkpoints} together cost {statistics.median(to_one):.2f} x "
        f"one {rounds_seen}, {statistics.median(to_all):.2f} x {checkpoints} one by one"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", action="append", help="architectures, by open_clip name")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--shorter", type=int, default=384, help="shorter side of the stored images, in pixels")
    parser.add_argument("--checkpoints", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, one thread, {options.images} images")
    with tempfile.TemporaryDirectory() as name:
        suite = make_task(Path(name), images=options.images, shorter=options.shorter)
        for arch in options.arch or ["scenes-vit-tiny", "ViT-S-32-alt"]:
            settings = {"images": options.images, "checkpoints": options.checkpoints, "rounds": options.rounds}
            print(compare(arch, suite, **settings), flush=True)


if __name__ == "__main__":
    main()

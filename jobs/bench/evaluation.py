"""Cost of evaluating four checkpoints together, with the image cache or in bf16, relative to one in fp32.

    python -m jobs.bench.evaluation --images 512 --arch scenes-vit-tiny --arch ViT-S-32-alt

All variants alternate on the same task in one process with one thread. CPU time is measured, which other load on the
machine hardly changes. With a cheap architecture decoding dominates, as on a fast device; with an expensive one the
towers dominate, as on a CPU.
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
from pipeline.errors import UserError
from pipeline.evaluation import evaluate
from pipeline.evaluation.runner.compute import check_bf16
from pipeline.evaluation.runner.session import EvaluationConfig
from pipeline.model.evaluation_model import EvaluationModel, for_evaluation
from pipeline.model.towers import ModelConfig, build_towers

CLASSES, TEMPLATES = 20, 8
BASE = EvaluationConfig(workers=0, threads=1, recompute=True)


def make_task(root: Path, *, images: int, shorter: int) -> Path:
    """Write a zero-shot classification task of photos in the benchmark's layout."""
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
    """Models of one architecture with different random weights; speed does not depend on training."""
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
    """One line per variant with its cost relative to one fp32 checkpoint without a cache."""
    models = make_models(arch, checkpoints)
    with tempfile.TemporaryDirectory() as cache:
        variants: dict[str, tuple[Sequence[EvaluationModel], EvaluationConfig]] = {
            "one": (models[:1], BASE),
            f"{checkpoints} together": (models, BASE),
            "one, cache filled": (models[:1], dataclasses.replace(BASE, cache=cache)),
            f"{checkpoints} together, cache filled": (models, dataclasses.replace(BASE, cache=cache)),
        }
        if has_bf16():
            bf16 = dataclasses.replace(BASE, precision="bf16")
            variants |= {"one, bf16": (models[:1], bf16), f"{checkpoints} together, bf16": (models, bf16)}
        for name in variants:  # warm up the image cache, the page cache and the allocators
            evaluate_once(suite, *variants[name])
        times: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(rounds):
            for name, variant in variants.items():
                times[name].append(seconds(lambda variant=variant: evaluate_once(suite, *variant)))  # type: ignore[misc]
    lines = [f"{arch}: one checkpoint, {images / statistics.median(times['one']):.0f} images/s"]
    for name in list(variants)[1:]:
        ratios = [mine / one for mine, one in zip(times[name], times["one"], strict=True)]
        lines.append(f"  {name}: {statistics.median(ratios):.2f} x one ({min(ratios):.2f} to {max(ratios):.2f})")
    return "\n".join(lines)


def evaluate_once(suite: Path, models: Sequence[EvaluationModel], config: EvaluationConfig) -> None:
    """Evaluate once into a new folder, so that no classifier of an earlier round is reused."""
    with tempfile.TemporaryDirectory() as output:
        found = evaluate(list(models), suite=suite, output=output, config=config)
    assert all(not evaluation.failures and not evaluation.reused for evaluation in found)


def has_bf16() -> bool:
    try:
        check_bf16(torch.device("cpu"))
    except UserError:
        return False
    return True


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

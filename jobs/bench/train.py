"""Samples per second of our training step against open_clip_train's, eager and compiled, on the same batches.

    python -m jobs.bench.train --arch ViT-B-32 --batch 32 --threads 1                         on a CPU
    python -m jobs.bench.train --arch ViT-B-16 --batch 640                                    on a GPU
    python -m jobs.bench.train --arch ViT-B-16 --batch 5120 --ranks 8 --captions full
    python -m jobs.bench.train --variant model.text_batching=padded --variant model.text_batching=whole

The reference is `train_one_epoch` of the installed package, set up as in its own `main` (AdamW with two parameter
groups, ClipLoss, amp in bf16), as it is and with its `--torchcompile` (on a CPU only if asked for). Ours is the
trainer's own step with the default settings, with the openclip objective, which computes the same loss, and with
neuclip, whose extra time is that of the normalizer network; and the first of the --objectives once more with the
settings of each --variant. Data loading is excluded; batches have random pixels and texts of the lengths of web
captions. The contenders alternate in rounds of a few steps within one process with one rank, so that other load on the
machine affects all of them; the ratios within a round are compared. On a GPU we measure wall time, on a CPU the CPU
time of the process.

With --ranks, as in NeuCLIP's setting (local batch 640 of a gathered 5,120), one rank of so many runs the towers on its
own pairs and the objective on all; the first of ours is the reference. The features of the other ranks are random
tensors on the device, so communication is not measured.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import logging
import math
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jobs.bench.harness import Value, alternate, parser, ratios, seconds, show
from jobs.bench.loader import WORDS, make_shards
from pipeline.config import parse_overrides
from pipeline.data.loading.decode import normalize
from pipeline.data.loading.loader import Batch
from pipeline.data.loading.position import Position
from pipeline.distributed.start import start_world
from pipeline.distributed.world import World
from pipeline.engine.optim import OptimizerConfig
from pipeline.metrics.mfu import Utilization
from pipeline.model.architectures import Architecture
from pipeline.model.towers import ModelConfig, build_towers
from pipeline.objectives import build_objective
from pipeline.training.loop import Trainer
from pipeline.training.recipe import load_recipe
from pipeline.training.run import setup

THEIRS, COMPILED = "open_clip_train", "open_clip_train --torchcompile"
LR_SCALE = 1e-3
BATCHES = 4
"""Different batches, which are shown in turn: packed texts have another number of tokens in each."""
CAPTIONS = {"cc12m": (20.2, 16.3), "full": (1000.0, 0.0)}
"""Mean and standard deviation of a caption's length, in words. **Not checked**: CC12M's are quoted from memory of
Changpinyo et al. 2021 (arXiv 2102.08981), table 1."""
TOKENS_PER_WORD = 1.3
"""Assumed for CLIP's tokenizer, which adds a start and an end token."""


def options() -> argparse.ArgumentParser:
    given = parser(__doc__, rounds=5)
    given.add_argument("--arch", default="ViT-B-32")
    given.add_argument("--batch", type=int, default=32, help="global batch")
    given.add_argument("--ranks", type=int, default=1, help="of which one is measured")
    given.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    given.add_argument("--captions", choices=CAPTIONS, default="cc12m", help="lengths (from memory) [cc12m]")
    given.add_argument("--steps", type=int, default=2, help="steps per contender and round")
    given.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    given.add_argument("--objectives", nargs="+", default=["openclip", "neuclip"])
    given.add_argument("--variant", action="append", default=[], metavar="SETTINGS", help="also with these settings")
    given.add_argument("--torchcompile", action=argparse.BooleanOptionalAction, help=f"{COMPILED} [on a GPU]")
    return given


class Data(NamedTuple):
    """Batches of one rank on the host, and the towers that they are for."""

    batches: Sequence[Batch]
    architecture: Architecture
    rows: int


def make_data(args: argparse.Namespace) -> Data:
    """Random pixels, the same in every batch, and captions as long as `args` says, from a fixed seed."""
    if args.batch % args.ranks:
        raise SystemExit(f"--ranks {args.ranks} does not divide --batch {args.batch}.")
    rows, architecture = args.batch // args.ranks, build_towers(ModelConfig(arch=args.arch), seed=0, device="meta")[1]
    generator, size = torch.Generator().manual_seed(0), architecture.image_size
    pixels = torch.randint(0, 256, (rows, 3, size, size), generator=generator, dtype=torch.uint8)
    pixels, ids = pinned(pixels.contiguous(memory_format=torch.channels_last)), torch.arange(rows)
    texts = [pinned(architecture.tokenize(captions(args.captions, rows, generator))) for _ in range(BATCHES)]
    return Data([Batch(pixels, text, ids, Position(), replaced=0) for text in texts], architecture, rows)


def captions(kind: str, rows: int, generator: torch.Generator) -> list[str]:
    """Random words. Lengths in tokens are log-normal, as those of web captions are."""
    mean, deviation = (TOKENS_PER_WORD * value for value in CAPTIONS[kind])
    spread = math.sqrt(math.log1p((deviation / (2 + mean)) ** 2))
    normal = torch.randn(rows, generator=generator)
    lengths = torch.exp(math.log(2 + mean) - spread**2 / 2 + spread * normal).round().clamp(3, 100).int().tolist()
    known = WORDS.split()
    words = [torch.randint(0, len(known), (length - 2,), generator=generator).tolist() for length in lengths]
    return [" ".join(known[index] for index in indices) for indices in words]  # and the start and end tokens


def pinned(x: Tensor) -> Tensor:
    """The tensor in pinned memory if there is a GPU, as from a data loader."""
    return x.pin_memory() if torch.cuda.is_available() else x


Contender = tuple[Callable[[int], None], Utilization]
"""Takes so many training steps, and counts their FLOPs."""


@dataclass(frozen=True)
class OneOfMany(World):
    """A world whose other ranks are simulated: gathers return random features and copies of this rank's scalars."""

    def all_gather(self, x_b: Tensor) -> Tensor:
        x_b = x_b.detach()
        if x_b.dim() < 2 or x_b.shape[1] < 16:  # per-anchor scalars
            return x_b.repeat(self.size, *[1] * (x_b.dim() - 1))
        others = random_features((x_b.shape[0] * (self.size - 1), x_b.shape[1]), x_b.device)
        return torch.cat([x_b, others.to(x_b.dtype)])

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        return x.detach().clone()

    def gather_objects(self, value: Any) -> list[Any]:
        return [value] * self.size

    def barrier(self) -> None:
        pass


@functools.cache
def random_features(shape: tuple[int, int], device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.nn.functional.normalize(torch.randn(*shape, generator=generator), dim=1).to(device)


def ours(args: argparse.Namespace, data: Data, *, world: World, stack: ExitStack, settings: Sequence[str]) -> Contender:
    """Our training step on these batches, with the defaults of a recipe and these settings, until `stack` ends."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="neuclip-bench-"))
    (shards := Path(folder) / "shards").mkdir()
    make_shards(shards, shards=1, samples=data.rows, shorter=8, distinct=1)  # a run needs some; they are not read
    run = load_recipe(None, [
        f"output={folder}", f"data.sources={shards}", "data.streams=1", "data.workers=0",
        f"model.arch={args.arch}", f"batch_size={data.rows}", f"samples={data.rows * 10**6}",
        f"engine.device={world.device.type}", "engine.probe=false",
        f"engine.deepspeed={'auto' if args.precision == 'bf16' else 'zero0_fp32'}",
        "telemetry.tensorboard=false", "telemetry.progress=quiet", *settings,
    ])  # fmt: skip
    trainer: Trainer = stack.enter_context(setup(run, world=world, resume=None))
    trainer.batches._loader = itertools.cycle(data.batches)
    if args.ranks > 1:
        trainer.take_step.objective = build_objective(
            run.objective, dim=data.architecture.dim, batch_size=args.batch, dataset_size=1_000_000,
            total_steps=run.total_steps, world=OneOfMany(size=args.ranks, device=world.device), device=world.device,
        )  # fmt: skip

    def take(steps: int) -> None:
        for _ in range(steps):
            batch = trainer.batches.next()
            result = trainer.train_step(batch, lr_scale=LR_SCALE)
            trainer.state.average(batch, result)
            assert result.applied
            trainer.state.step += 1
            trainer.utilization.count(text_tokens=result.text_tokens)

    return take, trainer.utilization


class SyntheticLoader(list[tuple[Tensor, Tensor]]):
    """A data loader as open_clip_train expects it: batches of normalized pixels and tokens."""

    num_samples = num_batches = 0


def open_clip_train(args: argparse.Namespace, data: Data, *, device: torch.device, compiled: bool = False) -> Contender:
    """The package's own training loop, with TF32 products and cuDNN's autotuning as its `main` has them on a GPU."""
    import open_clip
    from open_clip_train.train import train_one_epoch

    defaults = OptimizerConfig()
    model = open_clip.create_model(args.arch, output_dict=True).to(device)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    free = [p for name, p in named if p.ndim < 2 or "bn" in name or "ln" in name or "bias" in name or "logit" in name]
    decayed = [p for _, p in named if not any(p is other for other in free)]
    groups = [{"params": free, "weight_decay": 0.0}, {"params": decayed, "weight_decay": defaults.weight_decay}]
    optimizer = torch.optim.AdamW(groups, lr=defaults.lr * LR_SCALE, betas=defaults.betas, eps=defaults.eps)
    trained: Any = torch.compile(model) if compiled else model
    image = normalize(data.batches[0].image, mean=data.architecture.mean, std=data.architecture.std).float()
    image = pinned(image.contiguous())
    batches = itertools.cycle([(image, batch.text) for batch in data.batches])
    bf16 = args.precision == "bf16"
    settings = SimpleNamespace(
        device=str(device), precision="amp_bf16" if bf16 else "fp32", distill=False,
        accum_freq=1, skip_scheduler=True, grad_clip_norm=None,
        rank=1,  # rank 0 reads the loss in the first and the last step of a call, and waits for it
    )  # fmt: skip
    loss = open_clip.ClipLoss(cache_labels=True)
    utilization = Utilization(ModelConfig(arch=args.arch), device=device, ranks=1, bf16=bf16, peak_tflops=None)

    def run(steps: int) -> None:
        loader = SyntheticLoader(itertools.islice(batches, steps))
        loader.num_samples, loader.num_batches = len(image), steps
        source = {"train": SimpleNamespace(dataloader=loader, set_epoch=lambda _: None)}
        before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
        if device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.benchmark = True
        try:
            train_one_epoch(trained, source, loss, 0, optimizer, None, None, None, settings)
        finally:
            torch.set_float32_matmul_precision(before[0])
            torch.backends.cudnn.benchmark = before[1]
        utilization.count(text_tokens=data.architecture.context_length)

    return run, utilization


def contenders(
    args: argparse.Namespace, data: Data, *, world: World, stack: ExitStack
) -> dict[str, Callable[[], Contender]]:
    """What builds each contender, by its name; ours live until the end of `stack`."""

    def built(make: Callable[..., Contender], **given: Any) -> Callable[[], Contender]:
        def build() -> Contender:
            run, utilization = make(args, data, **given)
            run(BATCHES)  # in which programs are compiled
            return run, utilization

        return build

    builders = {}
    if args.ranks == 1:
        builders[THEIRS] = built(open_clip_train, device=world.device)
        if world.device.type == "cuda" if args.torchcompile is None else args.torchcompile:
            builders[COMPILED] = built(open_clip_train, device=world.device, compiled=True)
    network = f"objective.prototypes={min(4096, args.batch)}"
    for name, variant in [(name, "") for name in args.objectives] + [(args.objectives[0], v) for v in args.variant]:
        chosen = parse_overrides(variant.split()).get("objective", {}).get("name", name)  # a variant may name its own
        settings = [network] * (chosen == "neuclip") + [*variant.split(), f"objective.name={chosen}"]
        rest = [word for word in variant.split() if not word.startswith("objective.name=")]
        full_name = ", ".join(["ours", chosen, *rest])
        builders[full_name] = built(ours, world=world, stack=stack, settings=settings)
    return builders


def compare(args: argparse.Namespace, built: Mapping[str, Contender], device: torch.device) -> dict[str, Any]:
    """Let the contenders take turns, and print medians over rounds; ratios are medians of the per-round ratios."""
    takes = {
        name: functools.partial(seconds, functools.partial(run, args.steps), device=device, threads=args.threads)
        for name, (run, _) in built.items()
    }
    times = alternate(takes, rounds=args.rounds)
    columns = {"ms/step": ".1f", "samples/s": ".1f"}
    others = [name for name in (THEIRS, COMPILED) if name in times] or list(times)[:1]
    for name, spread in zip(others, (("lowest", "highest"), ("least", "most")), strict=False):
        columns |= dict.fromkeys((f"/ {name.split()[-1]}", *spread), ".3f")
    rows = dict[str, tuple[Value, ...]]()
    for name, (_, utilization) in built.items():
        taken = median(times[name]) / args.steps
        rate = args.batch / args.ranks / taken
        compared = [ratio for other in others for ratio in ratios(times[other], times[name])]
        rows[name] = (1e3 * taken, rate, *compared, utilization.scalars(rate).get("mfu"))
    columns |= {"MFU": ".1%"}
    batch = f"batch {args.batch}" + (f" of which {args.batch // args.ranks} here" if args.ranks > 1 else "")
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {args.threads} threads"
    head = f"{args.arch}, {batch}, {args.precision}, texts {args.captions}, {place}"
    return show(head, columns, rows)


def main() -> None:
    args = options().parse_args()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", category=UserWarning)
    with start_world(device=args.device) as world, ExitStack() as stack:
        builders = contenders(args, make_data(args), world=world, stack=stack)
        compare(args, {name: build() for name, build in builders.items()}, world.device)


if __name__ == "__main__":
    main()

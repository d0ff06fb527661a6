"""Samples per second of our training step against open_clip_train's, on the same model, batch and synthetic data.

    python -m jobs.bench.train --arch ViT-B-32 --image-size 64 --batch 32
    python -m jobs.bench.train --arch ViT-B-16 --batch 640 --rounds 10                   on a GPU
    python -m jobs.bench.train --arch ViT-B-16 --batch 5120 --accumulate 8
    python -m jobs.bench.train --batch 16 --steps 1 --contenders openclip whole_texts plain_attention

The reference is `train_one_epoch` of the installed package, set up as in its own `main` (AdamW with two parameter
groups, ClipLoss, amp in bf16). Ours runs the trainer's full training step in a DeepSpeed engine, with uint8 pixels
normalized on the device: once with the openclip objective, which computes the same loss, and once with neuclip, whose
extra time is that of the normalizer network. The contenders alternate in rounds of a few steps within one process with
one rank, so that other load on the machine affects all of them; the ratios within a round are compared. On a GPU we
measure wall time, on a CPU the CPU time of the process, which other load hardly changes. Data loading is excluded.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from data_prep.scenes.caption import web
from data_prep.scenes.scenes_config import ScenesConfig
from pipeline.data.loading.decode import normalize
from pipeline.distributed.world import World, start_world
from pipeline.engine.deepspeed_engine import DeepSpeedEngine
from pipeline.engine.engine_config import EngineConfig
from pipeline.engine.optim import OptimizerConfig
from pipeline.model.towers import ModelConfig, build_towers
from pipeline.model.trimming import text_trimming
from pipeline.objectives import build_objective
from pipeline.training.step import TrainStep, micro_batches
from pipeline.versions import versions

OPTIMIZER = OptimizerConfig(lr=5e-4, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.2)
CONTENDERS: dict[str, dict[str, Any]] = {
    "openclip": {},
    "whole_texts": {"trim_text": False},
    "whole_images": {"trim_image": False},
    "plain_attention": {"packed_attention": False, "trim_text": False, "trim_image": False},
    "neuclip": {},
}
"""Ours, beside `open_clip_train`, with the arguments they change: `openclip` has everything that is on by default."""
DATASET = 1_000_000
SEED = 0

Rounds = Callable[[int], None]
"""Runs the given number of steps."""


@dataclass(frozen=True)
class Data:
    """One global batch: uint8 pixels [B, 3, S, S] and tokens [B, L], on the host."""

    pixels: Tensor
    text: Tensor
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="ViT-B-32")
    parser.add_argument("--image-size", type=int, help="pixels, for a smaller test of the same architecture")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step (both sides use GradCache)")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2), default=2, help="ZeRO stage")
    parser.add_argument("--prototypes", type=int, help="prototypes of the network [4096, or the batch size if smaller]")
    parser.add_argument("--inner-steps", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2, help="steps per contender and round")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one warm-up round")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads of every contender")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--grad-checkpointing", action="store_true")
    parser.add_argument("--compile", action="store_true", help="torch.compile of the towers, on both sides")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=["openclip", "neuclip"])
    parser.add_argument("--packed-attention", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--trim-text", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--trim-image", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--channels-last", action=argparse.BooleanOptionalAction, default=True)
    parser.set_defaults(patch_dropout=None, lock_image=False, stored_features=False)
    args = parser.parse_args(argv)
    args.prototypes = prototypes_of(args, parser)
    return args


def prototypes_of(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """The number of prototypes, at most the batch size: with more, the network would still be growing."""
    if args.prototypes is not None and args.prototypes > args.batch:
        parser.error(f"--prototypes {args.prototypes} is above --batch {args.batch}: not all would be live")
    return args.prototypes or min(4096, args.batch)


def make_data(args: argparse.Namespace) -> Data:
    """Random pixels and captions of the built-in corpus, from a fixed seed."""
    config = ModelConfig(arch=args.arch, image_size=args.image_size)
    _, architecture = build_towers(config, seed=SEED, device="meta")
    generator = torch.Generator().manual_seed(SEED)
    size, corpus = architecture.image_size, ScenesConfig()
    pixels = torch.randint(0, 256, (args.batch, 3, size, size), generator=generator, dtype=torch.uint8)
    text = architecture.tokenize([web(corpus, index) for index in range(args.batch)])
    return Data(pinned(pixels), pinned(text), architecture.mean, architecture.std)


def pinned(x: Tensor) -> Tensor:
    """The tensor in pinned memory if there is a GPU, as from a data loader."""
    return x.pin_memory() if torch.cuda.is_available() else x


def ours(args: argparse.Namespace, data: Data, *, objective: str, world: World) -> Rounds:
    """Our training step, as run by `Trainer`."""
    config = ModelConfig(
        arch=args.arch,
        image_size=args.image_size,
        grad_checkpointing=args.grad_checkpointing,
        patch_dropout=args.patch_dropout,
        packed_attention=args.packed_attention,
        trim_image=None if args.trim_image else False,
        lock_image=args.lock_image,
    )
    towers, architecture = build_towers(config, seed=SEED)
    trimming = text_trimming(towers.clip, wanted=None if args.trim_text and args.packed_attention else False)
    micro = args.batch // args.accumulate if args.accumulate > 1 else None
    settings = {"prototypes": args.prototypes, "inner_steps": args.inner_steps} if objective == "neuclip" else {}
    method = build_objective(
        {"name": objective, **settings},
        dim=architecture.dim,
        batch_size=args.batch,
        dataset_size=DATASET,
        total_steps=10**6,
        world=world,
        device=world.device,
    )
    engine = DeepSpeedEngine(
        towers.to(world.device),
        config=EngineConfig(deepspeed=f"zero{args.stage}_{args.precision}", micro_batch=micro),
        optimizer=OPTIMIZER,
        world=world,
        global_batch=args.batch,
        compile_towers=args.compile,
    )
    engine.train()
    take_step = TrainStep(engine, method, world=world, seed=SEED, chunks=micro_batches(args.batch, micro))
    sample_ids = torch.arange(args.batch, device=world.device)
    memory_format = towers.image_format if args.channels_last else torch.contiguous_format
    taken, stored = 0, None
    if args.stored_features:
        image = normalize(data.pixels.to(world.device), mean=data.mean, std=data.std, dtype=engine.dtype)
        stored = pinned(engine.image_output(image).cpu())

    def run(steps: int) -> None:
        nonlocal taken
        for _ in range(steps):
            pixels = (data.pixels if stored is None else stored).to(world.device, non_blocking=True)
            image = pixels
            if stored is None:
                image = normalize(pixels, mean=data.mean, std=data.std, dtype=engine.dtype, memory_format=memory_format)
            text = data.text.to(world.device, non_blocking=True)
            lengths = trimming.lengths(data.text) if trimming else None
            result = take_step((image, text), sample_ids=sample_ids, step=taken, lr_scale=1e-3, text_lengths=lengths)
            assert result.applied
            taken += 1

    return run


class SyntheticLoader:
    """A data loader as open_clip_train expects it: micro-batches of normalized pixels and tokens."""

    def __init__(self, data: Data, *, micro_batch: int) -> None:
        image = pinned(normalize(data.pixels, mean=data.mean, std=data.std).float())
        self.batches = list(zip(image.split(micro_batch), data.text.split(micro_batch), strict=True))
        self.num_samples = len(data.pixels)
        self.num_batches = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for i in range(self.num_batches):
            yield self.batches[i % len(self.batches)]


def open_clip_train(args: argparse.Namespace, data: Data, *, device: torch.device) -> Rounds:
    """The package's own training loop."""
    import open_clip
    from open_clip_train.train import train_one_epoch

    model = open_clip.create_model(args.arch, force_image_size=args.image_size, output_dict=True).to(device)
    if args.grad_checkpointing:
        model.set_grad_checkpointing()
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    free = [p for name, p in named if p.ndim < 2 or "bn" in name or "ln" in name or "bias" in name or "logit" in name]
    decayed = [p for _, p in named if not any(p is other for other in free)]
    groups = [{"params": free, "weight_decay": 0.0}, {"params": decayed, "weight_decay": OPTIMIZER.weight_decay}]
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER.lr * 1e-3, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    trained: Any = torch.compile(model) if args.compile else model
    loader = SyntheticLoader(data, micro_batch=args.batch // args.accumulate)
    settings = SimpleNamespace(
        device=str(device),
        precision="amp_bf16" if args.precision == "bf16" else "fp32",
        distill=False,
        accum_freq=args.accumulate,
        skip_scheduler=True,
        grad_clip_norm=None,
        horovod=False,
        rank=0,
        local_rank=0,
        log_local=False,
        log_every_n_steps=10**9,
        batch_size=args.batch // args.accumulate,
        world_size=1,
        wandb=False,
    )
    source = {"train": SimpleNamespace(dataloader=loader, set_epoch=lambda _: None)}
    loss = open_clip.ClipLoss()

    def run(steps: int) -> None:
        loader.num_batches = steps * args.accumulate
        with as_its_main(device):
            train_one_epoch(trained, source, loss, 0, optimizer, None, None, None, settings)

    return run


@contextlib.contextmanager
def as_its_main(device: torch.device) -> Iterator[None]:
    """Enable TF32 matmuls and cuDNN autotuning within the context, as `main` of open_clip_train does on a GPU."""
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.benchmark = before[1]


def seconds(run: Rounds, steps: int, device: torch.device, *, threads: int) -> float:
    """Seconds that `steps` steps take until the device is done: wall time on a GPU, CPU time of all threads on a CPU.

    Waiting threads may spin, so every contender gets the same number of threads and must not change it.
    """
    torch.set_num_threads(threads)
    if device.type == "cpu":
        start = time.process_time()
        run(steps)
        taken = time.process_time() - start
        assert torch.get_num_threads() == threads, "a contender changed its number of threads"
        return taken
    torch.cuda.synchronize()
    start = time.perf_counter()
    run(steps)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    args = parse_arguments()
    logging.disable(logging.INFO)
    warnings.filterwarnings("ignore", category=UserWarning)
    with start_world(device=args.device) as world:
        data = make_data(args)
        contenders = {"open_clip_train": open_clip_train(args, data, device=world.device)}
        for name in args.contenders:
            settings = argparse.Namespace(**{**vars(args), **CONTENDERS[name]})
            objective = "neuclip" if name == "neuclip" else "openclip"
            contenders[name] = ours(settings, data, objective=objective, world=world)
        names = list(contenders)
        times: dict[str, list[float]] = {name: [] for name in names}
        for number in range(args.rounds + 1):
            # Rotate the order, so that no contender always runs after the same one.
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                taken = seconds(contenders[name], args.steps, world.device, threads=args.threads)
                if number:
                    times[name].append(taken / args.steps)
        report(args, times, device=world.device)


def report(args: argparse.Namespace, times: dict[str, list[float]], *, device: torch.device) -> None:
    """Print medians over rounds; ratios are medians of the per-round ratios."""
    size = f" at {args.image_size} px" if args.image_size else ""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{args.arch}{size}, batch {args.batch} in {args.accumulate}, {args.precision}, ZeRO-{args.stage}, {where}")
    print(
        ", ".join(f"{name} {version}" for name, version in versions(("torch", "deepspeed", "open_clip_torch")).items())
    )
    print(f"{'':<20}{'ms/step':>10}{'samples/s':>12}{'/ open_clip_train':>20}{'lowest':>9}{'highest':>9}")
    theirs = times["open_clip_train"]
    for name, found in times.items():
        ratios = [b / a for a, b in zip(found, theirs, strict=True)]
        median = statistics.median(found)
        print(
            f"{name:<20}{median * 1e3:>10.1f}{args.batch / median:>12.1f}{statistics.median(ratios):>20.3f}"
            f"{min(ratios):>9.3f}{max(ratios):>9.3f}"
        )
    if not {"openclip", "neuclip"} <= times.keys():
        return
    extra = [b / a - 1 for a, b in zip(times["openclip"], times["neuclip"], strict=True)]
    print(
        f"neuclip takes {statistics.median(extra):+.1%} of openclip's time ({args.prototypes} prototypes, "
        f"{args.inner_steps} inner steps)"
    )


if __name__ == "__main__":
    main()

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
import warnings
from collections.abc import Callable, Iterator
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from jobs.bench.harness import CAPTIONS, SEED, Data, alternate, make_data, parser, pinned, place, ratios, seconds, show
from pipeline.data.loading.decode import normalize
from pipeline.distributed.start import start_world
from pipeline.distributed.world import World
from pipeline.engine.deepspeed_engine import DeepSpeedEngine
from pipeline.engine.engine_config import EngineConfig
from pipeline.engine.optim import OptimizerConfig
from pipeline.model.finetuning import LoraConfig
from pipeline.model.towers import ModelConfig, build_towers
from pipeline.model.trimming import text_trimming
from pipeline.objectives import build_objective
from pipeline.training.step import TrainStep, micro_batches

OPTIMIZER = OptimizerConfig(lr=5e-4, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.2)
CONTENDERS: dict[str, dict[str, Any]] = {
    "openclip": {},
    "whole_texts": {"trim_text": False},
    "packed_texts": {"pack_texts": True},
    "whole_images": {"trim_image": False},
    "plain_attention": {"packed_attention": False, "trim_text": False, "trim_image": False},
    "neuclip": {},
}
"""Ours, beside `open_clip_train`, with the arguments they change: `openclip` has everything that is on by default."""
DATASET = 1_000_000
PLAIN: dict[str, Any] = {
    "accumulate": 1, "captions": None, "caption_tokens": 28.0, "grad_checkpointing": False, "compile": False,
    "packed_attention": True, "trim_text": True, "trim_image": True, "channels_last": True, "pack_texts": False,
    "patch_dropout": None, "lock_image": False, "lora_rank": None,
}  # fmt: skip
"""What `ours` reads, where a benchmark has no option for it."""
Rounds = Callable[[int], None]
"""Runs the given number of steps."""


def step_parser(about: str | None, *, arch: str, batch: int, rounds: int, steps: int) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark of training steps."""
    found = parser(about, rounds=rounds)
    found.add_argument("--arch", default=arch)
    found.add_argument("--image-size", type=int, help="pixels, for a smaller test of the same architecture")
    found.add_argument("--batch", type=int, default=batch, help="global batch")
    found.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    found.add_argument("--stage", type=int, choices=(0, 1, 2), default=0, help="ZeRO stage")
    found.add_argument("--steps", type=int, default=steps, help="steps per contender and round")
    found.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    found.set_defaults(**PLAIN)
    return found


def parse_arguments() -> argparse.Namespace:
    found = step_parser(__doc__, arch="ViT-B-32", batch=32, rounds=5, steps=2)
    found.add_argument("--accumulate", type=int, default=1, help="micro-batches per step (both sides use GradCache)")
    found.add_argument("--caption-tokens", type=float, default=28.0, help="mean length of captions, in tokens")
    found.add_argument("--captions", choices=CAPTIONS, help="lengths as of this dataset (from memory), instead")
    found.add_argument("--prototypes", type=int, help="prototypes of the network [4096, or the batch size if smaller]")
    found.add_argument("--inner-steps", type=int, default=10)
    found.add_argument("--grad-checkpointing", action="store_true")
    found.add_argument("--compile", action="store_true", help="torch.compile of the towers, on both sides")
    found.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=["openclip", "neuclip"])
    for name in ("packed-attention", "trim-text", "trim-image", "channels-last"):
        found.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=True)
    args = found.parse_args()
    args.prototypes = prototypes_of(args, found)
    return args


def prototypes_of(args: argparse.Namespace, given: argparse.ArgumentParser) -> int:
    """The number of prototypes, at most the batch size: with more, the network would still be growing."""
    if args.prototypes is not None and args.prototypes > args.batch:
        given.error(f"--prototypes {args.prototypes} is above --batch {args.batch}: not all would be live")
    return args.prototypes or min(4096, args.batch)


def ours(
    args: argparse.Namespace,
    *data: Data,
    objective: str,
    world: World,
    seen: World | None = None,
    lr_scale: float = 1e-3,
    losses: list[Tensor] | None = None,
    **settings: Any,
) -> Rounds:
    """Our training step, as run by `Trainer`, on these batches in turn; it appends its losses to `losses`.

    `seen` is the world of the objective, if it is another one: each of its ranks has a batch of `args.batch`. Other
    settings are the objective's.
    """
    config = ModelConfig(
        arch=args.arch,
        image_size=args.image_size,
        grad_checkpointing=args.grad_checkpointing,
        patch_dropout=args.patch_dropout,
        packed_attention=args.packed_attention,
        trim_image=None if args.trim_image else False,
        lock_image=args.lock_image,
        lora=LoraConfig(rank=args.lora_rank),
    )
    towers, architecture = build_towers(config, seed=SEED)
    trimming = text_trimming(towers.clip, wanted=None if args.trim_text and args.packed_attention else False)
    micro = args.batch // args.accumulate if args.accumulate > 1 else None
    if objective == "neuclip":
        settings |= {"prototypes": args.prototypes, "inner_steps": args.inner_steps}
    method = build_objective(
        {"name": objective, **settings},
        dim=architecture.dim,
        batch_size=args.batch * (seen or world).size,
        dataset_size=DATASET,
        total_steps=10**6,
        world=seen or world,
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
    take_step = TrainStep(
        engine, method, world=world, seed=SEED, chunks=micro_batches(args.batch, micro), pack_texts=args.pack_texts
    )
    sample_ids = torch.arange(args.batch, device=world.device)
    memory_format = towers.image_format if args.channels_last else torch.contiguous_format
    taken = 0

    def run(steps: int) -> None:
        nonlocal taken
        for _ in range(steps):
            now = data[taken % len(data)]
            pixels = now.pixels.to(world.device, non_blocking=True)
            image = normalize(pixels, mean=now.mean, std=now.std, dtype=engine.dtype, memory_format=memory_format)
            text = now.text.to(world.device, non_blocking=True)
            lengths = trimming.cut(now.text)[1] if trimming else None
            result = take_step(
                (image, text), sample_ids=sample_ids, step=taken, lr_scale=lr_scale, text_lengths=lengths
            )
            assert result.applied
            if losses is not None:
                losses.append(result.output.loss)
            taken += 1

    return run


class SyntheticLoader:
    """A data loader as open_clip_train expects it: micro-batches of normalized pixels and tokens."""

    def __init__(self, *data: Data, micro_batch: int) -> None:
        self.batches: list[tuple[Tensor, Tensor]] = []
        for batch in data:
            image = pinned(normalize(batch.pixels, mean=batch.mean, std=batch.std).float())
            self.batches += zip(image.split(micro_batch), batch.text.split(micro_batch), strict=True)
        self.num_samples = sum(len(batch.pixels) for batch in data)
        self.num_batches = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for i in range(self.num_batches):
            yield self.batches[i % len(self.batches)]


def open_clip_train(
    args: argparse.Namespace,
    *data: Data,
    device: torch.device,
    lr_scale: float = 1e-3,
    losses: list[Tensor] | None = None,
) -> Rounds:
    """The package's own training loop, from the weights of `ours`; it appends its losses to `losses`."""
    import open_clip
    from open_clip_train.train import train_one_epoch

    model = open_clip.create_model(args.arch, force_image_size=args.image_size, output_dict=True)
    towers, _ = build_towers(ModelConfig(arch=args.arch, image_size=args.image_size), seed=SEED)
    missing = model.load_state_dict(towers.clip.state_dict(), strict=False).missing_keys
    assert set(missing) <= {"logit_scale"}
    model.to(device)
    if args.grad_checkpointing:
        model.set_grad_checkpointing()
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    free = [p for name, p in named if p.ndim < 2 or "bn" in name or "ln" in name or "bias" in name or "logit" in name]
    decayed = [p for _, p in named if not any(p is other for other in free)]
    groups = [{"params": free, "weight_decay": 0.0}, {"params": decayed, "weight_decay": OPTIMIZER.weight_decay}]
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER.lr * lr_scale, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    trained: Any = torch.compile(model) if args.compile else model
    loader = SyntheticLoader(*data, micro_batch=args.batch // args.accumulate)
    settings = SimpleNamespace(
        device=str(device), precision="amp_bf16" if args.precision == "bf16" else "fp32", distill=False,
        accum_freq=args.accumulate, skip_scheduler=True, grad_clip_norm=None, horovod=False, rank=0, local_rank=0,
        log_local=False, log_every_n_steps=10**9, batch_size=args.batch // args.accumulate, world_size=1, wandb=False,
    )  # fmt: skip
    source = {"train": SimpleNamespace(dataloader=loader, set_epoch=lambda _: None)}

    class Loss(open_clip.ClipLoss):
        def forward(self, *given: Any, **named: Any) -> Any:
            found = super().forward(*given, **named)
            if losses is not None:
                losses.append(torch.stack([*found.values()]).sum() if isinstance(found, dict) else found)
            return found

    loss = Loss()

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
        report(args, step_seconds(contenders, args, world.device), device=world.device)


def step_seconds(
    contenders: dict[str, Rounds], args: argparse.Namespace, device: torch.device
) -> dict[str, list[float]]:
    """Seconds per step of the contenders in every round."""

    def timed(run: Rounds) -> Callable[[], float]:
        return lambda: seconds(lambda: run(args.steps), device=device, threads=args.threads) / args.steps

    return alternate({name: timed(run) for name, run in contenders.items()}, rounds=args.rounds)


def head(args: argparse.Namespace, device: torch.device) -> str:
    """What is measured, and where."""
    size = f" at {args.image_size} px" if args.image_size else ""
    return f"{args.arch}{size}, batch {args.batch}, {args.precision}, ZeRO-{args.stage}, {place(device, args.threads)}"


def report(args: argparse.Namespace, times: dict[str, list[float]], *, device: torch.device) -> None:
    """Print medians over rounds; ratios are medians of the per-round ratios."""
    columns = {"ms/step": ".1f", "samples/s": ".1f", "/ open_clip_train": ".3f", "lowest": ".3f", "highest": ".3f"}
    rows = {
        name: (1e3 * median(found), args.batch / median(found), *ratios(times["open_clip_train"], found))
        for name, found in times.items()
    }
    show(f"{head(args, device)}, in {args.accumulate}", columns, rows, output=args.json)
    if {"openclip", "neuclip"} <= times.keys():
        extra = ratios(times["neuclip"], times["openclip"])[0] - 1
        of = f"{args.prototypes} prototypes, {args.inner_steps} inner steps"
        print(f"neuclip takes {extra:+.1%} of openclip's time ({of})")


if __name__ == "__main__":
    main()

"""Throughput and peak memory of a recipe's options that save memory or time.

    python -m jobs.bench.options --arch scenes-vit-tiny --batch 64 --micro-batch 16      on a desktop CPU
    python -m jobs.bench.options --arch ViT-B-16 --batch 640 --micro-batch 80            on a GPU

Every option is compared with `none` on the same model, batch and synthetic data, with the trainer's full training step
(openclip objective, DeepSpeed engine). Each contender runs in its own process, so that its peak memory can be measured
separately (device memory on a GPU, resident memory on a CPU). The processes take turns: only one computes at a time.
Speed is wall time on a GPU and CPU time on a CPU; the ratio is the median of the per-round ratios. Compilation happens
before the measured rounds.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import resource
import statistics
import warnings
from multiprocessing.connection import Connection
from typing import Any

import torch

from pipeline.metrics.mfu import known_peak, training_flops
from pipeline.model.towers import ModelConfig, build_towers
from pipeline.model.trimming import TextChunks, text_trimming
from pipeline.training.step import micro_batches

OPTIONS = (
    "none",
    "packed_attention",
    "channels_last",
    "trim_text",
    "trim_image",
    "accumulation",
    "grad_checkpointing",
    "compile",
    "patch_dropout",
    "lock_image",
    "image_features_cache",
    "all_savings",
)
"""`none`: open_clip's attention, untrimmed texts, channels first. `packed_attention` and `channels_last` change only
what they name. `trim_text` has all three, `trim_image` and the options below it have all four.
`image_features_cache` is `lock_image` from the second epoch on: a step gets stored outputs of the image tower; the
decoding that it saves as well is not measured."""
BUILD_SECONDS = 1800


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="ViT-B-32")
    parser.add_argument("--image-size", type=int, help="pixels, for a smaller test of the same architecture")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--micro-batch", type=int, default=8, help="micro-batch of GradCache accumulation")
    parser.add_argument("--patch-dropout", type=float, default=0.5)
    parser.add_argument("--options", nargs="+", choices=OPTIONS, default=list(OPTIONS))
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2), default=2, help="ZeRO stage")
    parser.add_argument("--steps", type=int, default=1, help="steps per contender and round")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds, after one warm-up round")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args(argv)
    if args.batch % args.micro_batch:
        parser.error(f"--micro-batch {args.micro_batch} does not divide --batch {args.batch}")
    return args


def settings_of(args: argparse.Namespace, option: str) -> dict[str, Any]:
    """The arguments of `jobs.bench.train` for an option."""
    saving = option == "all_savings"
    return {
        **vars(args),
        "accumulate": args.batch // args.micro_batch if option == "accumulation" or saving else 1,
        "grad_checkpointing": option == "grad_checkpointing" or saving,
        "compile": option == "compile",
        "lock_image": option in ("lock_image", "image_features_cache"),
        "stored_features": option == "image_features_cache",
        "patch_dropout": args.patch_dropout if option == "patch_dropout" else None,
        "packed_attention": option not in ("none", "channels_last"),
        "channels_last": option != "none" and option != "packed_attention",
        "trim_text": option not in ("none", "packed_attention", "channels_last"),
        "trim_image": option not in ("none", "packed_attention", "channels_last", "trim_text"),
        "prototypes": 0,
        "inner_steps": 0,
    }


def contender(pipe: Connection, settings: dict[str, Any]) -> None:
    """Serve one contender: for a number of steps reply with their seconds, for None with the peak memory in GiB."""
    from jobs.bench.train import make_data, ours, seconds
    from pipeline.distributed.world import start_world

    logging.disable(logging.INFO)
    warnings.filterwarnings("ignore")
    args = argparse.Namespace(**settings)
    torch.set_num_threads(args.threads)
    with start_world(device=args.device) as world:
        run = ours(args, make_data(args), objective="openclip", world=world)
        run(2)
        pipe.send("ready")
        while (steps := pipe.recv()) is not None:
            pipe.send(seconds(run, steps, world.device, threads=args.threads))
            torch.cuda.empty_cache()  # the next contender is another process and needs the memory
        if world.device.type == "cuda":
            pipe.send(torch.cuda.max_memory_allocated() / 2**30)
        else:
            pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)


def measure(args: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds per step in every round, and peak memory in GiB, by option."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes = []
    for option in args.options:
        ours, theirs = context.Pipe()
        process = context.Process(target=contender, args=(theirs, settings_of(args, option)), daemon=True)
        process.start()
        theirs.close()
        pipes[option] = ours
        processes.append(process)
        if not ours.poll(BUILD_SECONDS):  # start one after the other
            raise TimeoutError(f"{option} was not ready after {BUILD_SECONDS} s")
        _ask(option, ours)
    times: dict[str, list[float]] = {option: [] for option in args.options}
    for number in range(args.rounds + 1):
        turn = number % len(args.options)
        for option in args.options[turn:] + args.options[:turn]:
            pipes[option].send(args.steps)
            taken = _ask(option, pipes[option])
            if number:
                times[option].append(taken / args.steps)
    peaks = {}
    for option, pipe in pipes.items():
        pipe.send(None)
        peaks[option] = _ask(option, pipe)
    for process in processes:
        process.join()
    return times, peaks


def _ask(option: str, pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        raise SystemExit(f"The contender {option!r} failed; its error is printed above.") from None


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    times, peaks = measure(args)
    cuda = args.device != "cpu" and torch.cuda.is_available()
    where = torch.cuda.get_device_name() if cuda else f"CPU, {args.threads} threads"
    size = f" at {args.image_size} px" if args.image_size else ""
    print(
        f"{args.arch}{size}, batch {args.batch}, {args.precision}, ZeRO-{args.stage}, {where}; "
        f"micro-batch {args.micro_batch}, patch dropout {args.patch_dropout}"
    )
    first = args.options[0]
    peak = known_peak(torch.cuda.get_device_name()) if cuda else None
    print(f"{'':<20}{'samples/s':>10}{'/ ' + first:>10}{'lowest':>9}{'highest':>9}{'peak GiB':>10}{'/ ' + first:>10}"
          f"{'MFU':>8}")  # fmt: skip
    for option in args.options:
        ratios = [a / b for a, b in zip(times[first], times[option], strict=True)]
        rate = args.batch / statistics.median(times[option])
        share = "?" if peak is None else f"{rate * useful_flops(args, option) / (peak * 1e12):.1%}"
        print(
            f"{option:<20}{rate:>10.1f}{statistics.median(ratios):>10.2f}{min(ratios):>9.2f}{max(ratios):>9.2f}"
            f"{peaks[option]:>10.2f}{peaks[option] / peaks[first]:>10.2f}{share:>8}"
        )


def useful_flops(args: argparse.Namespace, option: str) -> float:
    """Forward and backward FLOPs of a pair, without recomputation, of the text tokens that an option computes."""
    from jobs.bench.train import make_data

    settings = settings_of(args, option)
    model = ModelConfig(arch=args.arch, image_size=args.image_size, patch_dropout=settings["patch_dropout"],
                        packed_attention=settings["packed_attention"], lock_image=settings["lock_image"],
                        trim_image=None if settings["trim_image"] else False)  # fmt: skip
    towers, _ = build_towers(model, seed=0, device="meta")
    images = 0.0 if settings["stored_features"] else 1.0
    trimming = text_trimming(towers.clip, wanted=None if settings["trim_text"] else False)
    if trimming is None:
        return training_flops(model, images=images)
    text = make_data(args).text
    chunks = micro_batches(args.batch, args.batch // settings["accumulate"])
    tokens = TextChunks(text, chunks, lengths=trimming.lengths(text)).computed_tokens / args.batch
    return training_flops(model, text_tokens=tokens, images=images)


if __name__ == "__main__":
    main()

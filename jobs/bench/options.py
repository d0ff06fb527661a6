"""Throughput and peak memory of a recipe's options that save memory or time.

    python -m jobs.bench.options --arch scenes-vit-tiny --batch 64 --micro-batch 16      on a desktop CPU
    python -m jobs.bench.options --arch ViT-B-16 --batch 640 --micro-batch 80            on a GPU

Every option is compared with `none` on the same model, batch and synthetic data, with the trainer's full training step
(openclip objective, DeepSpeed engine). Each contender runs in its own process, so that its peak memory can be measured
separately (device memory on a GPU, resident memory on a CPU). Only one computes at a time. Compilation happens before
the measured rounds.
"""

from __future__ import annotations

import argparse
import functools
import logging
import multiprocessing
import resource
import warnings
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch

from jobs.bench.harness import alternate, make_data, ratios, seconds, show
from jobs.bench.train import head, ours, step_parser
from pipeline.distributed.start import start_world
from pipeline.metrics.mfu import known_peak, training_flops
from pipeline.model.towers import ModelConfig, build_towers
from pipeline.model.trimming import TextChunks, text_trimming
from pipeline.training.step import micro_batches

PLAIN, LAYOUTS = ("none", "stage_1", "stage_2"), ("packed_attention", "channels_last")
OTHERS = ("accumulation", "grad_checkpointing", "compile", "patch_dropout", "lock_image")
OPTIONS = (*PLAIN, *LAYOUTS, "trim_text", "trim_image", *OTHERS, "lora", "all_savings")
"""`none`: open_clip's attention, untrimmed texts, channels first, at `--stage`; `stage_1` and `stage_2` the same there.
`packed_attention` and `channels_last` change only
what they name. `trim_text` has all three, `trim_image` and the options below it have all four."""
START_SECONDS = 1800
"""After which a contender should be ready."""


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    found = step_parser(__doc__, arch="ViT-B-32", batch=32, rounds=3, steps=1)
    found.add_argument("--micro-batch", type=int, default=8, help="micro-batch of GradCache accumulation")
    found.add_argument("--patch-dropout", type=float, default=0.5)
    found.add_argument("--options", nargs="+", choices=OPTIONS, default=list(OPTIONS))
    args = found.parse_args(argv)
    if args.batch % args.micro_batch:
        found.error(f"--micro-batch {args.micro_batch} does not divide --batch {args.batch}")
    return args


def settings_of(args: argparse.Namespace, option: str) -> dict[str, Any]:
    """The arguments of `jobs.bench.train` for an option."""
    saving = option == "all_savings"
    return {
        **vars(args),
        "stage": {"stage_1": 1, "stage_2": 2}.get(option, args.stage),
        "accumulate": args.batch // args.micro_batch if option == "accumulation" or saving else 1,
        "grad_checkpointing": option == "grad_checkpointing" or saving,
        "compile": option == "compile",
        "lock_image": option == "lock_image",
        "lora_rank": 8 if option == "lora" else None,
        "patch_dropout": args.patch_dropout if option == "patch_dropout" else None,
        "packed_attention": option not in (*PLAIN, "channels_last"),
        "channels_last": option not in (*PLAIN, "packed_attention"),
        "trim_text": option not in (*PLAIN, *LAYOUTS),
        "trim_image": option not in (*PLAIN, *LAYOUTS, "trim_text"),
    }


class Contender:
    """Steps with an option in a process of their own, whose peak memory is its own, too."""

    def __init__(self, option: str, settings: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._option, (self._pipe, theirs) = option, context.Pipe()
        context.Process(target=serve, args=(theirs, settings), daemon=True).start()
        theirs.close()
        if not self._pipe.poll(START_SECONDS):
            raise TimeoutError(f"{option} was not ready after {START_SECONDS} s")
        self._receive()

    def ask(self, steps: int | None) -> float:
        """Seconds of so many steps; None: the peak in GiB, after which the process ends."""
        self._pipe.send(steps)
        return self._receive()

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            raise SystemExit(f"The contender {self._option!r} failed; its error is printed above.") from None


def serve(pipe: Connection, settings: dict[str, Any]) -> None:
    """The process of a contender: sends None when ready, then what `Contender.ask` returns."""
    logging.disable(logging.INFO)
    warnings.filterwarnings("ignore")
    args = argparse.Namespace(**settings)
    torch.set_num_threads(args.threads)
    with start_world(device=args.device) as world:
        run = ours(args, make_data(args), objective="openclip", world=world)
        run(2)
        answer = None
        while True:
            torch.cuda.empty_cache()  # before the reply, after which another process needs the memory
            pipe.send(answer)
            if (steps := pipe.recv()) is None:
                break
            answer = seconds(functools.partial(run, steps), device=world.device, threads=args.threads)
        if world.device.type == "cuda":
            pipe.send(torch.cuda.max_memory_allocated() / 2**30)
        else:
            pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)


def main() -> None:
    args = parse_arguments()
    contenders = {option: Contender(option, settings_of(args, option)) for option in args.options}
    takes = {option: functools.partial(contender.ask, args.steps) for option, contender in contenders.items()}
    times = alternate(takes, rounds=args.rounds)
    peaks = {option: contender.ask(None) for option, contender in contenders.items()}
    cuda = args.device != "cpu" and torch.cuda.is_available()
    peak = known_peak(torch.cuda.get_device_name()) if cuda else None
    first = args.options[0]
    rows = {}
    for option, found in times.items():
        rate = args.batch * args.steps / median(found)
        share = None if peak is None else rate * useful_flops(args, option) / (peak * 1e12)
        rows[option] = (rate, *ratios(times[first], found), peaks[option], peaks[option] / peaks[first], share)
    columns = {"samples/s": ".1f", f"/ {first}": ".2f", "lowest": ".2f", "highest": ".2f"}
    columns |= {"peak GiB": ".2f", f"GiB / {first}": ".2f", "MFU": ".1%"}
    what = f"micro-batch {args.micro_batch}, patch dropout {args.patch_dropout}"
    show(f"{head(args, torch.device('cuda' if cuda else 'cpu'))}; {what}", columns, rows, output=args.json)


def useful_flops(args: argparse.Namespace, option: str) -> float:
    """Forward and backward FLOPs of a pair, without recomputation, of the text tokens that an option computes."""
    settings = settings_of(args, option)
    model = ModelConfig(arch=args.arch, image_size=args.image_size, patch_dropout=settings["patch_dropout"],
                        packed_attention=settings["packed_attention"], lock_image=settings["lock_image"],
                        trim_image=None if settings["trim_image"] else False)  # fmt: skip
    towers, _ = build_towers(model, seed=0, device="meta")
    trimming = text_trimming(towers.clip, wanted=None if settings["trim_text"] else False)
    if trimming is None:
        return training_flops(model)
    text = make_data(args).text
    chunks = micro_batches(args.batch, args.batch // settings["accumulate"])
    tokens = TextChunks(text, chunks, lengths=trimming.cut(text)[1]).computed_tokens / args.batch
    return training_flops(model, text_tokens=tokens)


if __name__ == "__main__":
    main()

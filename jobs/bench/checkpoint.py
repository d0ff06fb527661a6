"""Seconds for which a checkpoint stops the training: ours against torch's distributed checkpoints (DCP).

    python -m jobs.bench.checkpoint --arch ViT-B-32 --precision fp32     # on a CPU
    python -m jobs.bench.checkpoint                                      # ViT-B/16 in bf16, on a GPU

One rank saves the fp32 weights and Adam moments of a model after a step. The contenders take turns: `ours` copies the
state to host memory and writes it in the background, `ours, blocking` is `checkpoint.blocking=true`, and the others are
`torch.distributed.checkpoint.async_save` and `save` of the same tensors, which they get whole. Printed are the seconds
until training could continue, the seconds until the checkpoint is on disk, its bytes, and the median over the rounds of
the ratio of the blocked seconds to those of `ours`. Ours includes gathering the state from the ZeRO partitions, and
SHA-256 sums.

The last line estimates the share of the training time that checkpoints of ViT-B/16 take on a node with H100 GPUs, from
assumed rates.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from jobs.bench.harness import alternate, parser, ratios, show
from pipeline.checkpoint.writer import CheckpointConfig, CheckpointWriter, Snapshot
from pipeline.distributed.start import start_world
from pipeline.distributed.world import World
from pipeline.engine.deepspeed_engine import DeepSpeedEngine
from pipeline.engine.engine_config import EngineConfig
from pipeline.engine.optim import OptimizerConfig
from pipeline.metrics.mfu import known_peak, training_flops
from pipeline.model.architectures import Architecture
from pipeline.model.towers import ModelConfig, build_towers

WAYS = ("ours", "ours, blocking", "DCP async_save", "DCP save")
COPY_BYTES_PER_SECOND, GATHERED_BYTES_PER_SECOND, SECONDS_PER_TENSOR = 5e9, 100e9, 1e-4
"""Assumed for a node of GPUs: copies to pageable host memory, sums over the ranks, and what else a tensor takes."""
MFU = 0.31
LOCAL_BATCH = 640

Save = Callable[[], Callable[[], Any]]
"""Saves a checkpoint; what it returns waits until the checkpoint is on disk."""


def trained_engine(args: argparse.Namespace, world: World) -> tuple[DeepSpeedEngine, Architecture]:
    """An engine after one step, so that the optimizer has moments."""
    towers, architecture = build_towers(ModelConfig(arch=args.arch), seed=0)
    engine = DeepSpeedEngine(
        towers.to(world.device),
        config=EngineConfig(deepspeed=f"zero{args.stage}_{args.precision}"),
        optimizer=OptimizerConfig(),
        world=world,
        global_batch=2,
    )
    engine.train()
    size = architecture.image_size
    image = torch.randn(2, 3, size, size, device=world.device, dtype=engine.dtype)
    text = architecture.tokenize(["a photo", "a drawing"]).to(world.device)
    features = engine.forward(image, text)
    gradients = (torch.randn_like(features[0]), torch.randn_like(features[1]))
    engine.backward(features, gradients)
    assert engine.step(lr_scale=1.0)
    return engine, architecture


def snapshot_of(engine: DeepSpeedEngine, step: int) -> Snapshot:
    """The state on the CPU, as `RunState.snapshot` takes it."""
    state = engine.state
    return Snapshot(
        step=step,
        weights=dict(state.weights()),
        moments={(name, key): value for name, key, value in state.moments()},
        counter=state.counter(),
        objective={},
        rows={},
        logit=(0.0, 0.0),
        facts={},
    )


def ways(engine: DeepSpeedEngine, architecture: Architecture, *, folder: Path, world: World) -> dict[str, Save]:
    """The contenders, each of which saves under `folder`."""
    from torch.distributed import checkpoint as dcp

    tensors: dict[str, Tensor] = {name: value.to(world.device) for name, value in engine.state.weights()}
    tensors |= {f"{key}/{name}": value.to(world.device) for name, key, value in engine.state.moments()}
    events: list[str] = []

    def writer(name: str, *, blocking: bool) -> CheckpointWriter:
        config = CheckpointConfig(keep_last=1, blocking=blocking)
        return CheckpointWriter(
            folder / name, config=config, world=world, architecture=architecture, on_event=events.append
        )

    def ours(writer: CheckpointWriter) -> Save:
        def save() -> Callable[[], Any]:
            writer.save(snapshot_of(engine, 1))

            def wait() -> None:
                writer.wait()
                assert "written" in events[-1], events[-1]

            return wait

        return save

    def asynchronous() -> Callable[[], Any]:
        future: Any = dcp.async_save(tensors, checkpoint_id=folder / "async")
        return future.result

    def synchronous() -> Callable[[], Any]:
        dcp.save(tensors, checkpoint_id=folder / "sync")
        return lambda: None

    background, blocking = writer("ours", blocking=False), writer("blocking", blocking=True)
    return dict(zip(WAYS, (ours(background), ours(blocking), asynchronous, synchronous), strict=True))


def timed(save: Save, *, folder: Path) -> tuple[float, float, int]:
    """Seconds blocked, seconds until it was on disk, and bytes, of a checkpoint in an empty folder."""
    shutil.rmtree(folder)
    (folder / "ours").mkdir(parents=True)
    (folder / "blocking").mkdir()
    start = time.perf_counter()
    wait = save()
    blocked = time.perf_counter() - start
    wait()
    written = time.perf_counter() - start
    return blocked, written, sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def estimate(*, every: int) -> str:
    """The share of training time for which checkpoints of ViT-B/16 would stop a node of H100 GPUs. Not measured."""
    model = ModelConfig(arch="ViT-B-16")
    towers, _ = build_towers(model, seed=0, device="meta")
    weights = list(towers.clip.parameters())
    tensors, size = 3 * len(weights), 3 * 4 * sum(weight.numel() for weight in weights)  # fp32, and two moments
    blocked = size / COPY_BYTES_PER_SECOND + size / GATHERED_BYTES_PER_SECOND + tensors * SECONDS_PER_TENSOR
    step = LOCAL_BATCH * training_flops(model) / (MFU * (known_peak("NVIDIA H100") or 0.0) * 1e12)
    return (
        f"Estimate, not measured, for ViT-B/16 on H100s with {LOCAL_BATCH} pairs per GPU and {MFU:.0%} MFU: a step "
        f"takes {step:.2f} s; {size / 1e9:.2f} GB in {tensors} tensors stop it for {blocked:.2f} s at "
        f"{COPY_BYTES_PER_SECOND / 1e9:.0f} GB/s to host memory, {GATHERED_BYTES_PER_SECOND / 1e9:.0f} GB/s between "
        f"the GPUs and {1000 * SECONDS_PER_TENSOR:.1f} ms a tensor, which is "
        f"{blocked / (every * step):.2%} of the time at a checkpoint every {every} steps."
    )


def main() -> None:
    given = parser(__doc__, rounds=5)
    given.add_argument("--arch", default="ViT-B-16")
    given.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=2, help="ZeRO stage")
    given.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    given.add_argument("--every", type=int, default=500, help="steps between checkpoints, for the estimate")
    given.add_argument("--folder", help="where to write; default: the folder for temporary files")
    args = given.parse_args()
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary, start_world() as world:
        folder = Path(temporary) / "checkpoints"
        folder.mkdir()
        engine, architecture = trained_engine(args, world)
        saves = ways(engine, architecture, folder=folder, world=world)
        calls = {way: functools.partial(timed, save, folder=folder) for way, save in saves.items()}
        taken = {way: list(zip(*found, strict=True)) for way, found in alternate(calls, rounds=args.rounds).items()}
        rows = {
            way: (median(blocked), median(written), median(size) / 1e9, *ratios(blocked, taken["ours"][0]))
            for way, (blocked, written, size) in taken.items()
        }
        columns = {
            "blocked s": ".2f",
            "on disk s": ".2f",
            "GB": ".2f",
            "/ ours": ".2f",
            "lowest": ".2f",
            "highest": ".2f",
        }
        show(f"{args.arch}, ZeRO-{args.stage}, {args.precision}, {world.device}", columns, rows, output=args.json)
        print(estimate(every=args.every))


if __name__ == "__main__":
    main()

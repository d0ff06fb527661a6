"""Record a training step at every ZeRO stage, with and without GradCache, as one of RANKS ranks; prints JSON.

python -m tests.cuda_without_gpu.training_steps RANKS
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.testing._internal.distributed.fake_pg import FakeStore

from pipeline.distributed.timing import Meter
from pipeline.distributed.world import World
from pipeline.engine.deepspeed_engine import DeepSpeedEngine
from pipeline.engine.engine_config import EngineConfig
from pipeline.engine.optim import OptimizerConfig
from pipeline.model.towers import ModelConfig, build_towers
from pipeline.model.trimming import TextChunks, text_trimming
from pipeline.objectives import build_objective
from pipeline.training.inputs import Inputs
from pipeline.training.loop import Trainer
from pipeline.training.step import TrainStep, micro_batches
from tests.cuda_without_gpu.recorder import Record, RecordedPhases, pretend, recording
from tests.towers import write_tiny

LOCAL, MICRO = 8, 4
QUEUED = "backward is queued"
FILES = ("zero0_fp32", "zero0_bf16", "zero1_bf16", "zero2_bf16", "zero3_bf16")  # 3 last: it patches torch


def take(file: str, arch: str, *, ranks: int, micro: int | None, record: Record) -> Record:
    """The second step of a new engine, as the trainer takes it."""
    phases = RecordedPhases(record)
    world = World(rank=0, size=ranks, phases=phases)
    towers, architecture = build_towers(ModelConfig(arch=arch), seed=0)
    trimming = text_trimming(towers.clip)
    engine = DeepSpeedEngine(
        towers,
        config=EngineConfig(deepspeed=file, micro_batch=micro),
        optimizer=OptimizerConfig(lr=1e-3),
        world=replace(world, device=torch.device("cuda", 0)),
        global_batch=ranks * LOCAL,
    )
    current = get_accelerator().current
    assert current == {0}, f"DeepSpeed takes GPU {current}, where each task sees only its own"
    engine.module.train()
    objective = build_objective(
        {"name": "openclip"}, dim=architecture.dim, batch_size=ranks * LOCAL, world=world, device=world.device
    )
    chunks, note = micro_batches(LOCAL, micro), lambda *_: record.note(QUEUED)
    step = TrainStep(engine, objective, world=world, seed=0, chunks=chunks)
    size = architecture.image_size
    image = torch.randn(LOCAL, 3, size, size, generator=torch.Generator().manual_seed(0)).to(engine.dtype)
    text = architecture.tokenize([f"a photo of number {index}" for index in range(LOCAL)])
    ids, lengths = torch.arange(LOCAL), trimming.cut(text)[1] if trimming else None
    # Padded: packed texts need a kernel of GPUs. They are laid out and copied in the thread that fetches a batch.
    inputs = Inputs(image, TextChunks(text, chunks, lengths=lengths), ids)
    position = SimpleNamespace(epoch=0, batch=1)
    batch: Any = SimpleNamespace(image=image, text=text, sample_id=ids, position=position)
    trainer: Any = SimpleNamespace(
        state=SimpleNamespace(step=0, normalized=lambda image: image),
        batches=SimpleNamespace(inputs=lambda _: inputs, fetch_ahead=lambda _: None),
        take_step=step,
        meter=Meter(LOCAL, phases),
        phases=phases,
        world=world,
        features=None,
    )
    for trainer.state.step in range(2):
        record.__init__()
        step.on_gradients = note
        with recording(record):
            result = Trainer.train_step(trainer, batch, lr_scale=1.0)
        assert result.applied
    return record


def main(ranks: int) -> None:
    os.environ["LOCAL_RANK"] = "3"  # the fourth rank of its node, which sees one GPU
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as the engine does on a CPU
    record = Record()
    pretend(record)
    if ranks == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        arch = write_tiny(Path(folder))
        for file in FILES:
            for micro in (None, MICRO):
                name = file + (" GradCache" if micro else "")
                found[name] = asdict(take(file, arch, ranks=ranks, micro=micro, record=record))
    print("RECORDS " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))

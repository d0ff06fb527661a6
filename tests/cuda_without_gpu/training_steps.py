"""Record a training step at every ZeRO stage, with and without GradCache, as one of RANKS ranks; prints JSON.

python -m tests.cuda_without_gpu.training_steps RANKS

The step runs on CPU tensors with values, which DeepSpeed takes for CUDA: it asks its accelerator whether a device is
synchronous, and takes other branches (streams, events, waits) where it is not. `CudaLike` says so, and records when the
host waits. A dispatch mode counts operators and collectives.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.distributed.timing import Meter, Phases
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
from tests.cuda_without_gpu.kernel_trace import FREE, FakeStream
from tests.towers import write_tiny

READS = ("item", "tolist", "__bool__", "__float__", "__int__", "nonzero", "cpu", "numpy")
"""Methods that read a tensor's values: for one on a GPU the host waits."""
OUTSIDE = ("/torch/", "/training_steps.py", "/contextlib.py", "/nvtx.py", "/logging.py")


@dataclass
class Record:
    """The events of a step, in their order."""

    events: list[str] = field(default_factory=list)
    """`launch PHASE` once for a row of operators, `collective NAME`, and `wait PLACE`."""
    kernels: dict[str, int] = field(default_factory=dict)
    """Operators by phase."""
    collectives: list[tuple[str, str, str, int]] = field(default_factory=list)
    """Phase, name, dtype and bytes."""
    phase: str = ""

    def note(self, event):
        if not self.events or self.events[-1] != event:
            self.events.append(event)

    def wait(self):
        self.note(f"wait {caller()}")

    @property
    def waits(self):
        return [event.removeprefix("wait ") for event in self.events if event.startswith("wait ")]


def caller():
    """Folder, module and function that made the host wait."""
    frame: Any = sys._getframe(2)
    while frame is not None and any(part in frame.f_code.co_filename for part in OUTSIDE):
        frame = frame.f_back
    path = frame.f_code.co_filename.rpartition("site-packages/")[2].removesuffix(".py")
    place = "/".join(path.split("/")[-2:])
    return f"{place}:{frame.f_code.co_name}"


class CudaLike(CPU_Accelerator):
    """DeepSpeed's view of an asynchronous device whose tensors are in host memory."""

    def __init__(self, record):
        super().__init__()
        self.record = record
        self.current: set[int] = set()
        """Numbers of the devices that were made the current one."""

    def set_device(self, device_index):
        if isinstance(device_index, int):
            self.current.add(device_index)

    def is_synchronized_device(self):
        return False

    def use_host_timers(self):
        return False

    def resolves_data_dependency(self):
        return False

    def handles_memory_backpressure(self):
        return False

    def synchronize(self, device_index=None):
        self.record.wait()

    def Stream(self, *_, **__):
        return FakeStream(self.record.wait)

    Event = current_stream = default_stream = Stream

    def stream(self, stream):
        return nullcontext()


class _Operators(TorchDispatchMode):
    """Counts what would be launched."""

    def __init__(self, record):
        super().__init__()
        self.record = record

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name, record = func._overloadpacket.__name__, self.record
        if func.namespace == "c10d":
            tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
            size = max(t.numel() * t.element_size() for t in tensors)
            record.collectives.append((record.phase, name, str(tensors[0].dtype).removeprefix("torch."), size))
            record.note(f"collective {name}")
        elif func.namespace == "aten" and name not in FREE and not func.is_view and name != "_local_scalar_dense":
            record.kernels[record.phase] = record.kernels.get(record.phase, 0) + 1
            record.note(f"launch {record.phase}")
        return out


class RecordedPhases(Phases):
    """The phases of a step, which also name the record's."""

    def __init__(self, record):
        super().__init__(torch.device("cpu"))
        self._record = record

    @contextmanager
    def __call__(self, name):
        if name == "communication":  # within other phases
            yield
            return
        before, self._record.phase = self._record.phase, name
        try:
            with super().__call__(name):
                yield
        finally:
            self._record.phase = before


@contextmanager
def recording(record):
    """Record what runs inside."""

    def reading(name):
        original = getattr(Tensor, name)

        def read(tensor, *args, **kwargs):
            record.wait()
            with mock.patch.object(record, "wait"):  # one reading calls another
                return original(tensor, *args, **kwargs)

        return read

    with ExitStack() as stack:
        for name in READS:
            stack.enter_context(mock.patch.object(Tensor, name, reading(name)))
        stack.enter_context(_Operators(record))
        yield


LOCAL, MICRO = 8, 4
QUEUED = "backward is queued"
FILES = ("zero0_fp32", "zero0_bf16", "zero1_bf16", "zero2_bf16", "zero3_bf16")  # 3 last: it patches torch


def take(file, arch, *, ranks, micro, record):
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


def main(ranks):
    os.environ["LOCAL_RANK"] = "3"  # the fourth rank of its node, which sees one GPU
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as the engine does on a CPU
    record = Record()
    set_accelerator(CudaLike(record))  # from now on, for this process, DeepSpeed takes the CPU for a GPU
    Tensor.record_stream = lambda tensor, stream: None
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

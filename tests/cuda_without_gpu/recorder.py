"""What a training step does on a GPU, recorded without one: on CPU tensors with values, which DeepSpeed takes for CUDA.

DeepSpeed asks its accelerator whether a device is synchronous, and takes other branches (streams, events, waits) where
it is not. `CudaLike` says so, and records when the host waits. A dispatch mode counts operators and collectives.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.distributed.timing import Phases
from tests.cuda_without_gpu.kernel_trace import FREE, FakeStream

READS = ("item", "tolist", "__bool__", "__float__", "__int__", "nonzero", "cpu", "numpy")
"""Methods that read a tensor's values: for one on a GPU the host waits."""
OUTSIDE = ("/torch/", "/recorder.py", "/contextlib.py", "/nvtx.py", "/logging.py")


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

    def note(self, event: str) -> None:
        if not self.events or self.events[-1] != event:
            self.events.append(event)

    def wait(self) -> None:
        self.note(f"wait {caller()}")

    @property
    def waits(self) -> list[str]:
        return [event.removeprefix("wait ") for event in self.events if event.startswith("wait ")]


def caller() -> str:
    """Folder, module and function that made the host wait."""
    frame: Any = sys._getframe(2)
    while frame is not None and any(part in frame.f_code.co_filename for part in OUTSIDE):
        frame = frame.f_back
    path = frame.f_code.co_filename.rpartition("site-packages/")[2].removesuffix(".py")
    place = "/".join(path.split("/")[-2:])
    return f"{place}:{frame.f_code.co_name}"


class CudaLike(CPU_Accelerator):
    """DeepSpeed's view of an asynchronous device whose tensors are in host memory."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record
        self.current: set[int] = set()
        """Numbers of the devices that were made the current one."""

    def set_device(self, device_index: int | torch.device) -> None:
        if isinstance(device_index, int):
            self.current.add(device_index)

    def is_synchronized_device(self) -> bool:
        return False

    def use_host_timers(self) -> bool:
        return False

    def resolves_data_dependency(self) -> bool:
        return False

    def handles_memory_backpressure(self) -> bool:
        return False

    def synchronize(self, device_index: object = None) -> None:
        self.record.wait()

    def Stream(self, *_: object, **__: object) -> FakeStream:
        return FakeStream(self.record.wait)

    Event = current_stream = default_stream = Stream

    def stream(self, stream: object) -> Any:
        return nullcontext()


class _Operators(TorchDispatchMode):
    """Counts what would be launched."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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

    def __init__(self, record: Record) -> None:
        super().__init__(torch.device("cpu"))
        self._record = record

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if name == "communication":  # within other phases
            yield
            return
        before, self._record.phase = self._record.phase, name
        try:
            with super().__call__(name):
                yield
        finally:
            self._record.phase = before


def pretend(record: Record) -> None:
    """From now on, for this process, DeepSpeed takes the CPU for a GPU."""
    set_accelerator(CudaLike(record))
    Tensor.record_stream = lambda tensor, stream: None


@contextmanager
def recording(record: Record) -> Iterator[None]:
    """Record what runs inside."""

    def reading(name: str) -> Any:
        original = getattr(Tensor, name)

        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            record.wait()
            with mock.patch.object(record, "wait"):  # one reading calls another
                return original(tensor, *args, **kwargs)

        return read

    with ExitStack() as stack:
        for name in READS:
            stack.enter_context(mock.patch.object(Tensor, name, reading(name)))
        stack.enter_context(_Operators(record))
        yield

"""What code would run on a GPU, found without one: kernels with their bytes, and copies that make the host wait.

The code runs on tensors without values: fake CUDA tensors (torch's `FakeTensorMode`), or tensors on the meta device
where autograd is needed, because its engine asks the CUDA driver for streams. Reading a value of such a tensor
(`.item()`, `bool()`, `nonzero`) raises.
"""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, is_dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICES = ("cuda", "meta")
FREE = frozenset(
    {"_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "device", "empty", "empty_like"}
    | {"empty_strided", "expand", "is_pinned", "lift_fresh", "new_empty", "new_empty_strided", "record_stream"}
    | {"select", "set_", "slice", "sym_size", "t", "view"}
)
"""Operators that launch nothing, beside views."""
_OVERWRITING = frozenset({"copy_", "fill_", "zero_"})


@dataclass(frozen=True)
class Kernel:
    """One operator that runs on the device, as one kernel."""

    name: str
    bytes_read: int
    bytes_written: int
    part: str
    """Of the program, see `KernelTrace.within`."""

    @property
    def bytes(self):
        return self.bytes_read + self.bytes_written


class KernelTrace(TorchDispatchMode):
    """Records the kernels of what runs inside, and copies between devices for which the host would wait.

    A copy from or into page-locked memory that is asked for as non-blocking makes nobody wait; nor does a number on the
    host that a kernel takes as an argument.
    """

    def __init__(self, device="cuda"):
        super().__init__()
        self.device = device
        """Where the program runs."""
        self.kernels: list[Kernel] = []
        self.collectives: list[tuple[str, str, torch.dtype]] = []
        """Name, device and precision; World counts their bytes."""
        self.blocking_copies: list[str] = []
        self.pinned: list[Tensor] = []
        """Tensors in page-locked memory; `fake_gpu` adds to them."""
        self.waits = 0
        """How often the host waited for an event of a stream."""
        self.part = ""
        self._fusion: _Fusion | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.pop("pin_memory", None):
            return self._on_host(func, args, kwargs, pinned=True)
        name, inputs = func._overloadpacket.__name__, _tensors(args, kwargs)
        if func.namespace == "c10d":
            self.collectives.append((name, inputs[0].device.type, inputs[0].dtype))
        if not _on_device(inputs, kwargs.get("device")):
            return self._on_host(func, args, kwargs)
        non_blocking = bool(_by_name(func, args, kwargs).get("non_blocking"))
        if name == "copy_" and args[0].device.type == "cpu":
            self._note_copy(name, [args[1]], [args[0]], non_blocking=non_blocking)
            return self._on_host(torch.ops.aten.zero_.default, args[:1], {})  # the values do not exist
        out = func(*args, **kwargs)
        if func.namespace != "aten":
            return out
        outputs = _tensors(out)
        if name in ("_to_copy", "copy_") and len({t.device.type for t in inputs + outputs}) > 1:
            self._note_copy(name, inputs, outputs, non_blocking=non_blocking)
        elif name in FREE or func.is_view or (name == "_to_copy" and out is inputs[0]):
            pass
        elif not any(t.numel() for t in inputs + outputs):
            pass  # nothing is launched for empty tensors
        elif self._fusion is not None:
            self._fusion.note(_written(func, args, kwargs), _read(func, args, kwargs))
        else:
            self.kernels.append(_kernel(func, args, kwargs, out, part=self.part))
        return out

    def _on_host(self, func, args, kwargs, *, pinned=False):
        """Host tensors have values, so that bookkeeping on the host works as it does in training."""
        with unset_fake_temporarily():
            out = func(*args, **kwargs)
        if pinned:
            self.pinned.append(out)
        return out

    def _note_copy(self, name, inputs, outputs, *, non_blocking):
        host = [t for t in (*inputs, *outputs) if t.device.type == "cpu"]
        meta = any(t.device.type == "meta" for t in (*inputs, *outputs))  # nothing is page-locked for it
        pinned = {t.untyped_storage().data_ptr() for t in self.pinned}
        asynchronous = non_blocking and (meta or any(t.untyped_storage().data_ptr() in pinned for t in host))
        if not asynchronous:
            shapes = " to ".join(f"{t.device.type}{list(t.shape)}" for t in (inputs[-1], outputs[0]))
            self.blocking_copies.append(f"{name}: {shapes}")

    def note_wait(self):
        self.waits += 1

    @contextmanager
    def within(self, part):
        """Inside, kernels belong to this part of the program."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    def fused(self, formula, *arguments):
        """formula(*arguments), counted as one kernel, which reads each of its arguments at most once."""
        given = [t for a in arguments for t in (vars(a).values() if is_dataclass(a) else (a,)) if isinstance(t, Tensor)]
        self._fusion = fusion = _Fusion(given)
        try:
            result = formula(*arguments)
        finally:
            self._fusion = None
        self.kernels.append(Kernel(formula.__name__, *fusion.traffic(_tensors(result)), self.part))
        return result


class _Fusion:
    """The memory traffic of a fused kernel: arguments that are read before they are written, and what is written."""

    def __init__(self, arguments):
        self._arguments = {_storage(t): t for t in arguments}
        self._read, self._written = set[int](), set[int]()

    def note(self, written, read):
        self._read |= ({_storage(t) for t in read} & self._arguments.keys()) - self._written
        self._written |= {_storage(t) for t in written} & self._arguments.keys()

    def traffic(self, results):
        """Bytes read and bytes written."""
        new = {_storage(t): t for t in results if _storage(t) not in self._arguments}
        written = (*(self._arguments[key] for key in self._written), *new.values())
        return sum(_bytes(self._arguments[key]) for key in self._read), sum(map(_bytes, written))


@contextmanager
def fake_gpu(device="cuda"):
    """Inside, tensors on `device` have no values, and what would run on a GPU is recorded.

    Args:
        device: "cuda" for fake CUDA tensors, which exist without a GPU; "meta" where autograd runs inside.
    """
    trace = KernelTrace(device)

    def pin(tensor):
        trace.pinned.append(tensor)
        return tensor

    replaced: list[tuple[Any, str, Any]] = [
        (Tensor, "pin_memory", pin),
        (Tensor, "record_stream", lambda tensor, stream: None),
        (torch.cuda, "Stream", lambda device=None: FakeStream(trace.note_wait)),
        (torch.cuda, "current_stream", lambda device=None: FakeStream(trace.note_wait)),
        (torch.cuda, "stream", lambda stream: nullcontext()),
    ]
    with ExitStack() as stack:
        for where, name, value in replaced:
            stack.enter_context(mock.patch.object(where, name, value))
        if device == "cuda":
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield stack.enter_context(trace)


class FakeStream:
    """A CUDA stream, or an event; `wait` is called when the host waits for it."""

    def __init__(self, wait):
        self.synchronize = wait

    def query(self):
        return False

    def record_event(self, event=None):
        return self

    def record(self, stream=None): ...

    def wait_stream(self, stream): ...

    def wait_event(self, event): ...


def _tensors(*trees):
    return [leaf for leaf in tree_leaves(trees) if isinstance(leaf, Tensor)]


def _on_device(inputs, device):
    """Whether an operator's inputs are on the device, or its results because `device` is given."""
    places = [t.device for t in inputs] + ([] if device is None else [torch.device(device)])
    return any(place.type in DEVICES for place in places)


def _kernel(func, args, kwargs, out, *, part):
    written = {id(t): t for t in (*_tensors(out), *_written(func, args, kwargs))}
    read = sum(map(_bytes, _read(func, args, kwargs)))
    return Kernel(func._overloadpacket.__name__, read, sum(map(_bytes, written.values())), part)


def _read(func, args, kwargs):
    return _tensors(args[1:] if func._overloadpacket.__name__ in _OVERWRITING else args, {**kwargs, "out": None})


def _written(func, args, kwargs):
    """Arguments that an operator changes in place."""
    named = _by_name(func, args, kwargs)
    changed = (a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return _tensors([named.get(name) for name in changed])


def _by_name(func, args, kwargs):
    """All given arguments of an operator."""
    return dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs


def _storage(tensor):
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensor):
    """Bytes of memory that a tensor's elements take; expanded dimensions count once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(sizes) * tensor.element_size()

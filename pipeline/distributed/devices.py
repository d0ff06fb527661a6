"""The device of a rank, and what it computes in: fp32 without TF32, and bf16 unless the device is slow in it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import UserError, in_a_line

SLOW_BF16 = 3.0
"""From this ratio on, `cpu_bf16_slowdown` means that training in bf16 is slower. A step of the demo takes as long in
bf16 as in fp32 at a ratio of 1.7, twice as long at 5, and 8 times as long at 12 (docs/benchmarks.md)."""


def choose_device(name: str, *, local_rank: int) -> torch.device:
    """This rank's device by its `name`, "auto", "cpu" or "cuda"; it becomes torch's current one.

    Where torch sees a single GPU, every rank takes it: `srun --gpus-per-task=1` shows each rank its own.

    Raises:
        UserError: There is no such device, or it cannot be used.
    """
    available, host = torch.cuda.is_available(), socket.gethostname()
    if name == "cpu" or (name == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise UserError(
            f"engine.device = 'cuda', but torch sees no CUDA device here ({host}): use 'auto' or 'cpu', or look at "
            "`nvidia-smi` and `neuclip doctor` on this node."
        )
    index = local_rank if (count := torch.cuda.device_count()) > 1 else 0
    try:
        torch.cuda.set_device(index)  # from CUDA 12 on, this takes hold of the GPU
    except RuntimeError as error:
        raise UserError(
            f"GPU {index} of {host}, where torch sees {count}, cannot be used: {in_a_line(error)}. Start at most one "
            "process per GPU; look at `nvidia-smi` and `neuclip doctor` on this node: end the program that holds the "
            "GPU, or leave the node out."
        ) from error
    return torch.device("cuda", index)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device. Through page-locked memory: for other memory the host may wait for the GPU."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done what was queued so far, and sleep until then.

    Where a tensor is read, the CUDA driver by default spins, which keeps a core from the loading workers.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).record_event(torch.cuda.Event(blocking=True)).synchronize()


def why_bf16_is_slow(device: torch.device) -> str:
    """A sentence for the log if `device` computes matrix products much more slowly in bf16 than in fp32; else empty."""
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return ""
        return f"{torch.cuda.get_device_name(device)} has no bf16 arithmetic: torch emulates it."
    ratio = cpu_bf16_slowdown()
    if ratio <= SLOW_BF16:
        return ""
    return f"Matrix products in bf16 take {ratio:.0f} times as long as in fp32 on this CPU."


@cache
def cpu_bf16_slowdown() -> float:
    """Time of a matrix product in bf16 on this CPU, divided by its time in fp32; measured in a fraction of a second.

    1.7 on an Intel Xeon with AVX512_BF16 and without AMX; there, 5 with torch restricted to AVX-512, and 12 with AVX2.
    """
    rows, depth, columns = 256, 512, 512

    def seconds(dtype: torch.dtype) -> float:
        x, weights = torch.ones(rows, depth, dtype=dtype), torch.ones(columns, depth, dtype=dtype)
        times = []
        for _ in range(4):  # the first is a warm-up
            start = time.process_time()
            torch.nn.functional.linear(x, weights)
            times.append(time.process_time() - start)
        return min(times)

    return seconds(torch.bfloat16) / max(seconds(torch.float32), 1e-6)


def keep_fp32(device: torch.device) -> None:
    """Let fp32 convolutions of this process be in fp32: cuDNN's default is TF32, unlike that of matrix products."""
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False


@contextmanager
def true_fp32(device: torch.device) -> Iterator[None]:
    """Inside, fp32 matrix products and convolutions do not use TF32 or bf16, and there is no autocast on this kind of
    device, whatever the process allows otherwise.

    At tau = 0.01, TF32 would cause an error of about 0.05 in the exponent of a similarity.

    torch has an older and a newer interface to these settings, and raises when one is read while the two disagree
    (torch.compile reads the older). So both are set, unless they disagreed already.
    """
    backends: Any = torch.backends
    cuda, mkldnn = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn), backends.mkldnn
    operators = (*cuda, mkldnn.matmul, mkldnn.conv)
    matmul = convolution = None
    with suppress(RuntimeError):  # torch refuses to read a setting where only the newer interface was used
        matmul = torch.get_float32_matmul_precision()
    with suppress(RuntimeError):
        convolution = backends.cudnn.allow_tf32
    before = [operator.fp32_precision for operator in operators]
    if matmul not in (None, "highest"):
        torch.set_float32_matmul_precision("highest")
    if convolution:
        backends.cudnn.allow_tf32 = False
    for operator in operators:
        operator.fp32_precision = "ieee"
    kind = "cpu" if device.type == "meta" else device.type  # there is no autocast for the meta device
    try:
        with torch.autocast(kind, enabled=False):
            yield
    finally:
        if matmul not in (None, "highest"):
            torch.set_float32_matmul_precision(matmul)
        if convolution:
            backends.cudnn.allow_tf32 = True
        for operator, precision in zip(operators, before, strict=True):
            operator.fp32_precision = precision

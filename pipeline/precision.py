"""fp32 arithmetic without TF32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def true_fp32() -> Iterator[None]:
    """Inside, fp32 matrix products and convolutions do not use TF32 or bf16, whatever the process allows otherwise.

    At tau = 0.01, TF32 would cause an error of about 0.05 in the exponent of a similarity.

    torch has an older and a newer interface to these settings, and raises when one is read while the two disagree
    (torch.compile reads the older). So both are set, unless they disagreed already.
    """
    backends: Any = torch.backends
    cuda, mkldnn = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn), backends.mkldnn
    operators = (*cuda, mkldnn.matmul, mkldnn.conv)
    matmul, convolution = _unless_mixed(torch.get_float32_matmul_precision), _unless_mixed(_cudnn_allows_tf32)
    before = [operator.fp32_precision for operator in operators]
    if matmul not in (None, "highest"):
        torch.set_float32_matmul_precision("highest")
    if convolution:
        backends.cudnn.allow_tf32 = False
    for operator in operators:
        operator.fp32_precision = "ieee"
    try:
        yield
    finally:
        if matmul not in (None, "highest"):
            torch.set_float32_matmul_precision(str(matmul))
        if convolution:
            backends.cudnn.allow_tf32 = True
        for operator, precision in zip(operators, before, strict=True):
            operator.fp32_precision = precision


def _cudnn_allows_tf32() -> bool:
    return bool(torch.backends.cudnn.allow_tf32)


def _unless_mixed(read: Callable[[], Any]) -> Any:
    """A setting of the older interface; None where torch refuses because only the newer one was used."""
    try:
        return read()
    except RuntimeError:
        return None

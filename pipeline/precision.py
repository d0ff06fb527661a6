"""fp32 arithmetic without TF32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def true_fp32() -> Iterator[None]:
    """Inside, fp32 matrix products and convolutions do not use TF32 or bf16, whatever the process allows otherwise.

    At tau = 0.01, TF32 would cause an error of about 0.05 in the exponent of a similarity.
    """
    backends: Any = torch.backends
    operators = (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
    before = [operator.fp32_precision for operator in operators]
    for operator in operators:
        operator.fp32_precision = "ieee"
    try:
        yield
    finally:
        for operator, precision in zip(operators, before, strict=True):
            operator.fp32_precision = precision

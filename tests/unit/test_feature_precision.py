"""No products in TF32."""

from __future__ import annotations

import pytest
import torch

from pipeline.distributed.precision import keep_fp32, true_fp32


def test_convolutions_on_a_gpu_do_not_use_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression test: fp32 training and scores had TF32 in the patches' convolution."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    keep_fp32(torch.device("cpu"))
    assert torch.backends.cudnn.allow_tf32
    keep_fp32(torch.device("cuda"))
    assert not torch.backends.cudnn.allow_tf32
    with true_fp32(torch.device("cpu")):
        assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cudnn.allow_tf32

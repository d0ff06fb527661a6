"""What `objective.npn_compile` compiles is built for an H100 here, without a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.version import Version

HAS_BACKEND = torch.version.cuda is not None and importlib.util.find_spec("triton") is not None
WITHOUT_DRIVER = Version(torch.__version__) >= Version("2.12.dev0")
"""Before, a fake tensor that inductor lowers starts CUDA."""
# The kernels of each formula: one, but for the one that computes [R] weights and multiplies [R, d] features by them.
KERNELS = {"_adagrad": 1, "_squares": 1, "_exponentials": 1, "_sums": 1, "normalizer_of_mean": 1, "_exp_sum": 1,
           "_log_sum": 1, "_pull": 2}  # fmt: skip


@pytest.mark.slow  # lowers and builds about 20 programs
@pytest.mark.skipif(not HAS_BACKEND, reason="this build of torch comes without Triton's compiler for CUDA")
@pytest.mark.skipif(not WITHOUT_DRIVER, reason="this version of torch lowers programs for CUDA only with a driver")
def test_all_programs_of_a_compiled_network_build_for_an_h100(tmp_path):
    """In both modes of `npn_update`, with the paper's sizes."""
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    command = [sys.executable, "-m", "tests.cuda_without_gpu.gpu_builds"]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, cwd=root, env={**os.environ, **environment}, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    built = [json.loads(line) for line in done.stdout.splitlines()]
    assert {report["formula"] for report in built} == KERNELS.keys()
    for report in built:
        assert len(report["binaries"]) == KERNELS[report["formula"]], report
        assert all(size > 1000 for size in report["binaries"]), report
    shapes = {tuple(report["shapes"][0]) for report in built if report["formula"] == "_exponentials"}
    assert shapes == {(5120, 4096), (5120, 512)}, "products with all prototypes, and with a rank's own"

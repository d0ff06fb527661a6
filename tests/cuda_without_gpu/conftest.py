"""What replaces a GPU here is in the way of a real one: on an H200, torch ended with a segmentation fault."""

import pytest
import torch


def pytest_runtest_setup(item):
    if torch.cuda.is_available():
        pytest.skip("a GPU is visible: run these tests with CUDA_VISIBLE_DEVICES= (test_cuda.py uses the GPU)")

"""Several processes, also those of accelerate, give the same bytes as one; an error on one stops all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from pipeline.evaluation import evaluate
from pipeline.evaluation.datasets.datacomp import TASKS
from pipeline.evaluation.run.session import EvaluationConfig
from tests.checkpoints import contents, save_checkpoint
from tests.evaluation_suite import write_classification, write_one_of_each
from tests.launch import free_port, run

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("run") / "checkpoints" / "step-00000010", 0)


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("suite")
    return write_one_of_each(root, "imagenet1k", "wilds/fmow", flickr="save_to_disk", winogavil="parquet")


def two_ranks(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return run("jobs.evaluate", *arguments, ranks=2, check=False)


def accelerate(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += ["--main_process_port", str(free_port()), "--module", "jobs.evaluate", *arguments]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_the_number_of_processes_does_not_matter(checkpoint: Path, suite: Path, tmp_path: Path) -> None:
    settings = ["micro_batch=8", "batch_size=6", "workers=0"]
    evaluate(str(checkpoint), suite=suite, output=tmp_path / "one", config=EvaluationConfig(micro_batch=8, workers=0))
    for launch in (two_ranks, accelerate):
        many = tmp_path / launch.__name__
        done = launch([str(checkpoint), "--suite", str(suite), "--output", str(many), *settings])
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("imagenet1k") == 1  # one process prints
        assert contents(many) == contents(tmp_path / "one"), launch


@pytest.mark.slow
def test_an_error_on_one_process_fails_the_task_on_all_without_hanging(checkpoint: Path, tmp_path: Path) -> None:
    suite, output = tmp_path / "suite", tmp_path / "out"
    folder = write_classification(suite, TASKS["imagenet1k"])
    write_classification(suite, TASKS["imagenetv2"])
    path = folder / "test/1.tar"
    with tarfile.open(path) as tar:
        member = tar.getmembers()[-1]  # in the last micro-batch, which only one process evaluates
    blob = bytearray(path.read_bytes())
    blob[member.offset_data : member.offset_data + member.size] = b"\0" * member.size
    path.write_bytes(bytes(blob))
    arguments = [str(checkpoint), "--suite", str(suite), "--output", str(output), "--device", "cpu"]
    done = two_ranks([*arguments, "micro_batch=8", "workers=0"])
    assert done.returncode != 0
    summary = json.loads((output / "summary.json").read_text())
    assert "Corrupt image s0000021" in summary["failures"]["imagenet1k"]
    assert list(summary["scores"]) == ["imagenetv2"]

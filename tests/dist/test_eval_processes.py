"""Several processes, also those of accelerate, give the same bytes as one; an error on one stops all."""

import json

import pytest

from pipeline.evaluation import evaluate
from pipeline.evaluation.datasets.datacomp import TASKS
from pipeline.evaluation.run.session import EvaluationConfig
from tests.checkpoints import contents, save_checkpoint
from tests.evaluation_damage import members
from tests.evaluation_suite import write_classification, write_one_of_each
from tests.launch import free_port, run
from tests.shards import write_members


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("run") / "checkpoints" / "step-00000010", 0)


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    root = tmp_path_factory.mktemp("suite")
    return write_one_of_each(root, "imagenet1k", "wilds/fmow", flickr="save_to_disk", winogavil="parquet")


@pytest.mark.slow
def test_processes_of_accelerate_give_the_same_bytes_as_one(checkpoint, suite, tmp_path):
    one, many = tmp_path / "one", tmp_path / "many"
    evaluate(str(checkpoint), suite=suite, output=one, config=EvaluationConfig(micro_batch=8, workers=0))
    launcher = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    launcher += ["--dynamo_backend", "no", "--main_process_port", str(free_port()), "--module", "jobs.evaluate"]
    settings = ["--suite", str(suite), "--output", str(many), "micro_batch=8", "batch_size=6", "workers=0"]
    done = run("accelerate.commands.launch", *launcher, str(checkpoint), *settings)
    assert done.stdout.count("imagenet1k") == 1  # one process prints
    assert contents(many) == contents(one)


@pytest.mark.slow
def test_an_error_on_one_process_fails_the_task_on_all_without_hanging(checkpoint, tmp_path):
    suite, output = tmp_path / "suite", tmp_path / "out"
    folder = write_classification(suite, TASKS["imagenet1k"])
    write_classification(suite, TASKS["imagenetv2"])
    body = members(folder / "test/1.tar")
    last = [*body][-1]  # in the last micro-batch, which only one process evaluates
    write_members(folder / "test/1.tar", {**body, last: bytes(400)}.items())
    arguments = [str(checkpoint), "--suite", str(suite), "--output", str(output), "--device", "cpu"]
    done = run("jobs.evaluate", *arguments, "micro_batch=8", "workers=0", ranks=2, check=False)
    assert done.returncode != 0
    summary = json.loads((output / "summary.json").read_text())
    assert "Corrupt image s0000021" in summary["failures"]["imagenet1k"]
    assert list(summary["scores"]) == ["imagenetv2"]

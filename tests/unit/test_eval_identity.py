"""A stored score is used only for what it was scored on and with; what is replaced meanwhile is noticed."""

import json
import shutil
from importlib import metadata

import numpy as np
import pytest

from pipeline.errors import UserError
from pipeline.evaluation.datasets.datacomp import TASKS
from pipeline.evaluation.datasets.suite import open_suite
from pipeline.evaluation.identity import ROOT, code_digest, code_version
from pipeline.evaluation.run import images
from pipeline.files import read_tree
from pipeline.report.stored_scores import read_evaluations
from pipeline.versions import version_of
from tests.checkpoints import contents, scored
from tests.evaluation_suite import write_classification
from tests.launch import python
from tests.own_tasks import write_class_folders


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    root = tmp_path_factory.mktemp("suite")
    for key in ("cifar10", "mnist", "stl10"):
        write_classification(root, TASKS[key], samples=20)
    return root


def test_a_copy_of_the_repository_that_is_not_installed_can_evaluate(monkeypatch):
    """Regression test: on a GPU machine whose PYTHONPATH named the folder, every evaluation was "probably a bug"."""

    def absent(package):
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", absent)
    version_of.cache_clear()
    try:
        assert code_version.__wrapped__() == f"absent {code_digest(ROOT)}"
    finally:
        version_of.cache_clear()


def test_the_codes_digest_covers_every_module_that_an_evaluation_imports(tmp_path):
    shutil.copytree(ROOT / "pipeline", tmp_path / "pipeline", ignore=shutil.ignore_patterns("__pycache__"))
    whole = code_digest(tmp_path)
    assert whole == code_digest(ROOT)
    program = "import sys, jobs.evaluate, pipeline.evaluation.run.evaluator; print(*sys.modules)"
    names = [name for name in python("-c", program).stdout.split() if name.split(".")[0] == "pipeline"]
    assert {"pipeline.pictures.pixels", "pipeline.model.trimming", "pipeline.evaluation.compute"} <= set(names)
    for path in (tmp_path.joinpath(*name.split(".")) for name in names):
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        body = path.read_bytes()
        path.write_bytes(body + b"\n")
        assert code_digest(tmp_path) != whole, path
        path.write_bytes(body)


def evaluated(model, suite, output, *keys, **settings):
    """Evaluate some tasks and return the summary."""
    scored(model, open_suite(suite, tasks=keys), output, **settings)
    return read_tree(output / "summary.json")


def test_a_result_in_another_tasks_place_is_not_counted_and_computed_again(model, suite, tmp_path):
    tmp_path /= "out"
    evaluated(model, suite, tmp_path, "cifar10", "mnist")
    whole = contents(tmp_path)
    shutil.copy(tmp_path / "cifar10.json", tmp_path / "mnist.json")
    summary = evaluated(model, suite, tmp_path, "cifar10")
    assert list(summary["scores"]) == ["cifar10"]
    assert "is damaged" in summary["left_out"]["mnist"]
    assert [json.loads(line)["key"] for line in (tmp_path / "eval_results.jsonl").open()] == ["cifar10"]
    notes: list[str] = []
    (found,) = read_evaluations(tmp_path.parent, lambda step: step, notes)
    assert [score.task for score in found.scores] == ["cifar10"], notes
    evaluated(model, suite, tmp_path, "cifar10", "mnist")
    assert contents(tmp_path) == whole


def test_a_result_without_whole_outcomes_is_not_reused(model, tmp_path):
    suite, output = tmp_path / "suite", tmp_path / "out"
    write_classification(suite, TASKS["mnist"], samples=8)
    first = scored(model, suite, output)
    outcomes = output / "mnist.outcomes.npz"
    for damage in (
        lambda: outcomes.write_bytes(outcomes.read_bytes()[:-40]),
        lambda: np.savez_compressed(outcomes, prediction=np.zeros(8, int), target=np.zeros(8, int)),  # of other samples
        outcomes.unlink,
    ):
        damage()
        (stored,) = (score for one in read_evaluations(tmp_path, lambda step: step, []) for score in one.scores)
        assert stored.read_outcomes() is None, "reports do not use them"
        again = scored(model, suite, output)
        assert not again.reused
        assert again.results["mnist"] == first.results["mnist"]
    assert scored(model, suite, output).reused


def test_other_prompts_or_another_metric_are_another_score(model, tmp_path):
    write_class_folders(tmp_path / "suite")
    yaml = tmp_path / "suite/tasks.yaml"
    yaml.write_text("one: {folder: photos}\ntwo: {folder: photos}\n")
    evaluated(model, tmp_path / "suite", tmp_path / "out", "one", "two")
    prompts = "prompts: {mug: [a], plate: [b], t_shirt: [c]}"
    for change in ("metric: acc5", "templates: ['the {c}']", "classnames: {mug: cup}", prompts):
        yaml.write_text(f"one: {{folder: photos}}\ntwo: {{folder: photos, {change}}}\n")
        summary = evaluated(model, tmp_path / "suite", tmp_path / "out", "one")
        assert summary["left_out"] == {"two": "it has another metric, or other prompts or columns"}


@pytest.mark.parametrize("how", ["other", "broken", "interrupted"])
def test_data_replaced_during_an_evaluation_gets_no_score(model, suite, tmp_path, monkeypatch, how):
    """A tar is overwritten after the first image was decoded, with another that may be broken."""
    shutil.copytree(suite, tmp_path / "suite")
    tar, decode = tmp_path / "suite/wds_cifar10_test/test/1.tar", images.decode

    def replace_and_decode(blob, **options):
        body = bytearray(tar.read_bytes())
        body[2048] ^= 255
        tar.write_bytes(body[: len(body) // 2] + bytes(len(body) // 2) if how == "broken" else body)
        monkeypatch.setattr(images, "decode", decode)
        if how == "interrupted":
            raise KeyboardInterrupt
        return decode(blob, **options)

    monkeypatch.setattr(images, "decode", replace_and_decode)
    if how == "interrupted":
        with pytest.raises(KeyboardInterrupt):
            evaluated(model, tmp_path / "suite", tmp_path / "out", "cifar10", "mnist")
        return
    summary = evaluated(model, tmp_path / "suite", tmp_path / "out", "cifar10", "mnist", micro_batch=4)
    assert "1.tar was changed while it was evaluated" in summary["failures"]["cifar10"]
    assert list(summary["scores"]) == ["mnist"]
    assert not (tmp_path / "out/cifar10.json").exists()


def test_a_misspelt_place_in_a_second_file_touches_no_result(model, tmp_path):
    """Regression test: the results of the first file's task were renamed to .stale."""
    write_class_folders(tmp_path)
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("mine: {folder: photos}\n")
    assert not scored(model, first, tmp_path / "out").failures
    before = contents(tmp_path / "out")
    second.write_text("mine: {folder: fotos}\nother: {folder: photos}\n")
    with pytest.raises(UserError, match=r"1 of 2 tasks is not where their tasks.yaml says \(mine: "):
        scored(model, second, tmp_path / "out")
    assert contents(tmp_path / "out") == before
    second.write_text("mine: {folder: photos, templates: ['{c}'], classnames: [a, b, c, d]}\n")
    assert "classnames has 4 names" in scored(model, second, tmp_path / "out").failures["mine"]
    assert (tmp_path / "out/mine.json").read_bytes() == before["mine.json"]

"""Metrics as pure functions, against scikit-learn and brute force."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import balanced_accuracy_score, f1_score, top_k_accuracy_score

from pipeline.evaluation.compute import TextSide
from pipeline.evaluation.datasets.datacomp import AGGREGATES, TASKS, Task, official_folder
from pipeline.evaluation.datasets.task_data import Instance, StoredImages, TaskData, TaskError
from pipeline.evaluation.protocol import macro_f1
from pipeline.evaluation.protocols import association, classification, retrieval
from pipeline.evaluation.run.results import TaskResult, aggregate, describe
from tests.launch import python


def score(key, value):
    """A minimal result; only the key and the score matter."""
    facts = {"task": key, "name": key, "protocol": "classification", "main_metric": "acc1", "samples": 1}
    return TaskResult(**facts, score=value, metrics={}, chance=None, official=True, inputs={})


SEEDS = st.integers(0, 2**32 - 1)


@given(SEEDS)
@settings(max_examples=40, deadline=None)
def test_classification_metrics_match_scikit_learn(seed):
    rng = np.random.default_rng(seed)
    target = rng.choice(rng.permutation(9)[:7], 200)  # not all classes occur
    logits = torch.from_numpy(rng.integers(0, 6, (200, 9)).astype(np.float32))  # a coarse grid, so that ties are common
    found = {"target": target, **classification.keep(logits, labels=torch.from_numpy(target))}
    prediction = logits.argmax(1).numpy()
    values = classification.metrics(Task("t", "t"), found, classes=9)
    assert values["acc1"] == pytest.approx(np.mean(prediction == target), abs=1e-12)
    assert values["mean_per_class_recall"] == pytest.approx(balanced_accuracy_score(target, prediction), abs=1e-12)
    lower_wins = logits.double() - 1e-3 * torch.arange(9)  # applies the tie rule, which scikit-learn lacks
    top5 = top_k_accuracy_score(target, lower_wins.numpy(), k=5, labels=np.arange(9))
    assert values["acc5"] == pytest.approx(top5, abs=1e-12)
    f1 = f1_score(target, prediction, labels=np.unique(target), average="macro")
    assert macro_f1(target, prediction) == pytest.approx(f1, abs=1e-12)


def test_repeated_class_names_tie_and_the_lower_index_wins():
    side = TextSide(["crane", "dog", "crane"], templates=["a {c}."])
    assert side.units == [["crane", "dog"]]
    generator = torch.Generator().manual_seed(0)
    features, texts = torch.randn(37, 33, generator=generator), torch.randn(2, 33, generator=generator)
    logits = side.similarities(features, texts)
    assert torch.equal(logits[:, 0], logits[:, 2])
    kept = classification.keep(logits, labels=torch.full((37,), 2))
    crane = (logits[:, 0] > logits[:, 1]).numpy()
    assert (kept["prediction"][crane] == 0).all()
    assert (kept["rank"][crane] == 1).all()


def test_a_class_whose_name_was_dropped_is_never_predicted():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0], [9.0, 1.0, 2.0, 3.0, 4.0]])
    kept = classification.keep(logits, labels=torch.tensor([5, 0]))
    assert kept["rank"].tolist() == [5, 0]  # rank 5 is not among the best five either
    found = {"target": np.array([5, 0]), **kept}
    assert classification.metrics(Task("t", "t"), found, classes=5)["acc5"] == 0.5


@pytest.mark.parametrize(
    ("key", "expected"),
    [("wilds/fmow", 0.25), ("fairness/geode", 0.25), ("fairness/dollar_street", 0.5), ("wilds/camelyon17", 0.5)],
)
def test_worst_group_ignores_empty_groups(key, expected):
    task = TASKS[key]
    group = np.array([0, 0, 0, 0, 5, 5, 7, 7])  # groups 1 to 4 and 6 have no samples
    rank = np.array([0, 1, 4, 9, 0, 0, 0, 6])
    found = {"target": np.zeros(8, int), "prediction": rank, "rank": rank, "field:year": group}
    found |= {f"field:{name}": group for name in task.fields}
    assert classification.metrics(task, found, classes=10)[task.main_metric] == expected


def brute_force_recall(images, captions, owner, k):
    scores = (captions @ images.T).numpy()
    by_text = [owner[i] in np.argsort(-row, kind="stable")[:k] for i, row in enumerate(scores)]
    by_image = [i in owner[np.argsort(-column, kind="stable")[:k]] for i, column in enumerate(scores.T)]
    return float(np.mean(by_text)), float(np.mean(by_image))


@given(SEEDS)
@settings(max_examples=30, deadline=None)
def test_retrieval_matches_brute_force_including_ties(seed):
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 8, 21)
    owner = np.repeat(np.arange(21), counts)
    names = [f"caption {rng.integers(40)}" for _ in owner]  # captions repeat, also between images
    side = TextSide(names)
    images = torch.from_numpy(rng.integers(-2, 3, (21, 4)).astype(np.float32))
    texts = torch.from_numpy(rng.integers(-2, 3, (len(side.units[0]), 4)).astype(np.float32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrieval, "BLOCK", 7)
        values = retrieval.metrics(retrieval.outcomes(images, texts, side=side, owner=owner))
    for k in (1, 5, 10):
        by_text, by_image = brute_force_recall(images, texts[side.rows], owner, k)
        assert values[f"image_retrieval_recall@{k}"] == pytest.approx(by_text, abs=1e-12)
        assert values[f"text_retrieval_recall@{k}"] == pytest.approx(by_image, abs=1e-12)


def test_association_chance_matches_random_picks_and_small_instances_alone_have_no_score():
    few, many = Instance("cue", (0, 1), (True, False)), Instance("cue", tuple(range(10)), (True,) * 3 + (False,) * 7)
    small, large = (TaskData(None, "", StoredImages([]), (), instances=(instance,)) for instance in (few, many))
    rng = np.random.default_rng(0)
    truth = np.array(many.associated)
    drawn = np.mean([association.jaccard(rng.random(10), truth) for _ in range(20_000)])
    assert association.Association(Task("t", "t"), large).chance() == pytest.approx(drawn, abs=0.005)
    with pytest.raises(TaskError, match="10 or more candidates"):
        association.Association(Task("t", "t"), small)


def test_task_table_matches_the_benchmark():
    protocols = [task.protocol for task in TASKS.values()]
    assert [protocols.count(name) for name in ("classification", "retrieval", "association")] == [35, 2, 1]
    assert (TASKS["objectnet"].classes, TASKS["objectnet"].samples) == (113, 18_574)
    assert {TASKS[f"imagenet-{letter}"].classes for letter in "aor"} == {200}
    assert official_folder("fairness/geode") == "wds_geode_test"
    assert official_folder("wilds/fmow") == "wds_wilds-fmow_test"
    assert len(set(map(official_folder, TASKS))) == 38


def test_aggregates_are_without_own_tasks_and_name_what_is_missing():
    scored = {key: score(key, 1.0) for key in TASKS}
    means = aggregate({**scored, "mine": score("mine", 0.0), "vtab/mine": score("vtab/mine", 0.0)})
    assert {name: (value.score, value.expected) for name, value in means.items()} == {
        name: (1.0, len(set(keys))) for name, keys in AGGREGATES.items()
    }
    incomplete = aggregate({key: score(key, 0.5) for key in ("imagenet1k", "imagenet-a")})
    family = incomplete["ImageNet & Variants"]
    assert (family.score, family.tasks, family.expected, family.complete) == (None, 2, 7, False)
    assert "imagenetv2" in family.missing
    line = describe(family)
    assert line.startswith("INCOMPLETE ImageNet & Variants: 2 of 7 tasks, without imagenet_sketch, imagenetv2, ")
    assert "and 30 more" in describe(incomplete["DataComp Average"]).partition("without")[2]


@pytest.mark.parametrize("module", ["datacomp", "suite"])
def test_table_and_readers_do_not_import_torch(module):
    """`data_prep` uses them, too, and must start without importing torch."""
    code = f"import sys, pipeline.evaluation.datasets.{module}; print('torch' in sys.modules)"
    assert python("-c", code).stdout == "False\n"

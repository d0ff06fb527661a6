"""The whole benchmark against a simple reference: one image at a time, metrics from scikit-learn."""

import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from sklearn.metrics import balanced_accuracy_score, f1_score, jaccard_score, recall_score

from pipeline.evaluation import evaluate
from pipeline.evaluation.datasets.datacomp import AGGREGATES, TASKS
from pipeline.evaluation.run.results import aggregate
from pipeline.evaluation.run.session import EvaluationConfig
from pipeline.model.evaluation_model import for_evaluation
from pipeline.model.towers import ModelConfig, build_towers
from tests.evaluation_suite import association_rows, write_suite

TOLERANCE = 1e-6


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """A single image is too little work to split: on a busy machine the threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model():
    towers, architecture = build_towers(ModelConfig(arch="scenes-vit-tiny"), seed=3)
    return for_evaluation(towers, architecture, source="random-towers")


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return write_suite(tmp_path_factory.mktemp("suite"), seed=5)


@pytest.fixture(scope="module")
def evaluation(model, suite, tmp_path_factory):
    output = tmp_path_factory.mktemp("results")
    return evaluate(model, suite=suite, output=output, config=EvaluationConfig(workers=0, micro_batch=16))[0]


class Reference:
    """Features of single samples, computed directly with open_clip's towers."""

    def __init__(self, model):
        self.clip, self.preprocess, self.tokenize = model.towers.clip, model.preprocess, model.tokenize

    @torch.no_grad()
    def image(self, image):
        feature = self.clip.encode_image(self.preprocess(image.convert("RGB"))[None])[0]
        return (feature / feature.norm()).double().numpy()

    @torch.no_grad()
    def text(self, text):
        feature = self.clip.encode_text(self.tokenize([text]))[0]
        return (feature / feature.norm()).double().numpy()


def read_tars(folder):
    for shard in range(int((folder / "test/nshards.txt").read_text())):
        sample: dict[str, bytes] = {}
        with tarfile.open(folder / f"test/{shard}.tar") as tar:
            for member in tar.getmembers():
                key, suffix = member.name.split(".")
                if sample and sample["key"] != key.encode():
                    yield sample
                    sample = {}
                file = tar.extractfile(member)
                sample |= {"key": key.encode(), suffix: file.read()}
        yield sample


def image_of(sample):
    return Image.open(io.BytesIO(next(sample[s] for s in ("webp", "png", "jpg", "jpeg") if s in sample)))


def classification(reference, folder):
    names = (folder / "classnames.txt").read_text().split("\n")[:-1]
    templates = (folder / "zeroshot_classification_templates.txt").read_text().split("\n")[:-1]
    vectors = []
    for name in names:
        mean = np.mean([reference.text(template.format(c=name)) for template in templates], axis=0)
        vectors.append(mean / np.linalg.norm(mean))
    target, logits, metadata = [], [], []
    for sample in read_tars(folder):
        feature = reference.image(image_of(sample))
        target.append(int(sample["cls"]))
        logits.append([100 * float((feature * vector).sum()) for vector in vectors])
        metadata.append(np.load(io.BytesIO(sample["npy"])) if "npy" in sample else np.zeros(0))
    order = np.argsort(-np.array(logits), axis=1, kind="stable")
    return {"y": np.array(target), "order": order, "metadata": np.array(metadata), "classes": np.array(len(names))}


def worst(right, group):
    return min(float(right[group == g].mean()) for g in set(group.tolist()))


@pytest.mark.parametrize("key", [key for key, task in TASKS.items() if task.protocol == "classification"])
def test_classification_task(key, model, suite, evaluation):
    folder = suite / f"wds_{key.replace('fairness/', '').replace('/', '-')}_test"
    found = classification(Reference(model), folder)
    y, order = found["y"], found["order"]
    top1, top5 = order[:, 0] == y, (order[:, :5] == y[:, None]).any(1)
    expected = {"acc1": top1.mean(), "mean_per_class_recall": balanced_accuracy_score(y, order[:, 0])}
    if found["classes"] >= 5:
        expected["acc5"] = top5.mean()
    main = "acc1"
    if key in ("vtab/caltech101", "fgvc_aircraft", "vtab/flowers", "vtab/pets"):
        main = "mean_per_class_recall"
    if key == "wilds/iwildcam":
        main, labels = "F1-macro_all", np.unique(y)
        expected[main] = f1_score(y, order[:, 0], labels=labels, average="macro")
        expected["recall-macro_all"] = recall_score(y, order[:, 0], labels=labels, average="macro")
    if key in ("wilds/fmow", "fairness/geode"):
        main = "acc_worst_region" if key == "wilds/fmow" else "acc_wg"
        expected[main] = worst(top1, found["metadata"][:, 0])
    if key == "fairness/dollar_street":
        main = "acc_top5_wg"
        expected[main] = worst(top5, found["metadata"][:, 0])
    if key == "wilds/fmow":
        expected["acc_worst_year"] = worst(top1, found["metadata"][:, 1])
    if key == "wilds/camelyon17":
        expected["acc_wg"] = worst(top1, found["metadata"][:, 1])  # by slide
    if key.startswith("wilds/"):
        expected["acc_avg"] = top1.mean()
    result = evaluation.results[key]
    assert result.main_metric == main
    assert result.score == pytest.approx(expected[main], abs=TOLERANCE)
    for name, value in expected.items():
        assert result.metrics[name] == pytest.approx(value, abs=TOLERANCE), name
    assert ("acc5" in result.metrics) == (found["classes"] >= 5)
    assert result.samples == len(y)


def retrieval_images_and_captions(folder):
    if (folder / "state.json").is_file():
        import datasets

        rows: Any = datasets.load_from_disk(str(folder)).cast_column("image", datasets.Image(decode=False))
    else:
        rows = pd.concat([pd.read_parquet(path) for path in sorted(folder.rglob("*.parquet"))]).to_dict("records")
    images = [Image.open(io.BytesIO(row["image"]["bytes"])) for row in rows]
    return images, [list(row["caption"]) for row in rows]


@pytest.mark.parametrize("key", [key for key, task in TASKS.items() if task.protocol == "retrieval"])
def test_retrieval_task(key, model, suite, evaluation):
    reference = Reference(model)
    images, captions = retrieval_images_and_captions(suite / key.split("/")[1])
    features = np.array([reference.image(image) for image in images])
    texts = np.array([reference.text(text) for own in captions for text in own])
    owner = np.array([k for k, own in enumerate(captions) for _ in own])
    scores = texts @ features.T
    result = evaluation.results[key]
    for k in (1, 5, 10):
        by_text = [owner[i] in np.argsort(-row, kind="stable")[:k] for i, row in enumerate(scores)]
        by_image = [i in owner[np.argsort(-column, kind="stable")[:k]] for i, column in enumerate(scores.T)]
        assert result.metrics[f"image_retrieval_recall@{k}"] == pytest.approx(np.mean(by_text), abs=TOLERANCE)
        assert result.metrics[f"text_retrieval_recall@{k}"] == pytest.approx(np.mean(by_image), abs=TOLERANCE)
        if k == 1:
            assert result.score == pytest.approx((np.mean(by_text) + np.mean(by_image)) / 2, abs=TOLERANCE)
    assert result.samples == len(images)
    if "mscoco" in key:
        assert max(map(len, captions)) == 6  # captions beyond an image's fifth count as well


def test_association_task(model, suite, evaluation):
    reference = Reference(model)
    frame = pd.read_csv(suite / "winogavil/test.csv", keep_default_na=False)
    archive = zipfile.ZipFile(suite / "winogavil/images.zip")
    members = {Path(name).stem: name for name in archive.namelist()}
    found: dict[int, list[float]] = {}
    for row in frame.to_dict("records"):
        names, truth = json.loads(row["candidates"]), json.loads(row["associations"])
        cue = row["cue"].lower()
        text = reference.text(f"An {cue}" if cue[0] in "aeiou" else f"A {cue}")
        scores = [float(reference.image(Image.open(io.BytesIO(archive.read(members[name])))) @ text) for name in names]
        y_true = np.isin(names, truth)
        picked = np.argsort(scores)[-int(y_true.sum()) :]
        y_pred = np.isin(np.arange(len(names)), picked)
        found.setdefault(len(names), []).append(float(jaccard_score(y_true, y_pred)))
    result = evaluation.results["misc/winogavil"]
    assert result.samples == len(frame) == len(association_rows())
    assert result.score == pytest.approx(np.mean(found[10] + found[12]), abs=TOLERANCE)
    assert result.metrics["jaccard_score_5-6"] == pytest.approx(np.mean(found[5] + found[6]), abs=TOLERANCE)
    everything = [score for group in found.values() for score in group]
    assert result.metrics["avg_jaccard_score"] == pytest.approx(np.mean(everything), abs=TOLERANCE)


def test_all_38_tasks_and_every_aggregate(evaluation):
    assert not evaluation.failures
    assert len(evaluation.results) == 38
    aggregates = aggregate(evaluation.results)
    sizes = {"DataComp Average": 38, "ImageNet & Variants": 7, "Retrieval": 2, "Retrieval (DataComp)": 3}
    sizes |= {"VTAB": 13, "ImageNet dist. shifts": 6}
    assert {name: value.expected for name, value in aggregates.items()} == sizes
    for name, value in aggregates.items():
        assert value.complete
        assert not value.official  # a mini suite is never reported as the official one
        expected = np.mean([evaluation.results[key].score for key in AGGREGATES[name]])
        assert value.score == pytest.approx(expected, abs=1e-12)

"""Random damage to a suite: only documented errors, and never fewer samples than there were."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import numpy as np

from pipeline.errors import UserError
from pipeline.evaluation import evaluate
from pipeline.evaluation.datasets.datacomp import TASKS
from pipeline.evaluation.datasets.suite import Suite, open_suite, open_task
from pipeline.evaluation.datasets.task_data import decode
from pipeline.evaluation.protocol import PROTOCOLS
from pipeline.report.stored_scores import read_evaluations
from tests.checkpoints import QUICK, make_model
from tests.evaluation_suite import write_association, write_classification, write_retrieval

FLICKR = "retrieval/flickr_1k_test_image_text_retrieval"
COCO = "retrieval/mscoco_2014_5k_test_image_text_retrieval"
TEXT = (".csv", ".txt", ".json", ".yaml")


def mutated(body: bytes, rng: random.Random) -> bytes:
    """Flip, zero, cut, repeat, remove or replace a part."""
    start = rng.randrange(max(1, len(body)))
    end = min(len(body), start + rng.choice((1, 2, 8, 64, 512, 4096)))
    damage = rng.randrange(6)
    if damage == 0:
        return body[:start] + bytes(rng.randrange(256) for _ in range(end - start)) + body[end:]
    if damage == 1:
        return body[:start] + bytes(end - start) + body[end:]
    if damage == 2:
        return body[:start]
    if damage == 3:
        return body[:end] + body[start:]
    if damage == 4:
        return body[:start] + body[end:]
    changed = bytearray(body or b"\0")
    for _ in range(rng.randint(1, 4)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def read_all(suite: Suite) -> dict[str, object]:
    """What every task holds after reading all of it, or its error."""
    found: dict[str, object] = {}
    for entry in suite.entries:
        try:
            data = open_task(entry)
            PROTOCOLS[entry.task.protocol](entry.task, data)
            for index in range(len(data.images)):
                decode(data.images.read(index), name=data.images.name(index))
            # A changed pixel can make two of WinoGAViL's images of one, so images are not counted.
            found[entry.task.key] = {what: count for what, count in data.counts.items() if what != "images"}
        except UserError as error:
            found[entry.task.key] = str(error)
    return found


def saved(root: Path) -> Path:
    for key in ("imagenetv2", "wilds/fmow"):
        write_classification(root, TASKS[key], samples=6)
    write_retrieval(root, TASKS[FLICKR], layout="save_to_disk", samples=4)
    write_retrieval(root, TASKS[COCO], layout="parquet", samples=4)
    write_association(root, layout="csv+zip")
    return root


def test_damaged_data_raises_only_documented_errors_and_loses_no_sample(tmp_path):
    suite, rounds = saved(tmp_path / "suite"), 100
    whole = read_all(open_suite(suite))
    assert all(isinstance(counts, dict) for counts in whole.values()), whole
    files = sorted(path for path in suite.rglob("*") if path.is_file() and path.suffix != ".jpg")
    rng = random.Random(5)
    refused = 0
    for number in range(rounds):
        path = files[number % len(files)]
        body = path.read_bytes()
        path.write_bytes(mutated(body, rng))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = read_all(open_suite(suite))
            except UserError:
                found = {}
        path.write_bytes(body)
        refused += any(isinstance(value, str) for value in found.values())
        partial = {key: value for key, value in found.items() if isinstance(value, dict) and value != whole[key]}
        assert not partial or path.suffix in TEXT, (number, path, partial)
    assert refused > rounds // 4
    assert read_all(open_suite(suite)) == whole


def test_a_result_without_whole_outcomes_is_not_reused(tmp_path):
    suite, output = tmp_path / "suite", tmp_path / "out"
    write_classification(suite, TASKS["mnist"], samples=8)
    model = make_model(0)
    (first,) = evaluate(model, suite=suite, output=output, config=QUICK)
    outcomes = output / "mnist.outcomes.npz"
    for damage in (
        lambda: outcomes.write_bytes(outcomes.read_bytes()[:-40]),
        lambda: np.savez_compressed(outcomes, prediction=np.zeros(8, int), target=np.zeros(8, int)),  # of other samples
        outcomes.unlink,
    ):
        damage()
        (scored,) = (score for one in read_evaluations(tmp_path, lambda step: step, []) for score in one.scores)
        assert scored.read_outcomes() is None, "reports do not use them"
        (again,) = evaluate(model, suite=suite, output=output, config=QUICK)
        assert not again.reused
        assert again.results["mnist"] == first.results["mnist"]
    assert evaluate(model, suite=suite, output=output, config=QUICK)[0].reused

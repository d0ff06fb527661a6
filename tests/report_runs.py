"""Creates run folders as written by ingestion, training and evaluation, without running any of them."""

import json

import numpy as np
import yaml
from PIL import Image

from pipeline.data.shards.manifest_format import make_manifest
from pipeline.files import sha256_of


def make_run(folder, *, name="neuclip", right=60, steps=(50, 100)):
    """Write a run folder as training, ingestion and evaluation do; in the end, `right` of 100 samples are correct."""
    shards = folder / "shards"
    shards.mkdir(parents=True)
    failures, facts = {"http 404": 7, "<b>odd</b>": 3}, {"source": "scenes", "urls": 100}
    make_manifest([("0.tar", 90, 1_000, "0" * 64)], failures=failures, facts=facts).save(shards)
    data = {"sources": [{"manifest": str(shards), "weight": 1.0}]}
    config = {"objective": {"name": name}, "model": {"arch": "tiny"}, "data": data}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [{"kind": "event", "time": 0.0, "message": "started"}]
    for step in range(10, 101, 10):
        scalars = {"loss": 1 / step, "tau": 0.7 / step, "lr": 1e-3, "normalizer_gap": 0.1, "normalizer_gap_cold": 0.4}
        scalars |= {"samples_per_second": 100.0, "data_wait": 0.02, "corrupt_samples": 0.0}
        scalars["ratio_max"] = float("inf") if step == 20 else 2.0 + step
        lines.append({"kind": "train", "step": step, "samples": 8 * step, "time": step, **scalars})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in steps:
        _make_evaluation(folder / "evaluation" / f"step-{step:08d}", right=right * step // steps[-1])
    return folder


def _make_evaluation(folder, *, right):
    examples = folder / "scenes-retrieval.examples"
    examples.mkdir(parents=True)
    rank, score = np.where(np.arange(100) < right, 0, 1), right / 100
    recalls = {f"{side}_retrieval_recall@{k}": score for side in ("text", "image") for k in (1, 5, 10)}
    for task, protocol, main, chance, metrics, outcomes in (
        ("colour", "classification", "acc1", 0.1, {}, {"target": np.zeros(100, int), "prediction": rank, "rank": rank}),
        ("retrieval", "retrieval", "mean_recall@1", 0.01, recalls,
         {"caption_owner": np.arange(100), "caption_rank": rank, "image_rank": rank}),
    ):  # fmt: skip
        path = folder / f"scenes-{task}.outcomes.npz"
        np.savez(path, **outcomes)
        result = {"task": f"scenes/{task}", "name": f"scenes/{task}", "protocol": protocol, "main_metric": main}
        result |= {"score": score, "metrics": {**metrics, main: score}, "chance": chance, "outcomes": sha256_of(path)}
        result |= {"samples": 100, "official": False, "inputs": {"task_data": "d", "packages": {"torch": "2"}}}
        (folder / f"scenes-{task}.json").write_text(json.dumps(result))
    summary = {"failures": {"scenes/size": "the data is cut short"}, "aggregates": {}}
    (folder / "summary.json").write_text(json.dumps(summary))
    for index in range(3):
        Image.new("RGB", (8, 8), (index, 0, 0)).save(examples / f"{index}.jpg")
    best = [{"image": k, "file": f"{k}.jpg", "score": 0.5, "right": False} for k in (0, 1)]
    example = {"caption": "a <script>alert(1)</script> star", "right": 2, "rank": 41, "images": best}
    (examples / "examples.json").write_text(json.dumps([example]))
    captions = [{"caption": f"caption <{k}>", "score": 0.5, "right": k == 1} for k in range(2)]
    described = {"image": 1, "file": "1.jpg", "rank": 1, "own": ["caption <1>"], "captions": captions}
    (examples / "images.json").write_text(json.dumps([described]))

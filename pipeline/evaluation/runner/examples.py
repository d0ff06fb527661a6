"""A few captions with their best images, for reports: chosen by position, so that two evaluations show the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from torch import Tensor

from pipeline.evaluation.datasets.task_data import TaskData, decode
from pipeline.files import write_text

TOP = 5
THUMBNAIL = 160


def write_examples(folder: Path, data: TaskData, *, features: tuple[Tensor, Tensor], count: int) -> None:
    """Write `examples.json` and JPEG thumbnails: evenly spaced captions, each with its `TOP` best images.

    Args: features: [n, d] of the images and [m, d] of the captions, unit norm.
    """
    images, captions = features
    flat = [(caption, image) for image, own in enumerate(data.captions) for caption in own]
    chosen = [round(k * (len(flat) - 1) / max(1, count - 1)) for k in range(min(count, len(flat)))]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    examples, shown = [], set()
    for position in dict.fromkeys(chosen):
        caption, right = flat[position]
        scores = captions[position] @ images.T
        order = torch.sort(scores, descending=True, stable=True).indices
        best = order[:TOP].tolist()
        examples.append(
            {
                "caption": caption,
                "right": right,
                "rank": int((order == right).nonzero()),
                "images": [
                    {
                        "image": index,
                        "file": f"{index}.jpg",
                        "score": round(float(scores[index]), 4),
                        "right": index == right,
                    }
                    for index in best
                ],
            }
        )
        shown.update([right, *best])
    for index in sorted(shown):
        image = decode(data.images.read(index), name=data.images.name(index))
        image.thumbnail((THUMBNAIL, THUMBNAIL))
        image.save(folder / f"{index}.jpg", quality=85)
    write_text(folder / "examples.json", json.dumps(examples, indent=1, ensure_ascii=False) + "\n", durable=True)

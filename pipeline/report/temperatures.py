"""The learned temperatures of samples, of `isogclr` and `fastclip_v2` (iSogCLR, figures 8 to 11).

They are columns of the table in a run's newest checkpoint: two of log u, then tau and its first moment, two each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pipeline.data.shards.manifest_format import Manifest
from pipeline.data.shards.storage import is_local, open_records
from pipeline.data.shards.tar_reader import CaptionField
from pipeline.report.charts import Bars
from pipeline.report.page import Bar, percent
from pipeline.report.run_data import Run
from pipeline.run_files import finished_checkpoints

METHODS = ("isogclr", "fastclip_v2")
SIDES = ("images", "captions")
TAU, MOMENT, END = 2, 4, 6
"""The first column of either, and the one behind them."""
BINS, SHOWN, SIDE = 12, 6, 160
"""Of a distribution; samples of the lowest and of the highest temperature; pixels of their images."""


def temperatures(run: Run) -> dict[str, Any]:
    """Two distributions, and the samples whose images have the lowest and the highest temperature; empty without."""
    if run.setting("objective.name") not in METHODS or not (folders := finished_checkpoints(run.folder)):
        return {}
    ids, table = _rows(folders[-1])
    if not len(ids):
        return {}
    taus = table[:, TAU:MOMENT]
    order = np.argsort(taus[:, 0], kind="stable")
    ends = {"lowest": order[:SHOWN], "highest": order[::-1][:SHOWN]}
    return {
        "charts": [_distribution(tau, f"Temperatures of {side}") for tau, side in zip(taus.T, SIDES, strict=True)],
        "samples": {end: [_sample(run, int(ids[k]), tau=taus[k, 0]) for k in chosen] for end, chosen in ends.items()},
        "seen": f"{len(ids):,} samples of {folders[-1].name}",
    }


def _rows(checkpoint: Path) -> tuple[np.ndarray, np.ndarray]:
    """Ids and rows of the samples that have been trained on: the moment of any other is 0."""
    from safetensors.numpy import load_file

    ids, rows = [np.empty(0, np.int64)], [np.empty((0, END), np.float32)]
    for path in sorted(checkpoint.glob("rows-*.safetensors")):
        for name, values in load_file(path).items():
            first = int(name.rpartition("/")[2])
            seen = np.flatnonzero(values[:, MOMENT:END].any(1))
            ids.append(first + seen)
            rows.append(values[seen, :END])
    return np.concatenate(ids), np.concatenate(rows)


def _distribution(taus: np.ndarray, title: str) -> Bars:
    counts, edges = np.histogram(taus, BINS)
    bars = [
        Bar(f"{low:.4f} to {high:.4f}", count, percent(count / len(taus)))
        for low, high, count in zip(edges[:-1], edges[1:], counts.tolist(), strict=True)
    ]
    return Bars(title, tuple(bars), float(counts.max()), f"Mean {taus.mean():.4f}.")


def _sample(run: Run, number: int, *, tau: float) -> dict[str, Any]:
    """A sample's temperature, with its caption and image where its shard is in a local data set."""
    from pipeline.data.shards.rgb_image import rgb_image, thumbnail_url

    shown: dict[str, Any] = {"tau": f"{tau:.4f}", "caption": f"sample {number:,}", "image": None}
    place = _shard_of(run.manifests, number)
    if place is not None:
        try:
            field = CaptionField.parse(str(run.setting("data.caption", "txt")))
            with open_records(str(place[0]), skip=place[1], caption_suffix=field.suffix) as records:
                record = next(iter(records))
            image = thumbnail_url(rgb_image(record.image or b""), (SIDE, SIDE))
            shown |= {"caption": field.read(record), "image": image}
        except (OSError, ValueError, StopIteration):
            pass  # its number is shown
    return shown


def _shard_of(manifests: tuple[Manifest, ...], number: int) -> tuple[Path, int] | None:
    """The shard of a sample and its row there; None unless it is a file in the folder of its manifest."""
    for manifest in manifests:
        if number < manifest.n:
            shard, row = manifest.locate(number)
            url = manifest.url(shard)
            inside = is_local(url) and Path(url).resolve().is_relative_to(Path(manifest.root).resolve())
            return (Path(url), row) if inside and Path(url).is_file() else None
        number -= manifest.n
    return None

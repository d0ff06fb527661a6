"""Data sets of the `datasets` library: a folder of `save_to_disk`, or a name on the hub."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.pairs.columns import choose_columns
from data_prep.pairs.pair import Pair
from data_prep.pairs.parquet_source import pair_of
from pipeline.errors import UserError

_BATCH = 64


@dataclass(frozen=True)
class DatasetSource:
    """A split of a data set, memory-mapped by `datasets`; `name` is a folder or a name on the hub."""

    name: str
    split: str | None
    subset: str | None
    revision: str | None
    image: str
    caption: str
    rows: int
    fingerprint: str

    @property
    def facts(self) -> dict[str, Any]:
        about = {"kind": "datasets", "name": self.name, "split": self.split, "subset": self.subset}
        columns = {"image": self.image, "caption": self.caption, "digest": self.fingerprint}
        return {key: value for key, value in {**about, "revision": self.revision, **columns}.items() if value}

    def read(self, start: int, stop: int) -> Iterator[Pair]:
        data = _load(self.name, self.split, self.subset, self.revision).select_columns([self.image, self.caption])
        data = _undecoded(data, self.image)
        for first in range(start, stop, _BATCH):
            columns = data[first : min(stop, first + _BATCH)]
            rows = zip(columns[self.image], columns[self.caption], strict=True)
            for number, (image, caption) in enumerate(rows, start=first):
                place = f"{Path(self.name).name if Path(self.name).exists() else self.name} row {number}"
                yield pair_of(image, caption, place=place, folder=Path(self.name))


def open_dataset(
    name: str, *, split: str | None, subset: str | None, revision: str | None, image: str | None, caption: str | None
) -> DatasetSource:
    """Find split and columns of a data set; a hub's is downloaded into the cache of `datasets`.

    Args:
        name: A folder of `save_to_disk`, or a name on the hub.
        split: The split; None takes the only one, or train.
        subset: Configuration of a dataset on the hub.
        revision: Commit or branch on the hub.
        image: Column of the image; None detects it.
        caption: Column of the caption; None detects it.

    Raises:
        UserError: It cannot be loaded, the split is not given or does not exist, or columns are not found.
    """
    from datasets import Image, Value

    data = _load(name, split, subset, revision)
    images = [column for column, feature in data.features.items() if isinstance(feature, Image)]
    texts = [
        column
        for column, feature in data.features.items()
        if column not in images and isinstance(getattr(feature, "feature", feature), Value | dict)
    ]
    found = choose_columns(
        data.column_names,
        image=image or (images[0] if len(images) == 1 else None),
        caption=caption,
        where=name,
        texts=texts,
    )
    return DatasetSource(name, split, subset, revision, *found, len(data), _fingerprint(data))


def _fingerprint(data: Any) -> str:
    """A digest that is the same in every process and session: of the stored files, not of this load."""
    import hashlib

    files = [(Path(file["filename"]).name, Path(file["filename"]).stat().st_size) for file in data.cache_files]
    return hashlib.sha256(repr((files, len(data), str(data.features))).encode()).hexdigest()


def _undecoded(data: Any, column: str) -> Any:
    from datasets import Image

    return data.cast_column(column, Image(decode=False)) if isinstance(data.features[column], Image) else data


@functools.lru_cache(maxsize=1)
def _load(name: str, split: str | None, subset: str | None, revision: str | None) -> Any:
    """Load the split.

    Raises:
        UserError: It cannot be loaded.
    """
    import datasets

    datasets.disable_progress_bars()
    try:
        if Path(name).exists():
            loaded = datasets.load_from_disk(name)
        else:
            loaded = datasets.load_dataset(name, subset, revision=revision)
    except Exception as error:  # the hub's client raises many exception types
        raise UserError(
            f"The data set {name} cannot be loaded ({type(error).__name__}: {str(error).strip().splitlines()[0]}). "
            "Is it a local path that is missing? A private set needs HF_TOKEN; --subset and --revision choose a part."
        ) from error
    if not isinstance(loaded, dict):
        return loaded
    chosen = split or (next(iter(loaded)) if len(loaded) == 1 else "train")
    if chosen not in loaded:
        raise UserError(f"{name} has no split {chosen!r}: choose with --split. It has: {', '.join(loaded)}.")
    return loaded[chosen]

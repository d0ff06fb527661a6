"""The trainer's samples in the trainer's order, for training loops of others."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from pipeline.config import parse, section
from pipeline.data.data_config import DataConfig
from pipeline.data.loading.decode import normalize
from pipeline.data.loading.loader import Loader, build_loader
from pipeline.data.loading.position import check_place, place_of, report
from pipeline.data.loading.worker import Tokenize
from pipeline.data.order.canonical_order import default_streams
from pipeline.data.shards.check_shards import check_captions
from pipeline.distributed.world import World
from pipeline.errors import UserError

Rows = tuple[Tensor, Tensor, Tensor]
Normalization = tuple[tuple[float, float, float], tuple[float, float, float]]
Positive = Annotated[float, Field(gt=0)]


class OrderedDataset(IterableDataset[Rows]):
    """One rank's rows of the global batches: `(image, text, sample_id)`; see `dataset`.

    Every `iter` goes on where the last one stopped, to the end of the epoch.
    """

    def __init__(self, loader: Loader, *, limit: float, normalization: Normalization | None) -> None:
        self._loader, self._limit, self._normalization = loader, limit, normalization

    def __iter__(self) -> Iterator[Rows]:
        """The batches that are left of this epoch, or those of the next; UserError as in training."""
        if (info := get_worker_info()) is not None:
            raise UserError(
                f"num_workers={info.num_workers} of a DataLoader: its processes would repeat the first epoch, since "
                "each epoch starts new ones, and several would give the rows of a batch to different batches. Use "
                "num_workers=0, and `workers` of neuclip.dataset for decoding processes."
            )
        for _ in range(len(self) - self._loader.position.batch % len(self)):
            batch = next(self._loader)
            report(batch.position, self._loader.layout, World(), limit=self._limit)
            image = batch.image
            if self._normalization is not None:
                image = normalize(image, mean=self._normalization[0], std=self._normalization[1])
            yield image, batch.text, batch.sample_id

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self._loader.steps_per_epoch

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch, as plain values: the same on every rank, valid for any number of ranks."""
        return place_of(self._loader.order, self._loader.position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batch at which `state_dict` was called; UserError if its order was another."""
        self.close()
        try:
            self._loader.position = check_place(state, self._loader.order)
        except (TypeError, KeyError, AttributeError) as error:
            raise UserError(f"This is not what state_dict() returned ({type(error).__name__}: {error}).") from error

    def close(self) -> None:
        """End the decoding processes; iterating again starts new ones."""
        self._loader.close()


@section
class _Given:
    batch_size: int = Field(ge=1)
    image_size: int = Field(ge=1)
    seed: int = Field(ge=0, lt=2**63)
    normalization: tuple[tuple[float, float, float], tuple[Positive, Positive, Positive]] | None
    rank: int = Field(ge=0)
    ranks: int = Field(ge=1)


def dataset(
    folder: str | os.PathLike[str] | Sequence[Any],
    *,
    batch_size: int,
    tokenize: Tokenize,
    image_size: int = 224,
    seed: int = 0,
    normalization: Normalization | None = None,
    rank: int | None = None,
    ranks: int | None = None,
    **settings: Any,
) -> OrderedDataset:
    """What `neuclip train` sees of a folder of shards: the same samples in the same order, for any training loop.

    Args:
        folder: A folder with `manifest.json`, or a list of them or of `{"manifest": folder, "weight": passes}`.
        batch_size: Samples of a batch over all ranks.
        tokenize: Captions -> int64 [b, L]; picklable, such as `open_clip.get_tokenizer(...)`.
        image_size: Side of the images in pixels.
        seed: Of order, crops and choices of captions; a recipe's `seed`.
        normalization: Mean and standard deviation by channel, for fp32 images; None: uint8.
        rank: This process's number; None: `RANK`, as torchrun sets it, or 0.
        ranks: Number of processes; None: `WORLD_SIZE`, or 1.
        settings: Other settings of the `data` section: `workers`, `streams`, `shuffle_buffer`, `caption`, ...

    Returns:
        An iterable of `(image [b, 3, S, S], text [b, L], sample_id [b])`, one epoch each time, with `state_dict` and
        `load_state_dict`. It does its own batching: use `DataLoader(..., batch_size=None, num_workers=0)`.

    Raises:
        UserError: A setting is not valid, the data is missing or does not fit, or its first samples lack the captions.
    """
    if not callable(tokenize):
        raise UserError(f"tokenize = {tokenize!r} must be callable, such as open_clip.get_tokenizer('ViT-B-32').")
    rank = int(os.environ.get("RANK", 0)) if rank is None else rank
    ranks = int(os.environ.get("WORLD_SIZE", 1)) if ranks is None else ranks
    values = {"batch_size": batch_size, "image_size": image_size, "seed": seed, "normalization": normalization}
    given = parse(_Given, {**values, "rank": rank, "ranks": ranks})
    if given.rank >= given.ranks:
        raise UserError(f"rank = {given.rank} must be below ranks = {given.ranks}.")
    if "sources" in settings:
        raise UserError("sources: give the folder, or a list of them, as the first argument.")
    sources = os.fspath(folder) if isinstance(folder, os.PathLike) else folder
    if settings.get("streams", "auto") == "auto":
        settings["streams"] = default_streams(given.batch_size)
    config = parse(DataConfig, {**settings, "sources": sources}, prefix="data")
    check_captions(config)
    world, common = World(rank=given.rank, size=given.ranks), {"seed": given.seed, "image_size": given.image_size}
    loader = build_loader(config, world=world, global_batch=given.batch_size, tokenize=tokenize, **common)
    return OrderedDataset(loader, limit=config.corrupt_limit / given.ranks, normalization=given.normalization)

"""Pairs that are read from shards: the same for any number of workers, and not too many of them at a time."""

import numpy as np
import torch
from PIL import Image

from pipeline.analysis.shard_pairs import PairReader, whole
from pipeline.data.shards.tar_reader import CaptionField
from tests.shards import sample, write_shards

SIDE = 16


def as_tensor(image):
    assert image.mode == "RGB"
    return torch.from_numpy(np.array(image.resize((SIDE, SIDE), Image.Resampling.NEAREST)))


def test_pairs_are_the_same_for_any_number_of_workers(tmp_path):
    manifest = write_shards(tmp_path, [9, 5, 6], replace={4: {**sample(4), "jpg": b"no"}})
    one, many = (
        list(PairReader(manifest, CaptionField(), whole(as_tensor), batch_size=4, workers=workers).read(range(3)))
        for workers in (0, 3)
    )
    assert [batch.sample_ids for batch in one] == [[0, 1, 2, 3], [5, 6, 7, 8], [9, 10, 11, 12], [13], [14, 15, 16, 17],
                                                   [18, 19]]  # fmt: skip
    for a, b in zip(one, many, strict=True):
        assert (a.shard, a.rows, a.sample_ids, a.captions, a.problems, a.ends_shard) == (
            b.shard, b.rows, b.sample_ids, b.captions, b.problems, b.ends_shard
        )  # fmt: skip
        assert torch.equal(a.image, b.image)


def test_no_more_than_a_few_batches_are_decoded_ahead(tmp_path):
    """A shard of 10,000 images of 224 pixels takes 6 GB when it is preprocessed."""
    manifest, decoded = write_shards(tmp_path, [60, 60]), list[Image.Image]()
    image_of = whole(lambda image: decoded.append(image) or as_tensor(image))
    batches = PairReader(manifest, CaptionField(), image_of, batch_size=4, workers=2).read([0, 1])
    assert next(batches).rows == [0, 1, 2, 3]
    assert 4 <= len(decoded) <= 12
    batches.close()

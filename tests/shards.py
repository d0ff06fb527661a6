"""Small webdataset shards for tests, in the layout that img2dataset and our ingestion write."""

import hashlib
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from pipeline.config import parse
from pipeline.data.data_config import DataConfig
from pipeline.data.loading.loader import build_loader
from pipeline.data.loading.stream_reader import SequentialReader
from pipeline.data.order.mixture import Segments, make_mixture
from pipeline.data.shards.manifest_format import make_manifest
from pipeline.data.shards.tar_reader import CaptionField, split_name
from pipeline.distributed.world import World
from tests.images import encoded

Members = Mapping[str, bytes]


def jpeg(number, *, size=(24, 20), mode="RGB"):
    """Return a JPEG of the given (width, height) that differs for every number."""
    rng = np.random.default_rng(number)
    coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
    return encoded(coarse.convert(mode), "JPEG", quality=90)


def sample(number, **kwargs):
    """Return the members of sample `number`."""
    return {"jpg": jpeg(number, **kwargs), "json": b'{"url": "x"}', "txt": f"caption {number}".encode()}


def write_tar(path, samples, *, first=0, format=tarfile.USTAR_FORMAT):
    """Write a tar of samples whose keys start at `first`."""
    members = ((f"{i:09d}.{suffix}", data) for i, one in enumerate(samples, first) for suffix, data in one.items())
    write_members(path, members, format=format)


def write_members(to, members, *, format=tarfile.USTAR_FORMAT, date=0):
    """Write a tar of the (name, content) pairs, as they are, to a path or an open file."""
    path, file = (to, None) if isinstance(to, Path) else (None, to)
    with tarfile.open(path, "w", file, format=format) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), date
            tar.addfile(info, io.BytesIO(data))


def starts(path):
    """The first byte of each sample of a tar."""
    with tarfile.open(path) as tar:
        return list({split_name(member.name)[0]: member.offset for member in reversed(tar.getmembers())}.values())[::-1]


def write_shards(folder, sizes, *, replace=None, first=0, image_size=(24, 20)):
    """Write shards of the given sizes and their manifest; sample id i has caption "caption {first + i}".

    `replace` has the members of samples that are written otherwise, by sample id.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows, offset = [], 0
    for s, size in enumerate(sizes):
        path = folder / f"{s:05d}.tar"
        ids = range(offset, offset + size)
        write_tar(path, [(replace or {}).get(i) or sample(first + i, size=image_size) for i in ids], first=offset)
        data = path.read_bytes()
        rows.append((path.name, size, len(data), hashlib.sha256(data).hexdigest()))
        offset += size
    manifest = make_manifest(rows, root=folder)
    manifest.save(folder)
    return manifest


def reader(manifest, *, retries=0, altered_shards="ignore"):
    """Return a reader of all shards in order; `pause.__self__` lists the pauses that it took before retries."""
    mixture = make_mixture([manifest])
    starts = manifest.shards.offsets
    segments = Segments(
        shard=np.arange(len(starts)), start=np.zeros_like(starts), position=starts, length=mixture.epoch_samples
    )
    pauses: list[float] = []
    common = {"altered_shards": altered_shards, "pause": pauses.append}
    return SequentialReader(mixture, segments, retries, (CaptionField(),), **common)


def open_loader(folder, *, world=None, batch=8, image_size=16, tokenize=None, **data):
    """Open a loader of the shards in a folder, in this process unless the settings of the data say otherwise."""
    config = parse(DataConfig, {"sources": str(folder), "workers": 0, "retries": 0, **data})
    given = {"world": world or World(), "seed": 3, "image_size": image_size, "tokenize": tokenize or count_tokens}
    return build_loader(config, global_batch=batch, **given)


def count_tokens(texts):
    """Tokenize for tests: return the number in "caption {number}". Picklable, so that workers can use it."""
    return torch.tensor([[int(text.rpartition(" ")[2])] for text in texts], dtype=torch.int64)

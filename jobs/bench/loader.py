"""Images per second and core of our data loader against open_clip's, alternating on the same shards.

    python -m jobs.bench.loader --shorter 256 --shorter 512

Both loaders read, shuffle, decode, crop to 224 pixels and tokenize the whole dataset once per round, in this process
with one thread. CPU time is reported, which other load on the machine hardly changes. Our loader leaves normalization
to the device, as in training.
"""

from __future__ import annotations

import argparse
import functools
import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import webdataset
from PIL import Image

from jobs.bench.harness import alternate, parser, ratios, seconds, show
from pipeline.config import parse
from pipeline.data.data_config import DataConfig
from pipeline.data.loading.decode import fast_tokenizer
from pipeline.data.loading.loader import build_loader
from pipeline.data.shards.manifest_format import make_manifest
from pipeline.distributed.world import World
from pipeline.files import sha256_of

BATCH, PIXELS = 64, 224
QUALITY = 90
SPECTRUM = 1.5
"""Amplitude falls as frequency to this power. Images then take 2.7, 2.4 and 2.1 bits per pixel at shorter sides of 256,
384 and 512; nine photographs took 1.7 to 3.4, 1.5 to 2.9 and 1.7 to 2.2. A power of 1 gives 5 bits, mostly noise."""
META = b'{"url": "http://example.org/picture.jpg", "status": "success", "width": 640, "height": 480, "exif": "{}"}'
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
WORDS = (
    "a dog cat man tree house red blue green car boat sun moon sea sky hill road bird fish horse cup book hat door old "
    "new big small two three on in under near with and the of at by"
)
"""One token each."""


def photo(rng: np.random.Generator, *, shorter: int) -> Image.Image:
    """A random image that costs as many bits a pixel as photographs do, with an aspect ratio of 1 to 1.5."""
    width, height = shorter, round(shorter * rng.uniform(1.0, 1.5))
    if rng.random() < 0.7:
        width, height = height, width
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1.0
    phases = np.exp(2j * np.pi * rng.random((3, *frequency.shape)))
    luma, red, blue = np.fft.irfft2(phases / frequency**SPECTRUM, s=(height, width))
    channels = np.stack([luma + 0.4 * red, luma, luma + 0.4 * blue], axis=-1)
    return Image.fromarray(np.clip(128 + 55 * channels / channels.std(), 0, 255).astype(np.uint8))


def make_shards(folder: Path, *, shards: int, samples: int, shorter: int, distinct: int = 0) -> Path:
    """Write shards of generated images with captions and metadata in img2dataset's layout.

    `distinct`: generate so many images only.
    """
    rng = np.random.default_rng(0)
    rows = []
    given = [photo(rng, shorter=shorter) for _ in range(distinct)]
    for s in range(shards):
        path = folder / f"{s:05d}.tar"
        with webdataset.TarWriter(str(path), mtime=0.0) as tar:
            for i in range(samples):
                out = io.BytesIO()
                image = given[(s * samples + i) % len(given)] if given else photo(rng, shorter=shorter)
                image.save(out, "JPEG", quality=QUALITY)
                caption = " ".join(rng.choice(WORDS.split(), size=rng.integers(4, 16)))
                tar.write({"__key__": f"{s:05d}{i:04d}", "jpg": out.getvalue(), "json": META, "txt": caption})
        rows.append((path.name, samples, path.stat().st_size, sha256_of(path)))
    make_manifest(rows, root=folder).save(folder)
    return folder


def run_open_clip(folder: Path, *, samples: int, tokenizer: Any) -> None:
    import open_clip_train.data as reference
    from open_clip.transform import image_transform
    from webdataset.tariterators import tar_file_expander

    # open_clip_train 3.3.0 fails on the end-of-shard marker of webdataset 0.2.111: disable it.
    reference.tar_file_expander = lambda *args, **kwargs: tar_file_expander(*args, eof_value=None, **kwargs)
    shards = len(list(folder.glob("*.tar")))
    args = SimpleNamespace(
        train_data=f"{folder}/{{00000..{shards - 1:05d}}}.tar",
        train_data_upsampling_factors=None,
        train_num_samples=samples,
        dataset_resampled=False,
        seed=0,
        batch_size=BATCH,
        workers=0,
        world_size=1,
    )
    transform = image_transform(PIXELS, is_train=True, mean=MEAN, std=STD)
    data = reference.get_wds_dataset(args, transform, is_train=True, floor=True, tokenizer=tokenizer)
    seen = sum(len(image) for image, _ in data.dataloader)
    assert seen == samples // BATCH * BATCH, f"open_clip's loader returned {seen} of {samples} samples"


def compare(shorter: int, options: argparse.Namespace) -> None:
    """Print a table for images stored with this shorter side."""
    import open_clip

    tokenizer, samples = open_clip.get_tokenizer("ViT-B-32"), options.samples
    tokenize = fast_tokenizer(tokenizer)

    def ours(folder: Path, **settings: Any) -> None:
        config = parse(DataConfig, {"sources": str(folder), "streams": 8, "workers": 0, **settings})
        world = World(device=torch.device("cuda", 0)) if config.decoding == "gpu" else World()
        loader = build_loader(config, world=world, global_batch=BATCH, seed=0, image_size=PIXELS, tokenize=tokenize)
        for _ in range(samples // BATCH):
            batch = next(loader)
        batch.image.cpu()  # a GPU may still be busy
        loader.close()

    with tempfile.TemporaryDirectory() as name:
        folder = make_shards(Path(name), shards=4, samples=samples // 4, shorter=shorter)
        size = sum(path.stat().st_size for path in folder.glob("*.tar")) / samples
        runs: dict[str, Callable[[], None]] = {
            "open_clip": functools.partial(run_open_clip, folder, samples=samples, tokenizer=tokenizer),
            "ours": functools.partial(ours, folder),
            "ours, exact": functools.partial(ours, folder, decoding="exact"),
        }
        if torch.cuda.is_available():
            runs["ours, gpu"] = functools.partial(ours, folder, decoding="gpu")
        timed = {label: functools.partial(seconds, run) for label, run in runs.items()}
        times = alternate(timed, rounds=options.rounds)
    rates = {label: [samples / taken for taken in durations] for label, durations in times.items()}
    rows = {label: (median(speeds), *ratios(speeds, rates["open_clip"])) for label, speeds in rates.items()}
    columns = {"images/s/core": ".0f", "/ open_clip": ".2f", "lowest": ".2f", "highest": ".2f"}
    head = f"shorter side {shorter}, {size / 1000:.0f} kB a sample, {samples} samples, {options.rounds} rounds"
    show(head, columns, rows)


def main() -> None:
    given = parser(__doc__, rounds=5)
    given.add_argument("--shorter", type=int, action="append", help="shorter side of the stored images, in pixels")
    given.add_argument("--samples", type=int, default=768)
    given.set_defaults(threads=1)
    options = given.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {PIXELS} px out")
    for shorter in options.shorter or (256, 384, 512):
        compare(shorter, options)


if __name__ == "__main__":
    main()

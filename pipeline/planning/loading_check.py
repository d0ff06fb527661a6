"""What the loading workers of this node deliver: decodes images for a second and recommends `data.workers`."""

from __future__ import annotations

import io
import itertools
import math
import tarfile
import time
from collections.abc import Sequence
from typing import Any

from pipeline.cores import usable_cores
from pipeline.data.data_config import LEAST_LOADING, CropConfig, default_workers
from pipeline.errors import UserError
from pipeline.planning.node_checks import DoctorFinding

SIDE, STORED, IMAGES = 224, 384, 32
"""Pixels that a model reads, shorter side of the generated images, and how many images are decoded in turn."""
ENOUGH = 2500
"""Images per second and GPU, an estimate: ViT-B/16 (3 x 41 GFLOP a pair) at 31% of an H100's peak of 989 TFLOP/s.
Smaller models need more."""


def check_loading(
    manifests: Sequence[str],
    *,
    ranks: int,
    needed: float | None = None,
    allow_commands: bool = False,
    allow_outside: bool = False,
) -> DoctorFinding:
    """Decode in one process for a second, and say how many images the default number of workers gives each rank.

    Args:
        manifests: Images are taken from the first shard of the first of these; without any, they are generated.
        ranks: Processes that train on this node: one per GPU.
        needed: Images per second that the steps of one GPU take; None: ENOUGH.
        allow_commands: As `load_manifest`.
        allow_outside: As `load_manifest`.
    """
    cores = usable_cores()
    try:
        images, what = _images(manifests, allow_commands=allow_commands, allow_outside=allow_outside)
    except (UserError, OSError, tarfile.TarError) as error:
        return DoctorFinding("loading", "note", f"not measured: {error}", "check the folder given by --data")
    workers = default_workers(cores // ranks)
    rate = _rate(images)
    found = (
        f"one process decodes {rate:,.0f} images/s ({what}); {workers} workers for each of {ranks} ranks on {cores} "
        f"cores, the default, deliver up to {workers * rate:,.0f} images/s per rank"
    )
    if needed is not None:
        found += f"; the recipe's steps take {needed:,.0f}"
    needed = ENOUGH if needed is None else LEAST_LOADING * needed
    streams = f"data.streams of at least {workers * ranks} lets all of them work (the default is 64)"
    if workers * rate < needed and cores // ranks - 1 > workers:
        more = min(cores // ranks - 1, math.ceil(needed / max(1.0, rate)))
        return DoctorFinding("loading", "note", found, f"data.workers={more} data.streams={more * ranks} or more")
    if workers * rate < needed:
        remedy = (
            "more cores per rank, images stored at about 256 px, or data.decoding=scaled for those of 448 px and more"
        )
        return DoctorFinding("loading", "note", found, remedy)
    return DoctorFinding("loading", "good", f"{found}; {streams}")


def _rate(images: Sequence[bytes], *, seconds: float = 1.0) -> float:
    """Images per second of CPU time in one thread: decoded, cropped and resized as in training."""
    import torch

    from pipeline.data.loading.decode import ImageDecoder

    decoder = ImageDecoder(size=SIDE, crop=CropConfig(), mode="fast", max_pixels=178_956_970)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    try:
        for image in images[:2]:
            decoder(image, state=0)
        start, until = time.process_time(), time.monotonic() + 5 * seconds
        for count, image in enumerate(itertools.cycle(images), start=1):
            decoder(image, state=count)
            spent = time.process_time() - start
            if spent > seconds or time.monotonic() > until:
                return count / spent
    finally:
        torch.set_num_threads(threads)
    raise AssertionError("there are images")


def _images(manifests: Sequence[str], **allowed: bool) -> tuple[list[bytes], str]:
    """Encoded images, and what they are."""
    from pipeline.data.shards.manifest_format import load_manifest
    from pipeline.data.shards.storage import open_shard
    from pipeline.data.shards.tar_reader import FORMAT_SUFFIXES

    if not manifests:
        return _generated(), f"generated, {STORED} px"
    manifest = load_manifest(manifests[0], **allowed)
    suffixes = tuple(f".{suffix}" for suffix in FORMAT_SUFFIXES)
    found: list[bytes] = []
    with open_shard(manifest.url(manifest.shards[0])) as file, tarfile.open(fileobj=file, mode="r|") as tar:
        for member in tar:
            if member.name.lower().endswith(suffixes) and (extracted := tar.extractfile(member)):
                found.append(extracted.read())
            if len(found) == IMAGES:
                break
    if not found:
        raise UserError(f"the first shard of {manifests[0]} has no images")
    return found, f"of {manifests[0]}"


def _generated() -> list[bytes]:
    """JPEGs that take about as many bits per pixel as photographs do."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    height, width = STORED, STORED * 4 // 3
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1.0
    found = []
    for _ in range(4):
        phases: Any = np.exp(2j * np.pi * rng.random((3, *frequency.shape)))
        waves = np.fft.irfft2(phases / frequency**1.5, s=(height, width)).transpose(1, 2, 0)
        out = io.BytesIO()
        pixels = np.clip(128 + 55 * waves / waves.std(), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(out, "JPEG", quality=90)
        found.append(out.getvalue())
    return found

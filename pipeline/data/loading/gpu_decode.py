"""Decoding on the GPU: ordinary JPEGs of a batch with nvJPEG, in the training process."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import logging
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from pipeline.data.loading.decode import EncodedJpeg
from pipeline.data.loading.worker import Part
from pipeline.data.shards.manifest_format import Manifest
from pipeline.data.shards.tar_reader import CorruptSample, rgb_image
from pipeline.distributed.devices import to_device
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.versions import version_of

GPU_CHUNK_PIXELS = 1 << 26
"""No more are decoded at a time: 200 MB."""
log = logging.getLogger(__name__)


def whole_batch(parts: Sequence[Part], image: Tensor, *, device: torch.device, manifest: Manifest) -> Tensor:
    """All images of a batch, uint8 [b, 3, H, W] on the device, channels last in memory: the rows of `image` that the
    workers have decoded, and the others. UserError if one of those cannot be decoded.
    """
    firsts = list(itertools.accumulate((len(part.sample_id) for part in parts), initial=0))
    encoded = [(first + i, jpeg) for part, first in zip(parts, firsts, strict=False) for i, jpeg in part.encoded]
    taken = {row for row, _ in encoded}
    whole = torch.empty(image.shape, dtype=torch.uint8, device=device, memory_format=torch.channels_last)
    rest = torch.tensor([row for row in range(len(image)) if row not in taken], dtype=torch.int64)
    whole[to_device(rest, device)] = to_device(image[rest], device)
    at = 0
    try:
        pixels = decode_on_gpu([jpeg for _, jpeg in encoded], size=image.shape[-1], device=device)
        for at, values in enumerate(pixels, 1):
            whole[encoded[at - 1][0]] = values
    except CorruptSample as error:
        number = int(np.concatenate([part.sample_id for part in parts])[encoded[at][0]])
        shard = manifest.url(manifest.shard_of(number))
        raise UserError(
            f"Sample {number} of {shard}: neither the GPU nor the CPU can decode its image ({error}), and by then "
            "the batch is complete, so it cannot be replaced. Continue with --resume latest data.decoding=fast, "
            "which replaces such samples."
        ) from error
    return whole


def decode_on_gpu(images: Sequence[EncodedJpeg], *, size: int, device: torch.device) -> Iterator[Tensor]:
    """Decode JPEGs with nvJPEG through torchvision, crop and resize them: uint8 [3, size, size] each, in order.

    An image that nvJPEG refuses is decoded by Pillow. Both passes of the resizing round to 8 bits, as those of "fast"
    do, so the same decoded pixels give results within 2 of 255. nvJPEG's pixels are others, above all in chroma, which
    torchvision does not ask it to interpolate. CorruptSample if no decoder can read the image after the last that was
    returned.
    """
    start = pixels = 0
    for i, image in enumerate(images):
        if i > start and pixels + math.prod(image.shape) > GPU_CHUNK_PIXELS:
            yield from _decoded_together(images[start:i], size=size, device=device)
            start, pixels = i, 0
        pixels += math.prod(image.shape)
    yield from _decoded_together(images[start:], size=size, device=device)


def _decoded_together(images: Sequence[EncodedJpeg], *, size: int, device: torch.device) -> Iterator[Tensor]:
    from torchvision.io import ImageReadMode, decode_jpeg  # not in workers, which do not need it

    if device.type == "cuda":
        # torchvision decodes on a stream of its own, into memory that this stream may still read for earlier images.
        torch.cuda.current_stream(device).synchronize()
    files = [torch.frombuffer(bytearray(image.data), dtype=torch.uint8) for image in images]
    read = functools.partial(decode_jpeg, mode=ImageReadMode.RGB, device=device)
    decoded: list[Tensor | None] = [None] * len(files)
    try:
        decoded = read(files) if files else []
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # of one of them: none is returned
        if device.type == "cuda":
            torch.cuda.empty_cache()  # nvJPEG allocates outside of torch's memory
        _warn_of_refusal(str(error).splitlines()[0])
        for i, file in enumerate(files):
            with contextlib.suppress(RuntimeError):
                decoded[i] = read(file)
    for image, pixels_CHW in zip(images, decoded, strict=True):
        if pixels_CHW is None or pixels_CHW.shape != (3, *image.shape):
            pixels_CHW = torch.from_numpy(np.array(rgb_image(image.data))).to(device).permute(2, 0, 1)
        top, left, h, w = image.box
        window = pixels_CHW[None, :, top : top + h, left : left + w].float()
        for shape in ((h, size), (size, size)):
            window = F.interpolate(window, size=shape, mode="bicubic", antialias=True).round_().clamp_(0, 255)
        yield window[0].to(torch.uint8)


@functools.cache  # once for each reason
def _warn_of_refusal(why: str) -> None:
    log.warning("The GPU's JPEG decoder refused an image (%s): such images are decoded on the CPU.", why)


def gpu_that_decodes(world: World) -> str | None:
    """What decodes JPEGs if a rank's GPU does: its name and versions. Otherwise a warning says why not."""
    device = world.device
    if device.type != "cuda":
        if world.is_main:
            log.warning("data.decoding=gpu: this rank computes on the CPU, so images are decoded as with `fast`.")
        return None
    probe = io.BytesIO()
    Image.new("RGB", (32, 32)).save(probe, "JPEG")
    from torchvision.io import decode_jpeg

    try:
        decode_jpeg(torch.frombuffer(bytearray(probe.getvalue()), dtype=torch.uint8), device=device)
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        log.warning("data.decoding=gpu: nvJPEG fails (%s), so images are decoded as with `fast`.", why)
        return None
    version = version_of("torchvision")
    return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}, torchvision {version}"

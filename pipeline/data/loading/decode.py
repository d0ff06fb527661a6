"""From encoded bytes to pixels: deterministic crops, and two decoders that accept exactly the same images.

Crops are open_clip's RandomResizedCrop with hashes in place of random numbers. With its defaults (scale 0.9 to 1), no
random crop fits an image whose longer side is more than 1.5 times the shorter one, so such an image always gets the
same central crop; this is reproduced on purpose.
"""

from __future__ import annotations

import functools
import math
import warnings
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import simplejpeg
import torch
from PIL import Image, ImageEnhance
from torch import Tensor
from torch.nn import functional as F

from pipeline.data.data_config import AugmentConfig, CropConfig
from pipeline.data.order.hashing import Purpose, draw, key, permutation, uniform
from pipeline.data.shards.tar_reader import CorruptSample, rgb_image
from pipeline.pictures import jpeg
from pipeline.pictures.pixels import WHITE, Colour

Box = tuple[int, int, int, int]
CROP_ATTEMPTS = 10
ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
RGB_JPEG = frozenset({"YCbCr", "RGB", "Gray"})
GPU_IMAGE_PIXELS, GPU_IMAGE_BYTES, GPU_REDUCTION = 1 << 24, 1 << 22, 40
"""Limits of what is decoded on a GPU: pixels, encoded bytes, and how many times a crop's side may be reduced."""


def crop_box(height: int, width: int, *, crop: CropConfig, state: int) -> Box:
    """`(top, left, height, width)` in pixels of a crop by torchvision's rule and the hash key `state`."""
    if crop.fixed:  # the rule would move the crop of an image that is a pixel wider than high
        return _central_box(height, width, ratio=crop.ratio)
    log_ratio = (math.log(crop.ratio[0]), math.log(crop.ratio[1]))
    for attempt in range(CROP_ATTEMPTS):
        share, shape = uniform(state, 4 * attempt), uniform(state, 4 * attempt + 1)
        area = height * width * (crop.scale[0] + (crop.scale[1] - crop.scale[0]) * share)
        aspect = math.exp(log_ratio[0] + (log_ratio[1] - log_ratio[0]) * shape)
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            top = draw(state, 4 * attempt + 2) % (height - h + 1)
            left = draw(state, 4 * attempt + 3) % (width - w + 1)
            return top, left, h, w
    return _central_box(height, width, ratio=crop.ratio)


def _central_box(height: int, width: int, *, ratio: tuple[float, float]) -> Box:
    h, w = height, width
    if width / height < ratio[0]:
        h = round(width / ratio[0])
    elif width / height > ratio[1]:
        w = round(height * ratio[1])
    return (height - h) // 2, (width - w) // 2, h, w


def augmented(image: Tensor, *, augment: AugmentConfig, state: int) -> Tensor:
    """uint8 [3, size, size] with colours changed by the crop's hash key, as by open_clip's jitter and grey scale."""
    state = key(state, Purpose.AUGMENT)
    picture = Image.fromarray(image.permute(1, 2, 0).numpy())
    if uniform(state, 0) < augment.color_jitter_prob:
        for kind in permutation(key(state, 2), 4):
            strength, share = augment.color_jitter[kind], uniform(state, 2 + int(kind))
            if kind < len(ENHANCERS):
                low = max(0.0, 1 - strength)
                picture = ENHANCERS[kind](picture).enhance(low + (1 + strength - low) * share)
            elif strength:
                picture = _with_hue(picture, shift=strength * (2 * share - 1))
    if uniform(state, 1) < augment.gray_scale_prob:
        picture = picture.convert("L").convert("RGB")
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def _with_hue(picture: Image.Image, *, shift: float) -> Image.Image:
    """With hues shifted by a share of the circle, as by torchvision."""
    hsv = np.array(picture.convert("HSV"))
    hsv[..., 0] += np.uint8(int(shift * 255) % 256)
    return Image.frombytes("HSV", picture.size, hsv.tobytes()).convert("RGB")


@dataclass(frozen=True)
class EncodedJpeg:
    """A JPEG that a GPU is to decode."""

    data: bytes
    shape: tuple[int, int]
    """Height and width in pixels."""
    box: Box


@dataclass(frozen=True)
class ImageDecoder:
    """Encoded image -> uint8 [3, size, size], cropped by hash (key `state`) and resized; channels are last in memory.

    Mode "exact" gives the pixels of open_clip's training transform for the same box, except that it scales 16-bit grey
    to 8 bits where open_clip gets white. "fast" decodes JPEG with libjpeg-turbo and resizes with torch; its pixels
    differ by at most 2 of 255 (by 9 where Pillow 13 resizes vertically first). An image that libjpeg-turbo refuses is
    decoded by Pillow, so both modes accept the same images.
    """

    size: int
    crop: CropConfig
    mode: Literal["fast", "exact"]
    max_pixels: int
    background: Colour = WHITE
    """Behind what is transparent."""
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    gpu: str | None = None
    """The GPU to which `gpu_decode` leaves ordinary JPEGs, with versions: part of what determines pixels."""

    def __call__(self, data: bytes, *, state: int) -> Tensor:
        """Decode, crop, resize and augment; CorruptSample if PIL cannot decode all of it, or it is too large."""
        image = self._fast(data, state) if self.mode == "fast" else None
        if image is None:
            image = self._exact(data, state)
        return augmented(image, augment=self.augment, state=state) if self.augment else image

    def for_gpu(self, data: bytes, *, state: int) -> EncodedJpeg | None:
        """What a GPU needs to decode an image; None if it is to be decoded here. Raises CorruptSample as a call does.

        Only a complete JPEG with one scan and three channels is left to a GPU: these are hardly ever corrupt, and all
        that differ between decoders (progressive ones, grey, CMYK, without an end) are decoded here. So are large ones,
        and those that torch cannot resize on a GPU, whose kernel has shared memory for a factor of 47.
        """
        if data[:2] != b"\xff\xd8" or not jpeg.is_plain(data):
            return None
        try:
            height, width, colorspace = jpeg.header(data)
        except ValueError:
            return None
        self._check(height, width)
        if colorspace != "YCbCr" or not 0 < height * width <= GPU_IMAGE_PIXELS:
            return None
        box = crop_box(height, width, crop=self.crop, state=state)
        if len(data) > min(3 * height * width, GPU_IMAGE_BYTES) or max(box[2:]) > GPU_REDUCTION * self.size:
            return None
        return EncodedJpeg(data, (height, width), box)

    def _check(self, height: int, width: int) -> None:
        if height * width > self.max_pixels:
            raise CorruptSample("image has too many pixels")

    def _fast(self, data: bytes, state: int) -> Tensor | None:
        """The crop of a JPEG by libjpeg-turbo and torch; None if Pillow has to decode the image."""
        if data[:2] != b"\xff\xd8":
            return None
        try:
            height, width, colorspace = jpeg.header(data)
            self._check(height, width)
            jpeg.check_scans(data)
            if colorspace not in RGB_JPEG:
                return None
            pixels_HWC = simplejpeg.decode_jpeg(data, colorspace="RGB", strict=True)
        except CorruptSample:
            raise
        except (ValueError, MemoryError):
            return None
        top, left, h, w = crop_box(height, width, crop=self.crop, state=state)
        window_HWC = torch.from_numpy(pixels_HWC[top : top + h, left : left + w].copy())
        # A dense window with a batch axis has strides that torch takes for channels-last, its fastest path for uint8.
        window = window_HWC[None].permute(0, 3, 1, 2)
        return F.interpolate(window, size=(self.size, self.size), mode="bicubic", antialias=True)[0]

    def _exact(self, data: bytes, state: int) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PIL warns about large sizes, which `max_pixels` limits, and odd metadata
            image = rgb_image(data, max_pixels=self.max_pixels, background=self.background)
        top, left, h, w = crop_box(image.height, image.width, crop=self.crop, state=state)
        resized = image.crop((left, top, left + w, top + h)).resize((self.size, self.size), Image.Resampling.BICUBIC)
        pixels = torch.frombuffer(bytearray(resized.tobytes()), dtype=torch.uint8)
        return pixels.view(self.size, self.size, 3).permute(2, 0, 1)


def normalize(
    image: Tensor,
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Tensor:
    """uint8 [b, 3, H, W] in 0..255 -> (image / 255 - mean) / std in `dtype`, on the same device.

    In fp32 this is the arithmetic of torchvision's Normalize, to the bit. In another precision it is one pass over
    memory, image * 1/(255 std) - mean/std with one rounding at the end.
    """
    out = torch.empty(image.shape, dtype=dtype, device=image.device, memory_format=memory_format)
    if dtype == torch.float32:
        out.copy_(image).div_(255)
        return out.sub_(_per_channel(mean, image.device)).div_(_per_channel(std, image.device))
    slope = tuple(1 / (255 * s) for s in std)
    shift = tuple(-m / s for m, s in zip(mean, std, strict=True))
    return torch.addcmul(_per_channel(shift, image.device), image, _per_channel(slope, image.device), out=out)


@functools.cache
def _per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """fp32 [1, C, 1, 1], cached because copying it to the device in every step would wait for the device."""
    return torch.tensor(values, device=device).view(1, -1, 1, 1)

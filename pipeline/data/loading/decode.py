"""How a sample becomes tensors: deterministic crops, two decoders that accept exactly the same images, and tokens.

Crops are open_clip's RandomResizedCrop with hashes in place of random numbers. With its defaults (scale 0.9 to 1), no
random crop fits an image whose longer side is more than 1.5 times the shorter one, so such an image always gets the
same central crop; this is reproduced on purpose. Captions become the ids of CLIP's byte-pair tokenizer, from plain
tables, so that the loader's workers need not import open_clip.
"""

from __future__ import annotations

import functools
import html
import itertools
import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import simplejpeg
import torch
from PIL import Image, ImageEnhance
from torch import Tensor
from torch.nn import functional as F

from pipeline.data.data_config import CENTRAL_SQUARE, AugmentConfig, CropConfig
from pipeline.data.order.mixture import Purpose, draw, key, permutation, uniform
from pipeline.data.shards.tar_reader import CorruptSample, rgb_image
from pipeline.pictures import jpeg
from pipeline.pictures.pixels import WHITE, Colour

Box = tuple[int, int, int, int]
CROP_ATTEMPTS = 10
ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
RGB_JPEG = frozenset({"YCbCr", "RGB", "Gray"})
GPU_IMAGE_PIXELS, GPU_IMAGE_BYTES, GPU_REDUCTION = 1 << 24, 1 << 22, 40
"""Limits of what is decoded on a GPU: pixels, encoded bytes, and how many times a crop's side may be reduced."""
CACHED_WORDS = 200_000
CACHED_LENGTH = 32
# ftfy changes ASCII text only if it contains control characters or HTML entities; any other ASCII text skips it.
NEEDS_CLEANING = re.compile(r"[^\t\n\r\x20-\x25\x27-\x7e]")


def crop_box(height: int, width: int, *, crop: CropConfig, state: int) -> Box:
    """`(top, left, height, width)` in pixels of a crop by torchvision's rule and the hash key `state`."""
    if crop == CENTRAL_SQUARE:  # the rule would move the crop of an image that is a pixel wider than high
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
                hsv = np.array(picture.convert("HSV"))
                hsv[..., 0] += np.uint8(int(strength * (2 * share - 1) * 255) % 256)
                picture = Image.frombytes("HSV", picture.size, hsv.tobytes()).convert("RGB")
    if uniform(state, 1) < augment.gray_scale_prob:
        picture = picture.convert("L").convert("RGB")
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


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
    augment: AugmentConfig | None = None
    """None: colours stay."""
    gpu: str | None = None
    """The GPU to which `gpu_decode` leaves ordinary JPEGs, with versions: part of what determines pixels."""

    def __call__(self, data: bytes, *, state: int) -> Tensor:
        """Decode, crop, resize and augment; CorruptSample if PIL cannot decode all of it, or it is too large."""
        image = self._fast(data, state) if self.mode == "fast" else None
        if image is None:
            image = self._exact(data, state)
        return image if self.augment is None else augmented(image, augment=self.augment, state=state)

    def for_gpu(self, data: bytes, *, state: int) -> EncodedJpeg | None:
        """What a GPU needs to decode an image; None if it is to be decoded here. Raises CorruptSample as a call does.

        Only a complete JPEG with one scan and three channels is left to a GPU: these are hardly ever corrupt, and all
        that differ between decoders (progressive ones, grey, CMYK, without an end) are decoded here. So are large ones,
        and those that torch cannot resize on a GPU, whose kernel has shared memory for a factor of 47.
        """
        height, width, colorspace = self._header(data)
        if colorspace != "YCbCr" or not 0 < height * width <= GPU_IMAGE_PIXELS or not jpeg.is_plain(data):
            return None
        box = crop_box(height, width, crop=self.crop, state=state)
        if len(data) > min(3 * height * width, GPU_IMAGE_BYTES) or max(box[2:]) > GPU_REDUCTION * self.size:
            return None
        return EncodedJpeg(data, (height, width), box)

    def _header(self, data: bytes) -> tuple[int, int, str]:
        """Height, width and colour space of a JPEG by libjpeg-turbo; zeros if it reads no JPEG."""
        try:
            height, width, colorspace = jpeg.header(data) if data[:2] == b"\xff\xd8" else (0, 0, "")
        except ValueError:
            return 0, 0, ""
        if height * width > self.max_pixels:
            raise CorruptSample("image has too many pixels")
        return height, width, colorspace

    def _fast(self, data: bytes, state: int) -> Tensor | None:
        """The crop of a JPEG by libjpeg-turbo and torch; None if Pillow has to decode the image."""
        height, width, colorspace = self._header(data)
        if colorspace not in RGB_JPEG:
            return None
        try:
            jpeg.check_scans(data)
            pixels_HWC = simplejpeg.decode_jpeg(data, colorspace="RGB", strict=True)
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


def fast_tokenizer(tokenizer: Any) -> Any:
    """The cached equivalent of what `open_clip.get_tokenizer` returns; the tokenizer itself if it is another's."""
    from open_clip import tokenizer as reference

    plain = type(tokenizer) is reference.SimpleTokenizer and tokenizer.reduction_fn is None
    if not plain or tokenizer.clean_fn is not reference.get_clean_fn("lower"):
        return tokenizer
    return CachedTokenizer(
        context_length=tokenizer.context_length,
        pattern=tokenizer.pat.pattern,
        ids=tokenizer.encoder,
        ranks=tokenizer.bpe_ranks,
        letters=tokenizer.byte_encoder,
        special={tokenizer.decoder[number]: number for number in tokenizer.all_special_ids},
        start=tokenizer.sot_token_id,
        end=tokenizer.eot_token_id,
    )


@dataclass
class CachedTokenizer:
    """Captions -> int64 [b, context_length]: start token, lower-cased byte pairs, cut if too long, end token, zeros."""

    context_length: int
    pattern: str
    """Regular expression that splits text into words."""
    ids: Mapping[str, int]
    """Byte-pair symbol -> id."""
    ranks: Mapping[tuple[str, str], int]
    """Pair of symbols -> rank of its merge."""
    letters: Mapping[int, str]
    """Byte -> printable character that represents it."""
    special: Mapping[str, int]
    """Tokens that are never split -> id."""
    start: int
    end: int
    _cache: dict[str, list[int]] = field(default_factory=dict, repr=False)

    def __call__(self, texts: list[str]) -> Tensor:
        result = np.zeros((len(texts), self.context_length), dtype=np.int64)
        for row, text in zip(result, texts, strict=True):
            if NEEDS_CLEANING.search(text):
                import ftfy

                text = html.unescape(html.unescape(ftfy.fix_text(text)))
            ids = [self.start]
            for word in " ".join(text.split()).lower().split(" "):  # no token contains a space
                ids += self._cache.get(word) or self._encode_word(word)
                if len(ids) >= self.context_length - 1:
                    break
            ids = [*ids[: self.context_length - 1], self.end]
            row[: len(ids)] = ids
        return torch.from_numpy(result)

    @functools.cached_property
    def _words(self) -> Any:
        import regex

        return regex.compile(self.pattern, regex.IGNORECASE)

    def _encode_word(self, word: str) -> list[int]:
        ids: list[int] = []
        for token in self._words.findall(word):
            stand_in = "".join(self.letters[byte] for byte in token.encode("utf-8"))
            ids += [self.special[stand_in]] if stand_in in self.special else self._merge(stand_in)
        if len(word) <= CACHED_LENGTH:
            if len(self._cache) >= CACHED_WORDS:
                self._cache.clear()
            self._cache[word] = ids
        return ids

    def _merge(self, token: str) -> list[int]:
        """Byte-pair encoding: merge all pairs of the lowest rank, until no pair has a rank."""
        parts = [*token[:-1], token[-1] + "</w>"]
        never = len(self.ranks)
        while len(parts) > 1:
            best = min(itertools.pairwise(parts), key=lambda pair: self.ranks.get(pair, never))
            if best not in self.ranks:
                break
            merged, i = [], 0
            while i < len(parts):
                if i + 1 < len(parts) and (parts[i], parts[i + 1]) == best:
                    merged.append(parts[i] + parts[i + 1])
                    i += 2
                else:
                    merged.append(parts[i])
                    i += 1
            parts = merged
        return [self.ids[part] for part in parts]

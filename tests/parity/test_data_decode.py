"""Decoded pixels and crops match torchvision, PIL and open_clip."""

from __future__ import annotations

import io
import math
import random
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import RandomResizedCrop

from pipeline.data.data_config import AugmentConfig, CropConfig
from pipeline.data.loading import decode
from pipeline.data.loading.decode import ImageDecoder, crop_box, normalize
from pipeline.data.order.mixture import draw
from pipeline.data.shards.tar_reader import CorruptSample
from tests.images import encoded

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
SIZE = 96
# Largest and mean difference between the two decoders, on the 0-255 scale. Pillow 13 and later resize some tall crops
# vertically first, which changes the rounding between the two passes; torch and older versions of Pillow never do.
SAME_ORDER, OTHER_ORDER = (2, 0.02), (9, 0.4)


def picture(number, *, size):
    """Make an image of the given (width, height) whose spectrum falls as 1 / frequency, as in photographs."""
    rng = np.random.default_rng(number)
    frequency = np.hypot(np.fft.fftfreq(size[1])[:, None], np.fft.rfftfreq(size[0])[None])
    frequency[0, 0] = 1
    phases = np.exp(2j * np.pi * rng.random((3, *frequency.shape)))
    waves = np.fft.irfft2(phases / frequency, s=size[::-1]).transpose(1, 2, 0)
    return Image.fromarray(np.clip(128 + 55 * waves / waves.std(), 0, 255).astype(np.uint8))


def decoder(mode, **options):
    settings: dict[str, Any] = {"size": SIZE, "crop": CropConfig(scale=(0.3, 1.0)), "max_pixels": 10**6} | options
    return ImageDecoder(mode=mode, **settings)


ENCODINGS: dict[str, Any] = {
    "jpeg": lambda image: encoded(image, "JPEG", quality=95),
    "jpeg, full colour resolution": lambda image: encoded(image, "JPEG", quality=90, subsampling=0),
    "jpeg, progressive": lambda image: encoded(image, "JPEG", progressive=True),
    "jpeg, grey": lambda image: encoded(image.convert("L"), "JPEG"),
    "jpeg, cmyk": lambda image: encoded(image.convert("CMYK"), "JPEG"),
    "png": lambda image: encoded(image, "PNG"),
    "png, transparent": lambda image: encoded(image.convert("RGBA"), "PNG"),
    "png, palette": lambda image: encoded(image.convert("P"), "PNG"),
    "webp": lambda image: encoded(image, "WEBP"),
}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("size", [(160, 120), (97, 300), (50, 40)])
def test_exact_mode_matches_open_clip(encoding, size, monkeypatch):
    from open_clip.transform import image_transform

    data = ENCODINGS[encoding](picture(1, size=size))
    box = crop_box(size[1], size[0], crop=decoder("exact").crop, state=7)
    monkeypatch.setattr(RandomResizedCrop, "get_params", staticmethod(lambda *_: box))
    transform = image_transform(SIZE, is_train=True, mean=MEAN, std=STD)
    expected = transform(Image.open(io.BytesIO(data)).convert("RGB"))
    found = normalize(decoder("exact")(data, state=7)[None], mean=MEAN, std=STD)[0]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 0, 1), (1, 3, 0, 2)])
@pytest.mark.parametrize(
    ("strengths", "grey"), [((0.32, 0.32, 0.32, 0.08), 0.0), ((1.5, 0.4, 0.0, 0.5), 0.0), ((0.4, 0.4, 0.4, 0.1), 1.0)]
)
def test_colours_change_as_in_open_clip(strengths, grey, order, monkeypatch):
    from open_clip.transform import AugmentationCfg, image_transform
    from torchvision.transforms import ColorJitter

    def drawn(*ranges):
        return order, *(r and r[0] + (r[1] - r[0]) * share for r, share in zip(ranges, shares, strict=True))

    shares = (0.9, 0.2, 0.7, 0.35)
    data, given = encoded(picture(1, size=(160, 120)), "PNG"), {"color_jitter": strengths, "color_jitter_prob": 1.0}
    ours = decoder("exact", augment=AugmentConfig(**given, gray_scale_prob=grey))
    box = crop_box(120, 160, crop=ours.crop, state=7)
    monkeypatch.setattr(RandomResizedCrop, "get_params", staticmethod(lambda *_: box))
    monkeypatch.setattr(ColorJitter, "get_params", staticmethod(drawn))
    config = AugmentationCfg(**given, gray_scale_prob=grey)
    expected = image_transform(SIZE, is_train=True, mean=MEAN, std=STD, aug_cfg=config)(Image.open(io.BytesIO(data)))
    monkeypatch.setattr(decode, "crop_box", lambda *_, **__: box)
    monkeypatch.setattr(decode, "uniform", lambda _, counter: (0.5, 0.5, *shares)[counter])
    monkeypatch.setattr(decode, "permutation", lambda *_: np.array(order))
    assert torch.equal(normalize(ours(data, state=7)[None], mean=MEAN, std=STD)[0], expected)


def test_colours_change_in_the_given_share_of_samples():
    image = torch.arange(12, dtype=torch.uint8).view(3, 2, 2) * 20
    augment = AugmentConfig(color_jitter=(0.4, 0.4, 0.4, 0.1), color_jitter_prob=0.7, gray_scale_prob=0.25)
    found = [decode.augmented(image, augment=augment, state=draw(1, i)) for i in range(1000)]
    grey = [bool((pixels[0] == pixels[1]).all() and (pixels[0] == pixels[2]).all()) for pixels in found]
    same = [torch.equal(pixels, image) for pixels in found]
    assert np.mean(grey) == pytest.approx(0.25, abs=0.05)
    assert np.mean(same) == pytest.approx(0.3 * 0.75, abs=0.05)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(
    ("size", "limits"), [((400, 250), SAME_ORDER), ((50, 40), SAME_ORDER), ((260, 400), OTHER_ORDER)]
)
def test_fast_mode_is_close_to_exact(encoding, size, limits):
    crop = CropConfig(scale=(0.6, 1.0), ratio=(0.9, 1.1)) if size[0] > size[1] else CropConfig()
    for number in range(5):
        data = ENCODINGS[encoding](picture(number, size=size))
        fast, exact = (decoder(mode, crop=crop)(data, state=number).float() for mode in ("fast", "exact"))
        assert fast.shape == (3, SIZE, SIZE)
        difference = (fast - exact).abs()
        assert difference.max() <= limits[0]
        assert difference.mean() <= limits[1]


def test_crops_stay_inside_the_image():
    crop = CropConfig(scale=(0.01, 1.0), ratio=(0.1, 10.0))
    for i in range(1000):
        height, width = 1 + draw(5, i) % 50 * 70, 1 + draw(6, i) % 50 * 70
        top, left, h, w = crop_box(height, width, crop=crop, state=i)
        assert min(top, left) >= 0
        assert min(h, w) >= 1
        assert top + h <= height
        assert left + w <= width


def damaged():
    rng = random.Random(0)
    whole = [make(picture(2, size=(60, 50))) for make in ENCODINGS.values()]
    for number in range(900):
        data = bytearray(whole[number % len(whole)])
        if number % 3 == 0:
            data = data[: rng.randrange(1, len(data))]
        for _ in range(number % 4):
            data[rng.randrange(len(data))] = rng.randrange(256)
        yield bytes(data)


def test_all_modes_agree_on_what_is_corrupt():
    verdicts = []
    for data in damaged():
        found = []
        for mode in ("fast", "exact"):
            try:
                decoder(mode, size=20)(data, state=1)
                found.append("")
            except CorruptSample as error:
                found.append(str(error))
        verdicts.append(tuple(found))
    disagree = [found for found in verdicts if len(set(found)) > 1]
    assert not disagree
    assert 200 < sum(found[0] != "" for found in verdicts) < 800


def test_images_above_max_pixels_are_corrupt_in_both_modes():
    data = ENCODINGS["jpeg"](picture(1, size=(160, 120)))
    for mode in ("fast", "exact"):
        decoder(mode, max_pixels=160 * 120)(data, state=1)
        with pytest.raises(CorruptSample, match="too many pixels"):
            decoder(mode, max_pixels=160 * 120 - 1)(data, state=1)
    bomb = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + (60000).to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00"
    bomb += zlib.crc32(bomb[12:]).to_bytes(4, "big") + b"\0\0\0\0IDAT" + zlib.crc32(b"IDAT").to_bytes(4, "big")
    with pytest.raises(CorruptSample, match="too many pixels"):
        decoder("fast")(bomb, state=1)


def test_crop_distribution_matches_torchvision():
    """Mean and spread of area, aspect ratio and position of 4,000 crops agree within four standard errors."""
    height, width, n = 300, 400, 4000
    crop = CropConfig(scale=(0.2, 0.6), ratio=(3 / 4, 4 / 3))
    torch.manual_seed(0)
    blank = torch.zeros(3, height, width)
    theirs = np.array([RandomResizedCrop.get_params(blank, list(crop.scale), list(crop.ratio)) for _ in range(n)])
    ours = np.array([crop_box(height, width, crop=crop, state=draw(1, i)) for i in range(n)])

    def features(boxes):
        top, left, h, w = boxes.T.astype(float)
        return np.stack([h * w / (height * width), np.log(w / h), top / (height - h + 1), left / (width - w + 1)])

    a, b = features(ours), features(theirs)
    error = np.sqrt((a.var(axis=1) + b.var(axis=1)) / n)
    assert (abs(a.mean(axis=1) - b.mean(axis=1)) < 4 * error).all()
    assert np.allclose(a.std(axis=1), b.std(axis=1), rtol=0.06)
    assert np.abs(np.corrcoef(a) - np.corrcoef(b)).max() < 6 / math.sqrt(n)


@pytest.mark.parametrize(("height", "width"), [(100, 150), (100, 300), (300, 100), (1, 9)])
def test_elongated_images_get_the_central_crop_of_torchvision(height, width):
    crop = CropConfig()
    torch.manual_seed(0)
    expected = RandomResizedCrop.get_params(torch.zeros(3, height, width), list(crop.scale), list(crop.ratio))
    assert {crop_box(height, width, crop=crop, state=i) for i in range(20)} == {tuple(expected)}


@pytest.mark.parametrize("statistics", [(MEAN, STD), ((0.5,) * 3, (0.5,) * 3), ((0.485, 0.456, 0.406), (0.229,) * 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_normalize_has_the_bits_of_torchvision_and_in_low_precision_those_of_its_rounded_result(statistics, dtype):
    every_value = torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1).expand(2, 16, 16, 3).permute(0, 3, 1, 2)
    mean, std = statistics
    exact = (every_value.float() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    assert torch.equal(normalize(every_value, mean=mean, std=std), exact), "torchvision's arithmetic"
    found = normalize(every_value, mean=mean, std=std, dtype=dtype)
    assert found.is_contiguous()
    assert torch.equal(found, exact.to(dtype))

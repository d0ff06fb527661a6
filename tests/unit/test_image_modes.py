"""Palettes, transparency, CMYK and odd depths: everything that reads a pair's image gets the pixels of training."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image

from data_prep.download_config import ImageConfig
from data_prep.fetching.decoder import ImageConverter
from data_prep.pairs.pair import convert
from pipeline.analysis.shard_pairs import whole
from pipeline.checkpoint.reader import open_checkpoint
from pipeline.config import parse
from pipeline.data.data_config import CropConfig, DataConfig
from pipeline.data.loading.decode import ImageDecoder
from pipeline.data.shards.tar_reader import rgb_image
from pipeline.errors import UserError
from pipeline.evaluation.datasets.task_data import TaskError, decode
from pipeline.evaluation.run.images import background_of
from pipeline.export import model_card
from pipeline.export.exporter import export
from pipeline.model.evaluation_model import _open, load_for_evaluation
from pipeline.pictures.pixels import WHITE, to_rgb
from pipeline.playground.explorer import open_image
from tests.images import encoded
from tests.shards import write_shards
from tests.towers import write_tiny
from tests.training import settings_in, train_here

SIDE = 48
FIXED = CropConfig(scale=(1.0, 1.0), ratio=(1.0, 1.0))
STD = (0.26862954, 0.26130258, 0.27577711)


def picture():
    """A smooth RGBA picture with every degree of transparency."""
    coarse = np.random.default_rng(0).integers(0, 256, (5, 5, 4), dtype=np.uint8)
    return Image.fromarray(coarse, "RGBA").resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def images():
    rgba = picture()
    rgb, palette = rgba.convert("RGB"), rgba.convert("RGB").quantize(200)
    deep = np.asarray(rgb.convert("L")).astype(np.uint16) * 257
    return {
        "palette": encoded(palette, "PNG"),
        "palette with a transparent colour": encoded(palette, "PNG", transparency=3),
        "GIF with a transparent colour": encoded(palette, "GIF", transparency=3),
        "palette with transparencies": encoded(palette, "PNG", transparency=bytes(range(200))),
        "RGB with a transparent colour": encoded(rgb, "PNG", transparency=rgb.getpixel((0, 0))),
        "RGBA": encoded(rgba, "PNG"),
        "RGBA in WebP": encoded(rgba, "WEBP", lossless=True, exact=True),
        "LA": encoded(rgba.convert("LA"), "PNG"),
        "1 bit": encoded(rgb.convert("1"), "PNG"),
        "CMYK": encoded(rgb.convert("CMYK"), "JPEG"),
        "16 bits": encoded(Image.fromarray(deep), "PNG"),
    }


IMAGES = images()


def expected(name):
    """Pillow's RGB, without transparency; 16 bits scaled to 8."""
    image = Image.open(io.BytesIO(IMAGES[name]))
    if name == "16 bits":
        return np.repeat((np.asarray(image) // 257).astype(np.uint8)[..., None], 3, axis=2)
    return np.asarray(image.convert("RGB"))


def expected_on_white(name):
    if "RGBA" not in name and "LA" not in name and "transparen" not in name:
        return expected(name)
    rgba = np.asarray(Image.open(io.BytesIO(IMAGES[name])).convert("RGBA")).astype(float)
    share = rgba[..., 3:] / 255
    return np.rint(rgba[..., :3] * share + 255 * (1 - share))


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("name", IMAGES)
def test_all_readers_see_the_pixels_of_training(name, tmp_path):
    body, pixels = IMAGES[name], expected_on_white(name)
    np.testing.assert_array_equal(np.asarray(decode(body, name="x")), expected(name), err_msg="official tasks")
    slack = int(not np.array_equal(pixels, expected(name)))  # Pillow's rounding
    (tmp_path / "file").write_bytes(body)
    readers = {
        "decoding pairs": rgb_image(body),
        "own tasks": decode(body, name="x", background=WHITE),
        "neuclip.score, a file": _open(tmp_path / "file", WHITE),
        "neuclip.score, a PIL image": _open(Image.open(io.BytesIO(body)), WHITE),
        "playground": open_image(body, name="x"),
    }
    for reader, found in readers.items():
        np.testing.assert_allclose(np.asarray(found), pixels, rtol=0, atol=slack, err_msg=reader)
    for mode in ("fast", "exact"):
        found = ImageDecoder(size=SIDE, crop=FIXED, mode=mode, max_pixels=10**6)(body, state=1).permute(1, 2, 0)
        np.testing.assert_allclose(found.numpy(), pixels, rtol=0, atol=slack, err_msg=mode)
    as_stored = ImageConfig(resize_mode="no", encode_format="png", encode_quality=1)
    stored, *_ = ImageConverter(as_stored, max_pixels=10**6)(io.BytesIO(body))
    difference = np.asarray(Image.open(io.BytesIO(stored)).convert("RGB")) - pixels
    assert np.abs(difference).mean() < 1.5, "a download; decoders convert CMYK differently"


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("name", IMAGES)
def test_imported_images_keep_their_pixels(name):
    body = IMAGES[name]
    whole = convert(body)
    assert whole.transparent == (expected(name) != np.rint(expected_on_white(name))).any()
    assert whole.transparent or whole.body == body
    reduced = to_rgb(Image.open(io.BytesIO(body))).resize((24, 24), Image.Resampling.BICUBIC)
    assert convert(body, 24).body == encoded(reduced, "JPEG", quality=95)


@pytest.mark.filterwarnings("error")
def test_transparent_images_are_put_on_white_and_pictures_of_one_colour_counted():
    clear, palette = Image.new("RGBA", (8, 8), (255, 0, 0, 0)), Image.new("P", (8, 8), 1)
    palette.putpalette([9] * 768)
    for body, flags in (
        (encoded(clear, "PNG"), (True, True)),
        (encoded(Image.new("RGBA", (8, 8), (255, 0, 0, 255)), "PNG"), (False, True)),  # opaque: kept as it is
        (encoded(palette, "PNG", transparency=bytes(range(256))), (True, True)),
        (IMAGES["RGBA"], (True, False)),
        (IMAGES["1 bit"], (False, False)),
    ):
        stored = convert(body)
        assert (stored.transparent, stored.plain, stored.body != body) == (*flags, flags[0])
    assert np.asarray(Image.open(io.BytesIO(convert(encoded(clear, "PNG")).body)).convert("RGB")).min() > 250


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("name", [name for name in IMAGES if name != "16 bits"])
def test_what_model_cards_advise_gives_the_pixels_of_training(name):
    """Without it, open_clip resizes a palette's numbers and drops transparency."""
    transformers = pytest.importorskip("transformers")
    line = 'Image.open(...).convert("RGBA")'
    assert Path(model_card.__file__).read_text().count(line) == 2, "the cards for open_clip and for transformers"
    preprocess = image_transform_v2(PreprocessCfg(size=(32, 32)), is_train=False)
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    scale = 255 * torch.tensor(STD)[:, None, None]
    right = preprocess(rgb_image(IMAGES[name]))

    def error(tensor):
        return float(((torch.as_tensor(np.asarray(tensor)) - right) * scale).abs().max())

    image = Image.open(io.BytesIO(IMAGES[name])).convert("RGBA")
    canvas = Image.new("RGB", image.size, "white")
    canvas.paste(image, mask=image)
    assert error(preprocess(canvas)) == 0
    assert error(processor(canvas, return_tensors="pt")["pixel_values"][0]) < 3.5, "another resize, of 255"
    if "palette" in name or name == "RGBA":
        assert error(preprocess(Image.open(io.BytesIO(IMAGES[name])))) > 30


def test_one_setting_puts_transparent_pictures_on_another_colour(tmp_path):
    """`data.background` is stored with the model, whose exports and readers use it; official tasks do not."""
    green = (0, 128, 0)
    body = encoded(Image.new("RGBA", (SIDE, SIDE), (200, 0, 0, 0)), "PNG")
    write_shards(tmp_path / "shards", [16], replace={3: {"png": body, "txt": b"clear"}})
    write_tiny(tmp_path)
    train_here(*settings_in(tmp_path, "run", "data.background=green", "samples=16", "data.decoding=exact"))
    model = load_for_evaluation(str(tmp_path / "run"))
    export(open_checkpoint(next((tmp_path / "run/checkpoints").glob("step-*"))), tmp_path / "hub")
    for loaded in (model, load_for_evaluation(str(tmp_path / "hub"))):
        assert loaded.architecture.background == green
    decoder = ImageDecoder(size=SIDE, crop=FIXED, mode="fast", max_pixels=10**6, background=green)
    image_of = whole(lambda image: torch.from_numpy(np.array(image)), model.architecture.background)
    seen = {
        "training": decoder(body, state=0).permute(1, 2, 0),
        "scored pairs": image_of(body),
        "neuclip.score": _open(Image.open(io.BytesIO(body)), green),
        "playground": open_image(body, name="x", background=green),
        "own tasks": decode(body, name="x", background=background_of([model])),
    }
    for reader, found in seen.items():
        assert np.asarray(found)[4, 4].tolist() == list(green), reader
    with pytest.raises(TaskError, match=r"different data\.background: evaluate them one by one"):
        background_of([model, replace(model, architecture=replace(model.architecture, background=WHITE))])
    with pytest.raises(UserError, match=r"background = .*'nocolour' is not a colour such as white or #f0f0f0"):
        parse(DataConfig, {"sources": "x", "background": "nocolour"})

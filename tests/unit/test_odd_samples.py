"""Odd samples of every kind in a shard: the loader uses or replaces each, and counts those it replaces by reason."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin

from pipeline.errors import UserError
from tests.images import encoded, png
from tests.metrics import metrics
from tests.shards import jpeg, open_loader, write_shards
from tests.towers import write_tiny
from tests.training import settings_in, train_here

UNDECODABLE = "image cannot be decoded"
TOO_LARGE = "image has too many pixels"


def photograph(size=(60, 48)):
    pixels = np.random.default_rng(5).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)


def large_jpeg_header():
    """A JPEG that claims 60,000 x 60,000 pixels."""
    body = bytearray(jpeg(1))
    place = body.index(b"\xff\xc0") + 5
    body[place : place + 4] = struct.pack(">HH", 60_000, 60_000)
    return bytes(body)


def text_bomb():
    info = PngImagePlugin.PngInfo()
    info.add_text("comment", "x" * 90_000_000, zip=True)
    return encoded(photograph(), "PNG", pnginfo=info)


def with_exif():
    exif = Image.Exif()
    exif[0x0112], exif[0x9286] = 6, b"x" * 60_000
    return encoded(photograph(), "JPEG", exif=exif)


PALETTE = photograph().quantize(32)
WHOLE_PNG = encoded(photograph((200, 160)), "PNG")
IMAGES: dict[str, tuple[bytes, str]] = {
    "PNG bomb": (png(30_000, 30_000, data=bytes(10_000), bits=1), TOO_LARGE),
    "JPEG with a large header": (large_jpeg_header(), TOO_LARGE),
    "text bomb in a PNG": (text_bomb(), UNDECODABLE),
    "PNG whose pixels end early": (png(500, 500, data=bytes(1_000)), UNDECODABLE),
    "PNG with damaged pixels": (WHOLE_PNG[:3_000] + bytes(500) + WHOLE_PNG[3_500:], UNDECODABLE),
    "nothing": (b"", UNDECODABLE),
    "zeros": (bytes(5_000), UNDECODABLE),
    "HTML": (b"<!doctype html><html><body>404</body></html>", UNDECODABLE),
    "SVG": (b'<svg xmlns="http://www.w3.org/2000/svg"><rect width="9" height="9"/></svg>', UNDECODABLE),
    "animated GIF": (encoded(PALETTE, "GIF", save_all=True, append_images=[PALETTE.rotate(90)]), ""),
    "animated WebP": (encoded(photograph(), "WEBP", save_all=True, append_images=[photograph().rotate(9)]), ""),
    "JPEG with a large and rotated EXIF": (with_exif(), ""),
    "1 pixel": (encoded(photograph((1, 1)), "PNG"), ""),
    "1 x 3,000 pixels": (encoded(photograph((1, 3_000)), "PNG"), ""),
    "JPEG with bytes after its end": (jpeg(3) + b"x" * 5_000, ""),
}
CAPTIONS: dict[str, tuple[dict[str, bytes], str]] = {
    "caption of 1 MB": ({"jpg": jpeg(4), "txt": b"word " * 200_000}, ""),
    "caption with zeros and line breaks": ({"jpg": jpeg(5), "txt": b"a\0b\r\n\tc"}, ""),
    "emoji and right-to-left marks": ({"jpg": jpeg(6), "txt": "🐈 \u202e קט".encode()}, ""),
    "invalid UTF-8": ({"jpg": jpeg(7), "txt": b"a \xff\xfe cat"}, "caption is not UTF-8"),
    "no caption": ({"jpg": jpeg(8)}, "caption is missing"),
    "no image": ({"txt": b"a cat"}, "image is missing"),
}
COUNTS = {UNDECODABLE: 7, TOO_LARGE: 2, "caption is not UTF-8": 1, "caption is missing": 1, "image is missing": 1}
"""Corrupt samples of one epoch, by reason."""
GOOD = 35


def count_bytes(texts):
    return torch.tensor([[len(text.encode())] for text in texts])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("odd")
    odd = [{"jpg": body, "txt": b"a cat"} for body, _ in IMAGES.values()] + [
        members for members, _ in CAPTIONS.values()
    ]
    write_shards(folder, [len(odd), GOOD], replace=dict(enumerate(odd)))
    return folder


@pytest.mark.parametrize("decoding", ["fast", "exact"])
def test_odd_samples_are_used_or_counted_by_reason(folder, decoding):
    settings = {"streams": 1, "shuffle_buffer": 1, "corrupt_limit": 1.0, "decoding": decoding}
    with open_loader(folder, tokenize=count_bytes, **settings) as loader:
        batches = [next(loader) for _ in range(loader.steps_per_epoch)]
        report = loader.report()
    assert report.corrupt_by_reason == COUNTS
    shown = torch.cat([batch.sample_id for batch in batches]).tolist()
    kinds = dict(enumerate([*IMAGES, *CAPTIONS]))
    reasons = {name: reason for name, (_, reason) in (*IMAGES.items(), *CAPTIONS.items())}
    unused = [name for number, name in kinds.items() if not reasons[name] and number not in shown]
    used = [name for number, name in kinds.items() if reasons[name] and number in shown]
    assert (unused, used) == ([], [])
    assert sum(batch.replaced for batch in batches) == sum(COUNTS.values())


def last_weights(run):
    return (run / "checkpoints/step-00000008/open_clip_model.safetensors").read_bytes()


def test_too_many_corrupt_samples_end_a_run_with_a_checkpoint(tmp_path):
    """Regression test: the steps since the last checkpoint were lost."""
    write_shards(tmp_path / "shards", [32], replace={20: {"jpg": b"?", "txt": b"caption 20"}})
    write_tiny(tmp_path)
    few = ("data.shuffle_buffer=1", "data.streams=1", "samples=64", "checkpoint.every=100")
    common = settings_in(tmp_path, "whole", *few)
    with pytest.raises(
        UserError, match=r"^1 of the first (\d+) samples .* saved up to step \d+: .* --resume latest\.$"
    ):
        train_here(*common, f"output={tmp_path / 'cut'}", "telemetry.every=1")
    (saved,) = (path.name for path in (tmp_path / "cut/checkpoints").glob("step-*"))
    assert "step-00000000" < saved < "step-00000008"
    stored = json.loads((tmp_path / "cut/checkpoints" / saved / "checkpoint.json").read_bytes())["data"]["corrupt"]
    assert stored == [["image cannot be decoded", "00000.tar", 1]]
    allowed = [*common, "data.corrupt_limit=1"]
    train_here(*allowed, f"output={tmp_path / 'cut'}", resume="latest")
    train_here(*allowed)
    with pytest.raises(UserError, match=r"^1 of the first 32 samples .* saved up to step 4: "):
        train_here(*common, f"output={tmp_path / 'epoch'}", "telemetry.every=100")  # found by the epoch's report
    train_here(*allowed, f"output={tmp_path / 'epoch'}", resume="latest")
    assert last_weights(tmp_path / "cut") == last_weights(tmp_path / "epoch") == last_weights(tmp_path / "whole")


def test_a_run_continues_when_its_data_was_mended_and_stops_again_when_it_was_not(tmp_path):
    """Regression test: the counts in the checkpoint ended every further start after one step."""
    write_shards(tmp_path / "shards", [32])
    write_tiny(tmp_path)
    shard = tmp_path / "shards/00000.tar"
    whole = shard.read_bytes()
    damaged = whole
    for number in (9, 20, 28, 11):
        damaged = damaged.replace(jpeg(number), bytes(len(jpeg(number))))
    shard.write_bytes(damaged)
    few = ("data.shuffle_buffer=1", "data.streams=1", "samples=64", "checkpoint.every=100", "data.corrupt_limit=0.04")
    given = settings_in(tmp_path, "run", *few, "data.altered_shards=ignore")
    stops: list[int] = []
    for resume in (None, "latest"):
        with pytest.raises(UserError, match=r"corrupt, more than data\.corrupt_limit = 0\.04") as stopped:
            train_here(*given, resume=resume)
        stops.append(metrics(tmp_path / "run", "train")[-1]["step"])
    assert "(2 of them since this start) are corrupt" in str(stopped.value)
    assert stops == [1, 3], "the last steps that were logged: it was stopped by what the earlier start had seen"
    shard.write_bytes(whole)
    train_here(*given, resume="latest")
    assert metrics(tmp_path / "run", "train")[-1]["step"] == 8

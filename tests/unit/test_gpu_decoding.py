"""`data.decoding=gpu`: which images are left to a GPU, and that batches are complete, whatever it refuses.

torchvision decodes on the CPU here where it would use nvJPEG; nvJPEG itself has not run.
"""

import io
from contextlib import suppress
from unittest.mock import Mock

import pytest
import torch
import torchvision
from PIL import Image, ImageDraw

from pipeline.data.data_config import CropConfig
from pipeline.data.loading import decode, gpu_decode, loader
from pipeline.data.loading.decode import ImageDecoder
from pipeline.data.loading.gpu_decode import decode_on_gpu
from pipeline.data.loading.position import pixel_identity
from pipeline.data.shards.tar_reader import CorruptSample
from pipeline.distributed.world import World
from pipeline.errors import UserError
from tests import images
from tests.shards import jpeg, open_loader, write_shards

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on machines with fewer cores

CPU = torch.device("cpu")
SIZE = 16
CROP = CropConfig(scale=(0.3, 1.0))
FAST = ImageDecoder(size=SIZE, crop=CROP, mode="fast", max_pixels=10**6)
ON_GPU = ImageDecoder(size=SIZE, crop=CROP, mode="fast", max_pixels=10**6, gpu="a GPU")


def encoded(format="JPEG", *, mode="RGB", size=(90, 70), **options):
    return images.encoded(Image.open(io.BytesIO(jpeg(5, size=size))).convert(mode), format, **options)


def patched(offset, value, **options):
    """A JPEG with another byte in its frame header: 4 is the precision, 11 the sampling of the luma."""
    data = bytearray(encoded(**options))
    data[data.index(b"\xff\xc0") + offset] = value
    return bytes(data)


def lettering():
    """A JPEG of high contrast, where resizing overshoots."""
    image = Image.new("RGB", (128, 96), "white")
    draw = ImageDraw.Draw(image)
    for y in range(0, 96, 12):
        draw.text((0, y), "Lorem ipsum dolor sit amet", fill="black")
    return images.encoded(image, "JPEG", quality=90)


def pixels_end_early():
    """A JPEG with an end marker, whose entropy-coded data end before its pixels."""
    data = encoded(size=(200, 200))
    return data[: len(data) // 2] + b"\xff\xd9"


NOT_ORDINARY = {
    "progressive": encoded(progressive=True), "grey": encoded(mode="L"), "CMYK": encoded(mode="CMYK"),
    "RGB": encoded(keep_rgb=True), "no end": encoded()[:-2], "cut": encoded()[:200], "PNG": encoded("PNG"),
    "PPM": encoded("PPM"), "empty": b"", "begin only": b"\xff\xd8", "no frame": b"\xff\xd8\xff\xd9",
    "12 bits": patched(4, 12), "grey 4:4:1": patched(11, 0x14, mode="L", size=(16, 64)),
    "4:4:1": patched(11, 0x14, subsampling=2, size=(64, 64)), "more bytes than pixels": encoded() + bytes(20_000),
}  # fmt: skip


def test_ordinary_jpegs_are_left_to_the_gpu_and_all_else_to_the_worker(monkeypatch):
    for subsampling in (0, 1, 2):
        data = encoded(subsampling=subsampling)
        found = ON_GPU.for_gpu(data, state=3)
        assert (found.data, found.shape) == (data, (70, 90))
        assert found.box == decode.crop_box(70, 90, crop=CROP, state=3)
    assert {name for name, data in NOT_ORDINARY.items() if ON_GPU.for_gpu(data, state=0) is not None} == set()
    for data in NOT_ORDINARY.values():  # simplejpeg raises a KeyError at 4:4:1
        with suppress(CorruptSample):
            FAST(data, state=0)
    with pytest.raises(CorruptSample, match="too many pixels"):
        ON_GPU.for_gpu(encoded(size=(1001, 1000)), state=0)
    whole = CropConfig(scale=(1, 1), ratio=(1, 1))
    small = ImageDecoder(size=2, crop=whole, mode="fast", max_pixels=10**6, gpu="a GPU")
    for decoder, width, height, is_left in [
        (small, 80, 80, True),
        (small, 81, 81, False),  # torch cannot reduce a side so much on a GPU
        (ON_GPU, 90, 70, True),
        (ON_GPU, 91, 70, False),
    ]:
        monkeypatch.setattr(decode, "GPU_IMAGE_PIXELS", 81 * 81 if decoder is small else 90 * 70)
        assert (decoder.for_gpu(encoded(size=(width, height)), state=0) is not None) == is_left
    assert (pixel_identity(ON_GPU)["data.decoding"], pixel_identity(FAST)["data.decoding"]) == ("gpu (a GPU)", "fast")


@pytest.mark.parametrize("chunk", [1, 20_000, 1 << 26], ids=["one at a time", "some", "all together"])
def test_pixels_are_those_of_the_worker_but_for_rounding(chunk, monkeypatch):
    monkeypatch.setattr(gpu_decode, "GPU_CHUNK_PIXELS", chunk)
    files = [jpeg(i, size=(40 + 13 * i, 120 - 7 * i)) for i in range(8)] + [lettering()] * 4
    images = [ON_GPU.for_gpu(data, state=i) for i, data in enumerate(files)]
    found = list(decode_on_gpu([image for image in images if image], size=SIZE, device=CPU))
    assert len(found) == len(files)
    for i, data in enumerate(files):
        assert found[i].dtype == torch.uint8
        assert (found[i].int() - FAST(data, state=i).int()).abs().max() <= 2


def refuse(monkeypatch, data):
    """Make the GPU's decoder fail at one image, and at every list that has it."""
    whole = torchvision.io.decode_jpeg

    def picky(files, **options):
        if any(bytes(file.numpy()) == data for file in (files if isinstance(files, list) else [files])):
            raise RuntimeError("nvjpegDecode failed: 7\nstack")
        return whole(files, **options)

    gpu_decode._warn_of_refusal.cache_clear()
    monkeypatch.setattr(torchvision.io, "decode_jpeg", picky)


def test_what_the_gpu_refuses_is_decoded_on_the_cpu(monkeypatch, caplog):
    files = [jpeg(i, size=(60, 50)) for i in range(5)]
    refuse(monkeypatch, files[2])
    images = [image for i, data in enumerate(files) if (image := ON_GPU.for_gpu(data, state=i))]
    for _ in range(2):
        for i, found in enumerate(decode_on_gpu(images, size=SIZE, device=CPU)):
            assert (found.int() - FAST(files[i], state=i).int()).abs().max() <= 2
    assert [record.message for record in caplog.records] == [
        "The GPU's JPEG decoder refused an image (nvjpegDecode failed: 7): such images are decoded on the CPU."
    ]
    monkeypatch.setattr(torchvision.io, "decode_jpeg", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        list(decode_on_gpu(images, size=SIZE, device=CPU))


@pytest.fixture
def folder(tmp_path):
    """48 samples; of each six, one is a PNG, one progressive, and one grey."""
    other = {0: encoded("PNG"), 1: encoded(progressive=True), 2: encoded(mode="L")}
    replaced = {
        i: {"png" if i % 6 == 0 else "jpg": other[i % 6], "txt": f"caption {i}".encode()}
        for i in range(48)
        if i % 6 < 3
    }
    write_shards(tmp_path / "sh", [20, 28], replace=replaced, image_size=(40, 30))
    return tmp_path / "sh"


def opened(folder, decoding, **settings):
    options = {"streams": 4, "shuffle_buffer": 5, "crop": {"scale": [0.5, 1.0]}, **settings}
    return open_loader(folder, image_size=SIZE, decoding=decoding, **options)


def batches(source, count=7):
    with source:
        return [next(source) for _ in range(count)]


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(loader, "gpu_that_decodes", lambda world: "a GPU")


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.usefixtures("gpu")
def test_batches_are_those_of_the_workers(folder, workers):
    expected = batches(opened(folder, "fast"))
    for own, other in zip(batches(opened(folder, "gpu", workers=workers)), expected, strict=True):
        assert torch.equal(own.sample_id, other.sample_id)
        assert torch.equal(own.text, other.text)
        assert own.position == other.position
        assert own.image.shape == other.image.shape == (8, 3, SIZE, SIZE)
        assert own.image.is_contiguous(memory_format=torch.channels_last)
        assert (own.image.int() - other.image.int()).abs().max() <= 2
        by_worker = torch.isin(own.sample_id % 6, torch.tensor([0, 1, 2]))
        assert torch.equal(own.image[by_worker], other.image[by_worker])


@pytest.mark.usefixtures("gpu")
def test_a_sample_that_nothing_decodes_ends_the_run_and_is_named(tmp_path, monkeypatch):
    bad = pixels_end_early()
    assert ON_GPU.for_gpu(bad, state=0) is not None
    write_shards(tmp_path / "bad", [20, 28], replace={33: {"jpg": bad, "txt": b"caption 33"}})
    refuse(monkeypatch, bad)
    source = opened(tmp_path / "bad", "gpu", workers=0)
    with pytest.raises(UserError, match=r"Sample 33 of .*00001\.tar: neither .* data\.decoding=fast"):
        batches(source, 6)
    place = source.position
    with pytest.raises(UserError, match="Sample 33 "):
        next(source)
    assert source.position == place, "the batch was passed over"
    assert sum(batch.replaced for batch in batches(opened(tmp_path / "bad", "fast", corrupt_limit=1), 6)) == 1


def test_without_a_gpu_the_workers_decode(folder, caplog):
    own = batches(opened(folder, "gpu"))
    assert "data.decoding=gpu: this rank computes on the CPU, so images are decoded as with `fast`." in caplog.text
    for batch, other in zip(own, batches(opened(folder, "fast")), strict=True):
        assert torch.equal(batch.image, other.image)


def test_a_gpu_without_nvjpeg_is_named(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    world, real = World(device=torch.device("cuda")), torchvision.io.decode_jpeg
    monkeypatch.setattr(torchvision.io, "decode_jpeg", lambda data, device: real(data))
    name = gpu_decode.gpu_that_decodes(world)
    assert name == f"NVIDIA H100, CUDA {torch.version.cuda}, torchvision {torchvision.__version__.partition('+')[0]}"

    def missing(data, device):
        raise RuntimeError("decode_jpegs_cuda: torchvision not compiled with nvJPEG support\nmore")

    monkeypatch.setattr(torchvision.io, "decode_jpeg", missing)
    assert gpu_decode.gpu_that_decodes(world) is None
    assert "nvJPEG fails (decode_jpegs_cuda: torchvision not compiled with nvJPEG support), so images" in caplog.text

"""An image that crashes its decoder, or keeps it busy, costs its own row and nothing else."""

# ruff: noqa: F811 (imported fixtures are requested by name)
import io
import signal
import sys
from contextlib import closing

import pytest

from data_prep.dataset.verification import verify
from data_prep.download_config import ImageConfig
from data_prep.fetching import decoder as decoder_module
from data_prep.fetching import downloader
from data_prep.fetching.decoder import Decoder, ImageConverter
from tests.ingested import fetch_here, own_opener, prepared, site  # noqa: F401
from tests.launch import lives, python, wait_for
from tests.web import jpeg

# A decoder that ends or sleeps as the end of the image's file says; the marker file makes it happen only once.
DOOMED = """
import os, sys, time
from data_prep.fetching import decoder
convert = decoder.ImageConverter._convert
def doomed(self, body, boxes):
    words = body[-200:].partition(b"DOOM ")[2].split()
    if words and not (len(words) > 1 and os.path.exists(words[1])):
        if len(words) > 1:
            open(words[1], "w").close()
        os.kill(os.getpid(), 9) if words[0] == b"die" else time.sleep(600)
    return convert(self, body, boxes)
decoder.ImageConverter._convert = doomed
decoder.main(int(sys.argv[1]))
"""


@pytest.fixture(autouse=True)
def doomed(monkeypatch):
    monkeypatch.setattr(Decoder, "command", (sys.executable, "-c", DOOMED))
    downloader._cached_tools.cache_clear()  # another test of this process may have started one
    yield
    downloader._cached_tools.cache_clear()


@pytest.fixture
def decoder():
    # Long enough for starting a process on a busy machine.
    decoder = Decoder(image=ImageConfig(), max_pixels=10**6)
    yield decoder
    decoder.close()


def test_outcomes_are_those_of_the_converter(decoder):
    plain = ImageConverter(ImageConfig(), max_pixels=10**6)
    for body in (jpeg(side=300), jpeg(side=20), jpeg()[:300], jpeg(side=1001)):
        assert decoder(io.BytesIO(body)) == plain(io.BytesIO(body))


def test_an_image_that_crashes_its_decoder_twice_is_refused(decoder, tmp_path):
    assert decoder(io.BytesIO(jpeg() + b"DOOM die"))[5] == "quarantined: its decoder died"
    assert decoder(io.BytesIO(jpeg()))[5] is None
    once = f"DOOM die {tmp_path / 'once'}".encode()
    assert decoder(io.BytesIO(jpeg() + once))[0] == decoder(io.BytesIO(jpeg()))[0], "perhaps it lacked memory"


def test_an_image_that_takes_too_long_twice_is_refused(decoder):
    decoder(io.BytesIO(jpeg()))
    decoder._seconds = 0.5
    assert decoder(io.BytesIO(jpeg() + b"DOOM sleep"))[5] == "too slow to decode: not decoded in 0.5 s"
    decoder._seconds = 30
    assert decoder(io.BytesIO(jpeg()))[5] is None


def test_the_start_of_a_decoder_is_not_the_fault_of_the_image(monkeypatch):
    """Regression test: on a busy machine, images were lost as too slow to decode."""
    monkeypatch.setattr(decoder_module, "SECONDS", 2)
    late = "time.sleep(3); from data_prep.fetching.decoder import main; main(int(sys.argv[1]))"
    for program, error in ((late, None), ("pass", "internal error: no decoder could be started")):
        monkeypatch.setattr(Decoder, "command", (sys.executable, "-c", f"import sys, time; {program}"))
        with closing(Decoder(image=ImageConfig(), max_pixels=10**6)) as decoder:
            assert decoder(io.BytesIO(jpeg()))[5] == error


def test_a_decoder_ends_with_its_worker():
    """Also when the worker is killed, so that nothing is left to clean up."""
    program = (
        "import io, os\n"
        "from data_prep.fetching.decoder import Decoder\n"
        "from data_prep.download_config import ImageConfig\n"
        "decoder = Decoder(image=ImageConfig(), max_pixels=9)\n"
        "decoder(io.BytesIO(b'x'))\n"
        "print(decoder._process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    ended = python("-c", program)
    assert ended.returncode == -signal.SIGKILL
    wait_for(lambda: not lives(int(ended.stdout)), "the decoder ends with its worker")


def test_a_shard_with_such_images_is_finished(site, tmp_path):
    """Regression test: an image that could not be decoded in time stopped its shard at every start."""
    bodies = [jpeg(side=30), jpeg(side=31) + b"DOOM die", jpeg(side=32)]
    urls = [site.image(f"/doomed-{k}", body) for k, body in enumerate(bodies)]
    manifest = fetch_here(*prepared(tmp_path, {"url": urls, "caption": ["a cat"] * 3}), [0])
    assert (manifest.n, manifest.failures) == (2, {"quarantined": 1})
    assert verify(tmp_path / "data") == []

"""From the bytes as served to the image as stored: decoded, checked, resized, blurred, upright, encoded.

`ImageConverter` replaces img2dataset's Resizer, and gives the same bytes for ordinary images (a test compares them).
The original stores 16-bit images white, ignores EXIF orientation, and needs 80 bytes a pixel for transparent ones.

`Decoder` runs it in a process of its own, so that an image that crashes it, or keeps it busy, costs its own row only.
`python -m data_prep.fetching.decoder FD` is that process: it converts what comes over a connection, until it ends.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from typing import Any

import cv2
import numpy as np

from data_prep import reasons
from data_prep.download_config import ImageConfig
from data_prep.fetching.served_image import decode, extension, upright
from data_prep.reasons import FetchError
from pipeline.pictures.pixels import colour_of

Boxes = list[list[float]]
# Image, width, height, original width, original height, error: what img2dataset expects of its resizer.
Outcome = tuple[bytes | None, int | None, int | None, int | None, int | None, str | None]
_QUALITY = {
    "jpg": cv2.IMWRITE_JPEG_QUALITY,
    "png": cv2.IMWRITE_PNG_COMPRESSION,
    "webp": cv2.IMWRITE_WEBP_QUALITY,
}


@dataclass
class ImageConverter:
    """img2dataset's resizer interface: called with a stream and boxes, returns an `Outcome`."""

    image: ImageConfig
    """How images are stored."""
    max_pixels: int
    """Larger images are refused."""
    processes: int = 1
    """Number of processes on this machine that may decode at the same time."""
    blur: bool = False
    """Whether the source has boxes to blur."""
    is_transparent: bool = field(default=False, init=False)
    """Whether the latest image had pixels that are not opaque; an `Outcome` has no place for it."""

    def __post_init__(self) -> None:
        if self.blur:
            from img2dataset.blurrer import BoundingBoxBlurrer  # here, because importing it takes seconds

            self._blurrer = BoundingBoxBlurrer()

    def __call__(self, stream: io.BytesIO, boxes: Boxes | None = None) -> Outcome:
        cv2.setNumThreads(1)
        try:
            return self._convert(stream.getvalue(), boxes)
        except FetchError as error:
            return failed(str(error))
        except Exception as error:  # decoders raise many exception types for damaged files
            is_memory = isinstance(error, MemoryError) or getattr(error, "code", 0) == cv2.Error.StsNoMem
            reason = reasons.TOO_LITTLE_MEMORY if is_memory else reasons.UNDECODABLE
            return failed(f"{reason}: {type(error).__name__} {error}")

    def _convert(self, body: bytes, boxes: Boxes | None) -> Outcome:
        pixels = decode(body, processes=self.processes, background=colour_of(self.image.background))
        self.is_transparent = pixels.is_transparent
        height, width = pixels.array.shape[:2]
        size = f"{width} x {height}"
        if min(height, width) < self.image.min_size:
            raise FetchError(reasons.TOO_SMALL, size)
        if height * width > self.max_pixels:
            raise FetchError(reasons.TOO_MANY_PIXELS, size)
        if max(height, width) / min(height, width) > self.image.max_aspect_ratio:
            raise FetchError(reasons.EXTREME_ASPECT, size)
        resized = scale(pixels.array, self.image)
        if boxes is not None and self.blur:  # boxes are relative to the image as stored, not turned
            resized = self._blurrer(img=resized, bbox_list=boxes)
        if pixels.orientation != 1:
            resized = upright(resized, pixels.orientation)
            if pixels.orientation >= 5:
                height, width = width, height
        stored_height, stored_width = resized.shape[:2]
        facts = stored_width, stored_height, width, height, None
        unchanged = resized is pixels.array and not pixels.is_changed and pixels.orientation == 1
        kind = self.image.encode_format
        if unchanged and self.image.skip_reencode and extension(body) == kind:
            return body, *facts
        done, encoded = cv2.imencode(f".{kind}", resized, [_QUALITY[kind], self.image.encode_quality])
        if not done:
            raise FetchError(reasons.NOT_ENCODED, f"{stored_width} x {stored_height} as {kind}")
        return encoded.tobytes(), *facts


def failed(error: str) -> Outcome:
    """The outcome of an image that gives no sample; the text begins with the reason."""
    return None, None, None, None, None, error


def scale(array: np.ndarray, image: ImageConfig) -> np.ndarray:
    """Scale as `image.resize_mode` says; the same array when the mode leaves this image as it is."""
    if image.resize_mode == "no":
        return array
    height, width = array.shape[:2]
    side = min(height, width) if image.resize_mode == "keep_ratio" else max(height, width)
    if side <= image.size:
        return array
    factor = image.size / side
    target = (max(1, round(width * factor)), max(1, round(height * factor)))
    return cv2.resize(array, target, interpolation=cv2.INTER_AREA)


_START_SECONDS = 300.0
SECONDS = 30.0
"""For decoding, resizing and encoding one image."""
_ATTEMPTS = 2
"""A decoder may die or be late for other reasons than its image: too little memory, or a suspended job."""


class Decoder:
    """img2dataset's resizer interface, see ImageConverter, whose `settings` it takes."""

    command = (sys.executable, "-m", "data_prep.fetching.decoder")

    def __init__(self, **settings: Any) -> None:
        self._seconds, self._settings = SECONDS, settings
        self.is_transparent = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Any, Any]

    def __call__(self, stream: io.BytesIO, boxes: Boxes | None = None) -> Outcome:
        """Convert one image; one that ends its decoder twice is `quarantined`, or `too slow to decode`."""
        failure = ""
        for _ in range(_ATTEMPTS):
            with suppress(EOFError, OSError):
                failure = f"{reasons.INTERNAL}: no decoder could be started"
                self._start()
                failure = f"{reasons.QUARANTINED}: its decoder died"
                self._connection.send((stream.getvalue(), boxes))
                if self._connection.poll(self._seconds):
                    outcome: Outcome
                    outcome, self.is_transparent = self._connection.recv()
                    return outcome
                failure = f"{reasons.TOO_SLOW}: not decoded in {self._seconds:g} s"
            self.close()
        return failed(failure)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._connection.close()
        self._process = None

    def _start(self) -> None:
        """Start the process, if there is none; its start, slow on a busy machine, does not count as decoding."""
        if self._process is not None:
            return
        self._connection, other = Pipe()
        # Workers of a cluster find our packages in places that their children would not know.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with other:
            self._process = subprocess.Popen(
                [*self.command, str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # decoders written in C print about unusual files
                stderr=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                env=environment,
            )
        self._connection.send(self._settings)
        if not self._connection.poll(_START_SECONDS):
            raise TimeoutError
        self._connection.recv()


def main(descriptor: int) -> None:
    """Answer every image on the connection, whose first message has the settings."""
    with Connection(descriptor) as connection:
        convert = ImageConverter(**connection.recv())
        connection.send("ready")
        while True:
            try:
                body, boxes = connection.recv()
            except EOFError:  # the worker has ended
                return
            outcome = convert(io.BytesIO(body), boxes)
            connection.send((outcome, convert.is_transparent))


if __name__ == "__main__":
    main(int(sys.argv[1]))

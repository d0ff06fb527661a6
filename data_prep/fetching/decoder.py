"""Decoding in a process of its own: an image that crashes it, or keeps it busy, costs its own row only.

`python -m data_prep.fetching.decoder FD` is that process: it converts what comes over a connection, until it ends.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe
from typing import Any

from data_prep import reasons
from data_prep.fetching.image_converter import Boxes, ImageConverter, Outcome, failed
from data_prep.settings.download_config import FetchConfig, ImageConfig

_ATTEMPTS = 2
"""A decoder may die or be late for other reasons than its image: too little memory, or a suspended job."""


class Decoder:
    """img2dataset's resizer interface, see ImageConverter.

    Args:
        image: How images are stored.
        max_pixels: Larger images are refused.
        fetch: The number of processes, and the seconds that one image may take.
        has_boxes: The source has boxes to blur.
    """

    command = (sys.executable, "-m", "data_prep.fetching.decoder")

    def __init__(self, image: ImageConfig, *, max_pixels: int, fetch: FetchConfig, has_boxes: bool = False) -> None:
        self._seconds = fetch.decode_timeout
        self._settings = {"image": image, "max_pixels": max_pixels, "processes": fetch.processes}
        self._has_boxes = has_boxes
        self._pid = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Any, Any]

    def __call__(self, stream: io.BytesIO, boxes: Boxes | None = None) -> Outcome:
        """Convert one image; one that ends its decoder twice is `quarantined`, or `too slow to decode`."""
        failure = ""
        for _ in range(_ATTEMPTS):
            try:
                self._start()
                self._connection.send((stream.getvalue(), boxes))
                if self._connection.poll(self._seconds):
                    outcome: Outcome = self._connection.recv()
                    return outcome
                failure = f"{reasons.TOO_SLOW}: not decoded in {self._seconds:g} s"
            except (EOFError, OSError):
                failure = f"{reasons.QUARANTINED}: its decoder died"
            self.close()
        return failed(failure)

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._pid == os.getpid():
            self._process.kill()
            self._process.wait()
            self._connection.close()
        self._process = None

    def _start(self) -> None:
        if self._process is not None and self._pid == os.getpid():  # a fork must not use its parent's
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
        self._pid = os.getpid()
        self._connection.send((self._settings, self._has_boxes))


def main(descriptor: int) -> None:
    """Answer every image on the connection, whose first message has the settings."""
    with Connection(descriptor) as connection:
        settings, has_boxes = connection.recv()
        convert = ImageConverter(**settings, blurrer=_blurrer() if has_boxes else None)
        while True:
            try:
                body, boxes = connection.recv()
            except EOFError:  # the worker has ended
                return
            connection.send(convert(io.BytesIO(body), boxes))


def _blurrer() -> Callable[..., Any]:
    with stand_ins("wandb", "webdataset"):
        from img2dataset.blurrer import BoundingBoxBlurrer  # which takes a second

    blurrer: Callable[..., Any] = BoundingBoxBlurrer()
    return blurrer


@contextmanager
def stand_ins(*names: str) -> Iterator[None]:
    """Let `import name` succeed with an empty module inside the block; modules that are already loaded are kept.

    img2dataset's logger imports wandb, and its tar writer imports webdataset and with it torch: 2.3 s and 640 MB per
    worker process instead of 0.8 s and 175 MB. Neither is used here.
    """
    # Albumentations, which img2dataset uses to resize, checks for newer versions online when it is imported.
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
    added = [name for name in names if name not in sys.modules]
    for name in added:
        sys.modules[name] = types.ModuleType(name)
    try:
        yield
    finally:
        for name in added:
            sys.modules.pop(name, None)


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""Settings of the built-in corpus and of the server that publishes it."""

from __future__ import annotations

import dataclasses

import pydantic
from pydantic import Field

from pipeline.config import section

# Held-out indices start here, so that a larger corpus never overlaps with the evaluation sets.
HELD_OUT_START = 10_000_000


@section
class FaultRates:
    """Share of the URLs that misbehave, by kind (see `faults.Fault`); what remains is served as published.

    The defaults are of the order seen on aged web crawls; slow answers are rare, so that the demo does not wait long.
    """

    not_found: float = Field(default=0.030, ge=0, le=1)
    """Answered with 404."""
    forbidden: float = Field(default=0.008, ge=0, le=1)
    """Answered with 403."""
    gone: float = Field(default=0.004, ge=0, le=1)
    """Answered with 410."""
    truncated: float = Field(default=0.003, ge=0, le=1)
    """A JPEG that stops half-way and was published like this: its hash is right, only decoding fails."""
    incomplete: float = Field(default=0.004, ge=0, le=1)
    """The connection closes before the announced length."""
    html: float = Field(default=0.008, ge=0, le=1)
    """200 with a web page instead of an image."""
    wrong_hash: float = Field(default=0.006, ge=0, le=1)
    """A good image of another scene than the published one."""
    oversize: float = Field(default=0.0005, ge=0, le=1)
    """A valid JPEG of huge dimensions."""
    disconnect: float = Field(default=0.002, ge=0, le=1)
    """The connection closes without an answer."""
    transient: float = Field(default=0.010, ge=0, le=1)
    """503 to the first request, then the image."""
    slow: float = Field(default=0.010, ge=0, le=1)
    """The image, after a delay of up to `slow_seconds`."""
    stall: float = Field(default=0.0005, ge=0, le=1)
    """No answer for `stall_seconds`, which exceeds the client's time-out."""
    noai: float = Field(default=0.002, ge=0, le=1)
    """The image, with the header `X-Robots-Tag: noai`: its owner does not want it used for training."""

    @pydantic.model_validator(mode="after")
    def _check_sum(self) -> FaultRates:
        total = sum(vars(self).values())
        if total > 1 + 1e-9:
            raise ValueError(f"the fault rates sum to {total:g}, but each URL has at most one fault: keep the sum <= 1")
        return self


@section
class ScenesConfig:
    """The built-in corpus: training pairs, and evaluation sets of held-out scenes."""

    pairs: int = Field(default=20_000, ge=1, lt=HELD_OUT_START)
    """Training pairs, one URL each."""
    seed: int = Field(default=0, ge=0)
    """Every scene, image, caption and fault is a pure function of the seed and its index."""
    image_size: int = Field(default=96, ge=16, le=1024)
    """Side of the square images in pixels."""
    jpeg_quality: int = Field(default=88, ge=30, le=95)
    """Quality of the JPEG files."""
    tail: float = Field(default=0.5, ge=0, le=3)
    """Zipf exponent of the attributes' frequencies; 0: uniform."""
    themed: float = Field(default=0.12, ge=0, le=1)
    """Share of scenes drawn from a few stock motifs, the frequent semantics of the corpus."""
    noise: float = Field(default=0.2, ge=0, le=1)
    """Share of training captions that carry web noise."""
    held_out: int = Field(default=1_000, ge=1)
    """Images per zero-shot task."""
    retrieval_pairs: int = Field(default=1_000, ge=2)
    """Pairs of the retrieval set."""
    faults: FaultRates = dataclasses.field(default_factory=FaultRates)
    slow_seconds: float = Field(default=0.3, ge=0, le=60)
    """Longest delay of a slow answer."""
    stall_seconds: float = Field(default=20.0, ge=0, le=600)
    """How long a stalled answer holds the connection; must exceed the client's time-out to count as a failure."""

"""Settings of the built-in corpus and of the server that publishes it."""

from __future__ import annotations

import dataclasses

import pydantic
from pydantic import Field

from pipeline.config import section

# Held-out indices start here, so that growing the corpus never reaches into the evaluation sets.
HELD_OUT_START = 10_000_000


@section
class FaultRates:
    """Share of the URLs that misbehave, by kind (see `faults.Fault`); what remains is served as published.

    The defaults are of the order seen on aged web crawls, with slow answers kept rare so that the demo is not
    spent waiting.
    """

    not_found: float = Field(default=0.030, ge=0, le=1)
    forbidden: float = Field(default=0.008, ge=0, le=1)
    gone: float = Field(default=0.004, ge=0, le=1)
    truncated: float = Field(default=0.003, ge=0, le=1)
    incomplete: float = Field(default=0.004, ge=0, le=1)
    html: float = Field(default=0.008, ge=0, le=1)
    wrong_hash: float = Field(default=0.006, ge=0, le=1)
    oversize: float = Field(default=0.0005, ge=0, le=1)
    disconnect: float = Field(default=0.002, ge=0, le=1)
    transient: float = Field(default=0.010, ge=0, le=1)
    slow: float = Field(default=0.010, ge=0, le=1)
    stall: float = Field(default=0.0005, ge=0, le=1)
    noai: float = Field(default=0.002, ge=0, le=1)

    @pydantic.model_validator(mode="after")
    def _check_sum(self) -> FaultRates:
        total = sum(vars(self).values())
        if total > 1 + 1e-9:
            raise ValueError(f"the fault rates sum to {total:g}, but each URL has at most one fault: keep the sum <= 1")
        return self


@section
class ScenesConfig:
    """The built-in corpus: `pairs` training pairs, and evaluation sets of held-out scenes.

    seed: every scene, image, caption and fault is a pure function of it and of the index.
    image_size: side of the square images in pixels. tail: Zipf exponent of the attributes' frequencies (0 = uniform).
    themed: share of scenes drawn from a few stock motifs, the frequent semantics of the corpus.
    noise: share of training captions that carry web noise. held_out: images per zero-shot task.
    retrieval_pairs: pairs of the retrieval set. slow_seconds: longest delay of a slow answer. stall_seconds: how long
    a stalled answer holds the connection; must exceed the client's time-out to be seen as a failure.
    """

    pairs: int = Field(default=20_000, ge=1, lt=HELD_OUT_START)
    seed: int = Field(default=0, ge=0)
    image_size: int = Field(default=96, ge=16, le=1024)
    jpeg_quality: int = Field(default=88, ge=30, le=95)
    tail: float = Field(default=0.5, ge=0, le=3)
    themed: float = Field(default=0.12, ge=0, le=1)
    noise: float = Field(default=0.2, ge=0, le=1)
    held_out: int = Field(default=1_000, ge=1)
    retrieval_pairs: int = Field(default=1_000, ge=2)
    faults: FaultRates = dataclasses.field(default_factory=FaultRates)
    slow_seconds: float = Field(default=0.3, ge=0, le=60)
    stall_seconds: float = Field(default=20.0, ge=0, le=600)

"""Settings of the data: where it is, in which order it comes, how it is decoded. Light imports only."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from pipeline.config import section
from pipeline.data.shards.caption_field import CaptionField


@section
class Source:
    """One set of shards in a mixture.

    weight: passes over the source per epoch: 1 shows every sample once, 2 twice, 0.5 another half in every epoch.
    """

    manifest: str
    weight: float = Field(default=1.0, gt=0, le=1000)


@section
class CropConfig:
    """The random resized crop; the defaults are open_clip's."""

    scale: tuple[float, float] = (0.9, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    @model_validator(mode="after")
    def _ordered(self) -> CropConfig:
        for name, (low, high) in (("scale", self.scale), ("ratio", self.ratio)):
            if not 0 < low <= high or (name == "scale" and high > 1):
                limit = " <= 1" if name == "scale" else ""
                raise ValueError(f"crop.{name} = {(low, high)} must satisfy 0 < low <= high{limit}")
        return self


def _as_sources(value: Any) -> Any:
    """A path stands for a list of one source, and a path in the list for a source of weight 1."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, (list, tuple)):
        return [{"manifest": item} if isinstance(item, str) else item for item in value]
    return value


@section
class DataConfig:
    """What to train on and in which order.

    sources: manifests (a path, or a list of paths or of `{manifest, weight}`).
    streams: C, canonical streams; part of the order's identity. The number of ranks must divide it, and it must divide
      the global batch. More streams mix more shards into a batch: raise it before the buffer.
    shuffle_buffer: S, samples; a stream emits its sample i after at most S later ones; holds about S/2 encoded samples
      of each stream in memory.
    replacement: draw shards with replacement instead of permuting them.
    workers: decoding processes per rank; 0 decodes in the training process.
    prefetch: batches that each worker keeps ready.
    caption: where a sample's caption is: `txt`, another member's suffix, or `json:FIELD`; of a field that holds several
      texts one is shown at a time, drawn by hash.
    decoding: "fast" (libjpeg-turbo and torch's uint8 bicubic) or "exact" (open_clip's own PIL pixels).
    max_pixels: a larger image counts as corrupt (decompression bomb).
    corrupt_limit: share of an epoch's samples that may be corrupt before the run stops.
    retries: times that opening or reading a shard is tried again before its samples count as lost.
    """

    sources: Annotated[tuple[Source, ...], BeforeValidator(_as_sources)] = Field(min_length=1)
    streams: int = Field(default=64, ge=1, le=65536)
    shuffle_buffer: int = Field(default=1000, ge=1, le=10_000_000)
    replacement: bool = False
    workers: int = Field(default=2, ge=0, le=1024)
    prefetch: int = Field(default=2, ge=1, le=64)
    caption: str = "txt"
    decoding: Literal["fast", "exact"] = "fast"
    crop: CropConfig = Field(default_factory=CropConfig)
    max_pixels: int = Field(default=178_956_970, ge=1)
    corrupt_limit: float = Field(default=0.01, ge=0, le=1)
    retries: int = Field(default=3, ge=0, le=100)

    @field_validator("caption")
    @classmethod
    def _readable(cls, caption: str) -> str:
        return str(CaptionField.parse(caption))

    @field_validator("sources")
    @classmethod
    def _distinct(cls, sources: tuple[Source, ...]) -> tuple[Source, ...]:
        paths = [source.manifest for source in sources]
        if len(set(paths)) < len(paths):
            raise ValueError("a manifest is listed twice: give it one entry with a larger weight")
        return sources

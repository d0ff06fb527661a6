"""Settings of the `data` section: sources, order, decoding. Imports nothing heavy."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from pipeline.config import section
from pipeline.data.shards.tar_reader import CaptionField
from pipeline.pictures.pixels import ColourName

TEACHER, IMAGES = "data.teacher_features", "data.image_features"
"""The settings that name folders of `neuclip features`."""
MAX_PIXELS = 178_956_970
"""Larger images count as corrupt (decompression bombs)."""
MOST_WORKERS = 12
"""Default limit per rank: at 500 to 900 images per second and worker, more than a GPU trains on."""


def default_workers(cores: int) -> int:
    """Decoding processes of a rank where `data.workers` is `auto`, if the rank has these cores for itself."""
    return max(1, min(MOST_WORKERS, cores - 1))


_Caption = Annotated[str, AfterValidator(lambda text: str(CaptionField.parse(text)))]


@section
class Source:
    """One set of shards in a mixture."""

    manifest: str
    """A `manifest.json`, or the folder that holds it."""
    weight: float = Field(default=1.0, gt=0, le=1000)
    """Passes over the source per epoch: 1 shows every sample once, 2 twice, 0.5 a different half in each epoch."""
    caption: _Caption | None = None
    """Where this source's captions are, as in `data.caption`; None: where `data.caption` says."""


@section
class CropConfig:
    """The random resized crop; the defaults are open_clip's."""

    scale: tuple[float, float] = (0.9, 1.0)
    """Smallest and largest share of the image's area that the crop keeps."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Smallest and largest width over height of the crop. With `scale` and `ratio` both [1, 1], the crop is always the
    central square: no augmentation."""

    @model_validator(mode="after")
    def _ordered(self) -> CropConfig:
        for name, (low, high) in (("scale", self.scale), ("ratio", self.ratio)):
            if not 0 < low <= high or (name == "scale" and high > 1):
                limit = " <= 1" if name == "scale" else ""
                raise ValueError(f"crop.{name} = {(low, high)} must satisfy 0 < low <= high{limit}")
        return self


CENTRAL_SQUARE = CropConfig(scale=(1.0, 1.0), ratio=(1.0, 1.0))
Share = Annotated[float, Field(ge=0, le=1)]


@section
class AugmentConfig:
    """Colour augmentations after the crop, drawn for each sample and epoch: open_clip's `--aug-cfg`."""

    color_jitter: tuple[float, float, float, Annotated[float, Field(le=0.5)]] = (0.0, 0.0, 0.0, 0.0)
    """Strength of brightness, contrast, saturation and hue, which are changed in a random order: factors are drawn from
    1 - strength (at least 0) to 1 + strength, and the shift of the hue from -strength to strength."""
    color_jitter_prob: Share = 0.0
    """Share of the samples with changed colours."""
    gray_scale_prob: Share = 0.0
    """Share of the samples in grey."""

    @model_validator(mode="after")
    def _both_or_none(self) -> AugmentConfig:
        if min(self.color_jitter) < 0 or any(self.color_jitter) != (self.color_jitter_prob > 0):
            raise ValueError(
                "color_jitter (four strengths of 0 and more, such as [0.32,0.32,0.32,0.08]) and color_jitter_prob are "
                "set together"
            )
        return self


NO_COLOURS = AugmentConfig()
"""No colours change."""


def as_sources(value: Any) -> Any:
    """Expand the short forms: a path is a list of one source, and a path in a list is a source of weight 1."""
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, (list, tuple)):
        return value
    return [{"manifest": item} if isinstance(item, str) else item for item in listed]


PREFETCH = 2
"""Batches that each worker keeps ready."""


@section
class DataConfig:
    """What to train on and in which order."""

    sources: Annotated[tuple[Source, ...], BeforeValidator(as_sources)] = Field(min_length=1)
    """A folder with `manifest.json`, or a list of folders or of `{manifest, weight}`; a weight is passes per epoch."""
    order: str = "canonical"
    """The order of samples, by name: `canonical`, or one of a package of your own. It cannot change within a run."""
    streams: int = Field(default=64, ge=1, le=65536)
    """$C$, interleaved streams that fill a batch. Part of the order: it cannot change within a run. It must divide
    `batch_size`, and the number of ranks must divide it. `auto`, or not given: the largest
    divisor of `batch_size` up to 64. More streams mix more shards into a batch: raise it before the buffer."""
    shuffle_buffer: int = Field(default=1000, ge=1, le=10_000_000)
    """$S$: a sample moves by fewer than $S$ places within its stream. About $S/2$ encoded samples of each stream are in
    memory. Part of the order: it cannot change within a run."""
    workers: Annotated[
        Annotated[int, Field(ge=0, le=1024)] | None, BeforeValidator(lambda value: None if value == "auto" else value)
    ] = None
    """Decoding processes per rank, at most one for each of its streams; 0 decodes in the training process. `auto` or
    None: the rank's share of its node's cores less one, at most 12. `neuclip plan --measure` measures the loader."""
    timeout_minutes: float = Field(default=20.0, gt=0)
    """How long to wait for a batch of a worker before the run reports what the workers are doing, and exits with 76."""
    caption: _Caption = "txt"
    """Where captions are: a member's suffix, or `json:FIELD`. If the field holds several texts, one is drawn by hash
    each time that the sample is shown."""
    teacher_features: str | None = None
    """Folder of `neuclip features`: a teacher's features of these sources, for `objective.distill`. They are of the
    whole image, preprocessed as for evaluation, and of one of several captions."""
    image_features: str | None = None
    """Folder of `neuclip features --images-only`: the outputs of the run's image tower, which must be locked as a whole
    (`model.lock_image`), for these sources. No image is decoded, and the tower does not run. The loss is the same up to
    rounding, of bf16 where the tower would compute in it: features are fp32. They are of the central square
    (`data.crop.scale=[1,1] data.crop.ratio=[1,1]`)."""
    decoding: Literal["fast", "exact", "gpu"] = "fast"
    """`fast` (libjpeg-turbo and torch's uint8 bicubic, within 2 of 255 of open_clip's pixels), `exact` (open_clip's own
    PIL pixels) or `gpu` (ordinary JPEGs with nvJPEG, with slightly other pixels; all else as `fast`)."""
    background: ColourName = "white"
    """Colour behind what is transparent in pictures, by name or as #rrggbb. It is stored with the model: `evaluate` (on
    tasks of your own), `score`, `features` and `playground` use it."""
    crop: CropConfig = Field(default_factory=CropConfig)
    """The random resized crop."""
    augment: AugmentConfig = Field(default_factory=AugmentConfig)
    """Colour augmentations."""
    corrupt_limit: float = Field(default=0.01, ge=0, le=1)
    """Share of an epoch's samples that may be corrupt before the run stops."""
    altered_shards: Literal["stop", "skip", "ignore"] = "stop"
    """What happens when the bytes of a shard are not those that its manifest has the SHA-256 of, which is known when a
    stream has read the shard to its end: `stop` ends the run, `skip` reports it and replaces those of its samples that
    were not shown yet, which count as corrupt. `ignore` does not hash. Not checked are manifests without hashes, and
    shards of samples above 100 kB that a run enters in the middle."""
    allow_outside: bool = False
    """Allow manifests to name shards outside of their folder on this machine (absolute paths, `../`, `file://`) and
    URLs other than those of object stores and web servers (chains such as `simplecache::`)."""
    retries: int = Field(default=3, ge=0, le=100)
    """How often reading a shard is tried again without any progress before its remaining samples count as lost."""

    @property
    def stored_features(self) -> dict[str, str]:
        """Folders of `neuclip features`, by the setting that names them."""
        named = {TEACHER: self.teacher_features, IMAGES: self.image_features}
        return {setting: folder for setting, folder in named.items() if folder}

    @model_validator(mode="after")
    def _augmented_here(self) -> DataConfig:
        if self.augment == NO_COLOURS:
            return self
        for name in self.stored_features:
            raise ValueError(f"data.augment changes colours, and {name} are of unchanged ones: use one of them")
        if self.decoding == "gpu":
            raise ValueError("data.augment works on pixels that workers decode: set data.decoding=fast, not gpu")
        return self

    @field_validator("sources")
    @classmethod
    def _distinct(cls, sources: tuple[Source, ...]) -> tuple[Source, ...]:
        paths = [source.manifest for source in sources]
        if len(set(paths)) < len(paths):
            raise ValueError("a manifest is listed twice: list it once, with a larger weight")
        return sources

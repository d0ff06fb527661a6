"""A few pairs of the training data as stored in the shards, for visual inspection."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.data.shards.caption_field import CaptionField
from pipeline.data.shards.manifest_format import Manifest
from pipeline.data.shards.storage import is_local, open_records
from pipeline.errors import UserError

COUNT, SIDE = 12, 160


@dataclass(frozen=True)
class SamplePair:
    """A caption and its image as a data URI."""

    caption: str
    image: str


def sample_pairs(manifests: Sequence[Manifest], *, caption: str = "txt", count: int = COUNT) -> list[SamplePair]:
    """Pairs sampled at even intervals from all local shards; unreadable ones are skipped.

    Args:
        manifests: The manifests of the data sources.
        caption: `data.caption` of the run.
        count: Maximum number of pairs.
    """
    try:
        field = CaptionField.parse(caption)
    except (UserError, ValueError):
        return []
    places = [
        (manifest, shard, row)
        for manifest in manifests
        for shard in range(len(manifest.shards))
        for row in (0, manifest.shards[shard].samples // 2)
    ]
    chosen = [places[k * len(places) // count] for k in range(count)] if len(places) > count else places
    found = [_read(manifest.url(manifest.shards[shard]), row, field) for manifest, shard, row in chosen]
    return [pair for pair in found if pair is not None][:count]


def _read(url: str, row: int, field: CaptionField) -> SamplePair | None:
    from pipeline.data.shards.rgb_image import rgb_image

    if not is_local(url) or not Path(url).is_file():
        return None
    try:
        with open_records(url, skip=row, caption_suffix=field.suffix) as records:
            record = next(iter(records), None)
        if record is None or record.image is None or record.caption is None:
            return None
        text = field.read(record)
        image = rgb_image(record.image)
        image.thumbnail((SIDE, SIDE))
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=80)
    except (OSError, ValueError, UserError):
        return None
    return SamplePair(text, f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}")

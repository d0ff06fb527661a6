"""Statistics of a data set for its page: reasons, hosts, image sizes, captions, near duplicates, in bounded memory.

The meta files of `neuclip download` and `neuclip pairs` are read as a whole; of the shards, the first samples of some.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_prep.dataset.dataset_folder import Folder, read_meta
from data_prep.dataset.duplicates import near_duplicates, signature, stacked
from pipeline.data.shards.manifest_format import Manifest
from pipeline.data.shards.rgb_image import counted_errors
from pipeline.data.shards.storage import open_records
from pipeline.data.shards.tar_reader import CaptionField, CorruptSample, DamagedTar, TarRecord
from pipeline.errors import UserError
from pipeline.pictures.pixels import has_transparency, open_image

# Samples that are read, of so many shards, and captions whose language is guessed.
_READ, _SHARDS_READ = 5_000, 32
_HOSTS_KEPT = 200_000
SIDE_EDGES = np.array([0, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 1 << 31])
WORD_EDGES = np.array([0, 1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 1 << 31])
_COLUMNS = ["row", "url", "caption", "status", "reason", "width", "height", "original_width", "original_height"]
MOST_REASONS = 1000
"""That are counted apart along the list."""
PARTS = 40
"""Parts of the list of rows for which failures are counted."""

Place = tuple[int, int]
"""Number of a shard in the manifest, and of a sample in it."""


@dataclass
class Census:
    """Statistics of a data set. Histograms count by `SIDE_EDGES` (pixels) and `WORD_EDGES` (words)."""

    reasons: defaultdict[str, np.ndarray] = field(default_factory=lambda: defaultdict(lambda: np.zeros(PARTS, int)))
    """Failures by reason, in each part of the list."""
    hosts: Counter[str] = field(default_factory=Counter)
    host_samples: Counter[str] = field(default_factory=Counter)
    host_reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    served_sides: np.ndarray = field(default_factory=lambda: np.zeros(len(SIDE_EDGES) - 1, np.int64))
    stored_sides: np.ndarray = field(default_factory=lambda: np.zeros(len(SIDE_EDGES) - 1, np.int64))
    caption_words: np.ndarray = field(default_factory=lambda: np.zeros(len(WORD_EDGES) - 1, np.int64))
    languages: Counter[str] = field(default_factory=Counter)
    captions: list[str] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    """The samples that were read, without those that cannot be used."""
    shards_read: int = 0
    odd: Counter[str] = field(default_factory=Counter)
    """Among those read: images with transparency, and of a single colour."""
    problems: Counter[str] = field(default_factory=Counter)
    """Samples among those read that training cannot use, by reason."""
    near: list[tuple[Place, Place]] = field(default_factory=list)
    """Near duplicates among the samples that were read, and the earlier sample that each resembles."""


def take_census(folder: Folder, manifest: Manifest, caption: CaptionField) -> Census:
    """Read every meta file of a data set once, and some samples; `caption` says where these have their captions.

    Raises:
        UserError: A meta file or a shard is missing or damaged.
    """
    census = Census()
    shards = folder.finished() if folder.is_download or folder.is_converted else []
    for shard in shards:
        table = read_meta(folder, shard, _COLUMNS)
        _count(census, table, attempted=manifest.attempted, per_shard=max(1, _READ // len(shards)))
    _read_samples(census, manifest, caption)
    census.languages = _languages(census.captions)
    return census


def _count(census: Census, table: Any, *, attempted: int, per_shard: int) -> None:
    good = pc.equal(table["status"], "success")
    kept, lost = table.filter(good), table.filter(pc.invert(good))
    parts = lost["row"].to_numpy() * PARTS // max(1, attempted)
    for reason, part in zip(lost["reason"].to_pylist(), parts, strict=True):
        known = reason in census.reasons or len(census.reasons) < MOST_REASONS
        census.reasons[reason if known else "others"][min(part, PARTS - 1)] += 1
    if "url" in table.column_names:
        hosts = _hosts(table["url"])
        census.hosts.update(_counts(hosts))
        census.host_samples.update(_counts(hosts.filter(good)))
        census.host_reasons.update(
            zip(hosts.filter(pc.invert(good)).to_pylist(), lost["reason"].to_pylist(), strict=True)
        )
        _forget_rare_hosts(census)
    for name, into in (("original_", census.served_sides), ("", census.stored_sides)):
        if f"{name}width" in kept.column_names:
            sides = pc.min_element_wise(kept[f"{name}width"], kept[f"{name}height"]).drop_null().to_numpy()
            into += np.histogram(sides, SIDE_EDGES)[0]
    if "caption" in kept.column_names:
        _count_captions(census, kept["caption"], per_shard)


def _count_captions(census: Census, captions: Any, wanted: int) -> None:
    trimmed = pc.utf8_trim_whitespace(captions)
    words = pc.if_else(pc.equal(trimmed, ""), 0, pc.list_value_length(pc.utf8_split_whitespace(trimmed)))
    census.caption_words += np.histogram(words, WORD_EDGES)[0]
    census.captions.extend(captions.to_pylist()[:: max(1, len(captions) // wanted)][:wanted])


def _read_samples(census: Census, manifest: Manifest, caption: CaptionField) -> None:
    """Read the first samples of shards that are spread over the data set."""
    count = min(_SHARDS_READ, len(manifest.shards))
    has_sizes, has_captions = bool(census.stored_sides.any()), bool(census.captions)
    signatures, captions = [], []
    for number in (len(manifest.shards) * k // count for k in range(count)):
        url = manifest.url(manifest.shards[number])
        for place, record in enumerate(_first_records(url, caption, -(-_READ // count))):
            try:
                side, text, found = _examined(record, caption)
            except CorruptSample as problem:
                census.problems[str(problem)] += 1
                continue
            signatures.append(found)
            census.odd["transparent"] += has_transparency(record.image or b"")
            census.odd["single_colour"] += len({found[1][k : k + 3] for k in range(0, len(found[1]), 3)}) == 1
            captions.append(text)
            census.places.append((number, place))
            if not has_sizes:
                census.stored_sides += np.histogram([side], SIDE_EDGES)[0]
    if captions and not has_captions:
        _count_captions(census, pa.array(captions), _READ)
    census.shards_read = count
    near = near_duplicates(stacked(signatures))
    census.near = [(census.places[later], census.places[earlier]) for later, earlier in near.items()]


def _first_records(url: str, caption: CaptionField, wanted: int) -> Iterator[TarRecord]:
    try:
        with open_records(url, caption_suffix=caption.suffix) as records:
            yield from itertools.islice(records, wanted)
    except (OSError, DamagedTar) as error:
        raise UserError(f"{url} is missing or damaged ({error}): `neuclip verify` finds all damage.") from error


def _examined(record: TarRecord, caption: CaptionField) -> tuple[int, str, tuple[int, bytes]]:
    """The shorter side, the caption and the signature of a sample."""
    if record.problem or not record.image:
        raise CorruptSample(record.problem or "image is missing")
    with counted_errors(), open_image(record.image) as image:
        side = min(image.size)
    return side, caption.read(record), signature(record.image)


def _hosts(urls: Any) -> Any:
    found = pc.extract_regex(urls, r"^[a-zA-Z][a-zA-Z0-9+.-]*://(?:[^/@]*@)?(?P<host>\[[^\]]*\]|[^/:?#]+)")
    return pc.fill_null(pc.utf8_lower(pc.struct_field(found, "host")), "(no host)")


def _counts(column: Any) -> dict[str, int]:
    return {item["values"]: item["counts"] for item in pc.value_counts(column).to_pylist()}


def _forget_rare_hosts(census: Census) -> None:
    """Keep only the most frequent hosts: the page shows a few, and a crawl has millions."""
    if len(census.hosts) <= 2 * _HOSTS_KEPT:
        return
    kept = dict(census.hosts.most_common(_HOSTS_KEPT))
    census.hosts = Counter(kept)
    census.host_samples = Counter({host: n for host, n in census.host_samples.items() if host in kept})
    census.host_reasons = Counter({key: n for key, n in census.host_reasons.items() if key[0] in kept})


def _languages(captions: list[str]) -> Counter[str]:
    """Guessed ISO codes. Guesses from a few words are rough: a language with a few per cent may not occur."""
    import py3langid

    return Counter(str(py3langid.classify(caption)[0]) for caption in captions if caption.strip())

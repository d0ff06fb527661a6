"""Statistics of a whole data set: reasons, hosts, image sizes, captions; one pass, bounded memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from data_prep.dataset.dataset_folder import Folder, read_meta

# Captions whose language is guessed, spread over the shards.
_LANGUAGE_SAMPLE = 5_000
_HOSTS_KEPT = 200_000
SIDE_EDGES = np.array([0, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 1 << 31])
WORD_EDGES = np.array([0, 1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 1 << 31])


@dataclass
class Census:
    """Statistics over the meta files. Histograms count by `SIDE_EDGES` (pixels) and `WORD_EDGES` (words)."""

    urls: int = 0
    samples: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    hosts: Counter[str] = field(default_factory=Counter)
    host_samples: Counter[str] = field(default_factory=Counter)
    host_reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    served_sides: np.ndarray = field(default_factory=lambda: np.zeros(len(SIDE_EDGES) - 1, np.int64))
    stored_sides: np.ndarray = field(default_factory=lambda: np.zeros(len(SIDE_EDGES) - 1, np.int64))
    caption_words: np.ndarray = field(default_factory=lambda: np.zeros(len(WORD_EDGES) - 1, np.int64))
    languages: Counter[str] = field(default_factory=Counter)
    captions: list[str] = field(default_factory=list)


def take_census(folder: Folder) -> Census:
    """Read every shard's meta file once."""
    census = Census()
    shards = folder.finished()
    per_shard = max(1, _LANGUAGE_SAMPLE // max(1, len(shards)))
    wanted = ["url", "caption", "status", "reason", "width", "height", "original_width", "original_height"]
    for shard in shards:
        _count(census, read_meta(folder, shard, wanted), per_shard)
    census.languages = _languages(census.captions)
    return census


def _count(census: Census, table: Any, per_shard: int) -> None:
    import pyarrow.compute as pc

    good = pc.equal(table["status"], "success")
    census.urls += table.num_rows
    kept = table.filter(good)
    census.samples += kept.num_rows
    hosts = _hosts(table["url"])
    census.hosts.update(_counts(hosts))
    census.host_samples.update(_counts(hosts.filter(good)))
    bad = pc.invert(good)
    failed = zip(hosts.filter(bad).to_pylist(), table.filter(bad)["reason"].to_pylist(), strict=True)
    for host, reason in failed:
        census.reasons[reason] += 1
        census.host_reasons[host, reason] += 1
    _forget_rare_hosts(census)
    for name, into in (("original_", census.served_sides), ("", census.stored_sides)):
        if f"{name}width" in kept.column_names:
            sides = pc.min_element_wise(kept[f"{name}width"], kept[f"{name}height"]).drop_null().to_numpy()
            into += np.histogram(sides, SIDE_EDGES)[0]
    captions = kept["caption"]
    words = pc.list_value_length(pc.utf8_split_whitespace(pc.utf8_trim_whitespace(captions))).to_numpy()
    empty = pc.equal(pc.utf8_trim_whitespace(captions), "").to_numpy(zero_copy_only=False)
    census.caption_words += np.histogram(np.where(empty, 0, words), WORD_EDGES)[0]
    step = max(1, len(captions) // per_shard)
    census.captions.extend(captions.to_pylist()[::step][:per_shard])


def _hosts(urls: Any) -> Any:
    import pyarrow.compute as pc

    found = pc.extract_regex(urls, r"^[a-zA-Z][a-zA-Z0-9+.-]*://(?:[^/@]*@)?(?P<host>\[[^\]]*\]|[^/:?#]+)")
    return pc.fill_null(pc.utf8_lower(pc.struct_field(found, "host")), "(no host)")


def _counts(column: Any) -> dict[str, int]:
    import pyarrow.compute as pc

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

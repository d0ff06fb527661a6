"""Fetch a few of the first rows to check that the hash column holds hashes of the bytes, as verification assumes.

If it held a hash of the decoded pixels, of the URL, or by another algorithm, every URL would fail. It is better to
detect that on the first rows than after a week.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from typing import Any

from data_prep import reasons
from data_prep.fetching.opener import Opener
from data_prep.reasons import FetchError
from data_prep.settings.download_config import DownloadConfig
from data_prep.settings.source_config import HASH_KINDS, SourceConfig
from data_prep.sources.table_checks import CHECKED_ROWS, first_rows
from pipeline.errors import UserError
from pipeline.pixels import ImageError, read_rgb

_ENOUGH = 8
_ALGORITHMS = ("md5", "sha1", "sha256", "sha512")


def check_hashes(config: DownloadConfig) -> list[str]:
    """Fetch `monitor.probe` of the first thousand rows and compare their hashes.

    Returns:
        Notes for the user.

    Raises:
        UserError: No hashes, or hardly any, match. The message says what the column contains instead, where that can be
            determined.
    """
    source = config.source
    if source.hash is None or config.monitor.probe == 0:
        return []
    rows = first_rows(source, CHECKED_ROWS)
    rows = rows[:: max(1, len(rows) // config.monitor.probe)][: config.monitor.probe]
    fetch = _fetcher(config)
    with ThreadPool(min(config.fetch.threads, len(rows))) as pool:
        answers = pool.map(lambda row: fetch(row[source.url] or ""), rows)
    came = [(row, body) for row, body in zip(rows, answers, strict=True) if isinstance(body, bytes)]
    differ = [pair for pair in came if _digest(source.hash_kind, pair[1]) != _stated(pair[0], source)]
    if len(came) < min(_ENOUGH, len(rows)):
        why = Counter(answer for answer in answers if isinstance(answer, str)).most_common(1)[0][0]
        few = f"Only {len(came)} of {len(rows)} probed URLs gave an image (mostly {why!r})"
        return [f"{few}, too few to check column {source.hash!r}."]
    if len(differ) > 0.9 * len(came):
        raise UserError(_explain(differ, len(came), config))
    if differ:
        share = len(differ) / len(came)
        return [f"{share:.0%} of {len(came)} probed images have changed since their hash was taken."]
    return []


def _fetcher(config: DownloadConfig) -> Callable[[str], bytes | str]:
    """A function that fetches a URL and returns the body, or the reason why there is none."""
    opener = Opener(
        config.guard,
        connections=config.guard.host_connections,
        retries=config.fetch.retries,
        total_seconds=config.fetch.total_timeout,
    )

    def fetch(url: str) -> bytes | str:
        try:
            return opener.open(url, timeout=config.fetch.timeout).read()
        except (FetchError, ValueError) as error:
            return reasons.of_message(str(error))

    return fetch


def _explain(differ: list[tuple[dict[str, Any], bytes]], came: int, config: DownloadConfig) -> str:
    source = config.source
    mismatch = (
        f"Column {source.hash!r} does not hold the {source.hash_kind} of the bytes as served: {len(differ)} of {came} "
        f"probed images differ. "
    )
    found: Counter[str] = Counter()
    for row, body in differ:
        found.update(_what_is(_stated(row, source), row, body, config))
    best = found.most_common(1)
    if best and best[0][1] > len(differ) / 2:
        algorithm, what = best[0][0].split(" of ", 1)
        if what == "the bytes":
            if algorithm not in HASH_KINDS:
                return f"{mismatch}It holds their {algorithm}, which cannot be verified here: set source.hash=null."
            return f"{mismatch}It holds their {algorithm}: set source.hash_kind={algorithm}."
        return f"{mismatch}It holds the {algorithm} of {what}, which cannot verify a download: set source.hash=null."
    return f"{mismatch}Its content is unknown. Name the right column, or set source.hash=null."


def _what_is(value: str, row: dict[str, Any], body: bytes, config: DownloadConfig) -> list[str]:
    url, caption = str(row[config.source.url]), str(row[config.source.caption])
    readings = {
        "the bytes": lambda: body,
        "the decoded pixels": lambda: _pixels(body, reverse=False),
        "the decoded pixels in BGR order": lambda: _pixels(body, reverse=True),
        "the URL": lambda: url.encode(),
        "the caption": lambda: caption.encode(),
        "URL and caption": lambda: (url + caption).encode(),
    }
    return [
        f"{algorithm} of {what}"
        for what, content in readings.items()
        for algorithm in _ALGORITHMS
        if len(value) == 2 * hashlib.new(algorithm).digest_size and _digest(algorithm, content()) == value
    ]


def _stated(row: dict[str, Any], source: SourceConfig) -> str:
    return str(row[source.hash or ""]).lower()


def _pixels(body: bytes, *, reverse: bool) -> bytes:
    import numpy as np

    try:
        pixels = np.asarray(read_rgb(body))
    except ImageError:
        return b""
    return np.ascontiguousarray(pixels[..., ::-1] if reverse else pixels).tobytes()


def _digest(algorithm: str, content: bytes) -> str:
    return hashlib.new(algorithm, content).hexdigest()

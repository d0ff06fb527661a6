"""Checks before the first URL: files, rows and columns, and whether the columns have the expected content.

A few of the first rows are fetched to check that the hash column holds hashes of the bytes, as verification assumes:
of a column of other hashes, every URL would fail.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.pool import ThreadPool
from typing import Any

from data_prep import reasons
from data_prep.fetching.opener import Opener
from data_prep.reasons import FetchError
from data_prep.settings.download_config import DownloadConfig, FetchConfig
from data_prep.settings.source_config import HASH_KINDS, SourceConfig
from data_prep.sources import metadata_tables
from data_prep.sources.metadata_tables import check_rows
from data_prep.sources.text_columns import URL, columns_of
from pipeline.errors import UserError

CHECKED_ROWS = 1_000
_HEX_LENGTH = {"md5": 32, "sha256": 64, "sha512": 128}
_HEX = re.compile(r"[0-9a-f]{32}|[0-9a-f]{40}|[0-9a-f]{64}|[0-9a-f]{128}", re.IGNORECASE)


def check_source(config: DownloadConfig) -> list[str]:
    """Check a resolved source: its files, its row count and its first thousand rows.

    Returns:
        Notes for the user.

    Raises:
        UserError: Something is wrong; the message says what, and what would be right.
    """
    source = config.source
    if source.table is not None:
        metadata_tables.check_files(source)
    known = metadata_tables.count_known(source)
    if known is not None:
        check_rows(source, known)
    unreadable: list[int] = []
    rows = first_rows(source, on_skipped=unreadable.append)
    if not rows:
        why = f"has {sum(unreadable):,} rows, none of which can be read" if unreadable else "has no rows"
        named = ", ".join(columns_of(source))
        raise UserError(
            f"source.table = {source.table!r} {why}: each must have the right number of fields, and UTF-8 text in the "
            f"columns {named}."
        )
    notes = [*_check_urls(rows, source), *_check_captions(rows, source)]
    _check_stated_hashes(rows, source)
    if not config.guard.contact:
        notes.append(
            "No guard.contact is set: the owners of servers cannot reach you. Give a page or an e-mail address."
        )
    if source.hub and source.revision:
        notes.append(f"{source.hub} is read at revision {source.revision}.")
    return notes


def check_blur(config: DownloadConfig) -> None:
    """Refuse settings that blur images but might store some of them as served, unblurred.

    Raises:
        UserError: `image.skip_reencode` is set for a source with boxes to blur.
    """
    if config.source.blur and config.image.skip_reencode:
        raise UserError(
            f"image.skip_reencode = true with source.blur = {config.source.blur!r}: images that need no resizing would "
            "be stored as served, with the faces unblurred. Set image.skip_reencode=false, or source.blur=null."
        )


def check_distributor(fetch: FetchConfig) -> None:
    """Check that the chosen distributor can start on this machine.

    Raises:
        UserError: It cannot.
    """
    if fetch.distributor == "multiprocessing":
        return
    if importlib.util.find_spec(fetch.distributor) is None:
        raise UserError(
            f"fetch.distributor = {fetch.distributor!r} needs a package that is not installed here: "
            "`pip install -c constraints.txt -e '.[scale]'`, or use multiprocessing."
        )
    if fetch.distributor == "pyspark" and not (shutil.which("java") or os.environ.get("JAVA_HOME")):
        raise UserError(
            "fetch.distributor = 'pyspark' needs a Java (17 or later), and none was found on the PATH or in "
            "JAVA_HOME: install one, or use multiprocessing or ray."
        )


def first_rows(source: SourceConfig, *, on_skipped: Callable[[int], None] = lambda rows: None) -> list[dict[str, Any]]:
    """The first rows of the table, as dicts of the source's own column names; see `metadata_tables.read`."""
    batches = metadata_tables.read(source, on_skipped=on_skipped)
    return list(itertools.islice(itertools.chain.from_iterable(batch.to_pylist() for batch in batches), CHECKED_ROWS))


def _check_urls(rows: list[dict[str, Any]], source: SourceConfig) -> Iterator[str]:
    def share_of(name: str) -> float:
        return sum(_is_url(row[name]) for row in rows) / len(rows)

    share = share_of(source.url)
    if share >= 0.5:
        if share < 0.99:
            yield f"{1 - share:.0%} of the first {len(rows):,} values in column {source.url!r} are not URLs."
        return
    better = next((name for name in rows[0] if share_of(name) >= 0.5), None)
    hint = f"Column {better!r} does: set source.url={better}." if better else "None of the columns read does."
    raise UserError(
        f"Column {source.url!r} does not hold URLs: {share:.0%} of its first {len(rows):,} values look like one, for "
        f"example {str(rows[0][source.url])[:80]!r}. {hint}"
    )


def _check_captions(rows: list[dict[str, Any]], source: SourceConfig) -> Iterator[str]:
    def used(value: Any) -> str:
        texts = value if isinstance(value, list) else [value]
        return next((str(text).strip() for text in texts if text is not None and str(text).strip()), "")

    captions = [used(row[source.caption]) for row in rows]
    empty = captions.count("") / len(rows)
    odd = sum(_is_url(c) or _is_hash(c) or c.replace(".", "", 1).isdigit() for c in captions) / len(rows)
    if empty > 0.9 or odd > 0.9:
        what = "is empty" if empty > 0.9 else "holds URLs, hashes or numbers"
        raise UserError(
            f"Column {source.caption!r} {what} in {max(empty, odd):.0%} of the first {len(rows):,} rows, so it is not "
            f"the captions. Set source.caption to the right column."
        )
    if empty > 0.01:
        yield f"{empty:.0%} of the first {len(rows):,} captions are empty."


def _check_stated_hashes(rows: list[dict[str, Any]], source: SourceConfig) -> None:
    if source.hash is None:
        return
    length = _HEX_LENGTH[source.hash_kind]
    wrong = [row[source.hash] for row in rows if not (_is_hash(row[source.hash]) and len(row[source.hash]) == length)]
    if len(wrong) <= 0.01 * len(rows):
        return
    example = str(next((value for value in wrong if value), ""))
    kind = next((kind for kind in HASH_KINDS if _is_hash(example) and _HEX_LENGTH[kind] == len(example)), None)
    hint = f"It looks like {kind}: set source.hash_kind={kind}." if kind else ""
    raise UserError(
        f"Column {source.hash!r} should hold {source.hash_kind} in hex ({length} digits), but "
        f"{len(wrong) / len(rows):.0%} of the first {len(rows):,} values are not, for example {example[:80]!r}. "
        f"{hint or 'Name the right column, or set source.hash=null.'}"
    )


def _is_url(value: Any) -> bool:
    return bool(URL.match(str(value)))


def _is_hash(value: Any) -> bool:
    return bool(_HEX.fullmatch(str(value)))


_ENOUGH = 8


def check_hashes(config: DownloadConfig) -> list[str]:
    """Fetch `monitor.probe` of the first thousand rows and compare their hashes.

    Returns:
        Notes for the user.

    Raises:
        UserError: No hashes, or hardly any, match.
    """
    source = config.source
    if source.hash is None or config.monitor.probe == 0:
        return []
    rows = first_rows(source)
    rows = rows[:: max(1, len(rows) // config.monitor.probe)][: config.monitor.probe]
    opener = Opener(
        config.guard,
        connections=config.guard.host_connections,
        retries=config.fetch.retries,
        total_seconds=config.fetch.total_timeout,
    )

    def fetch(row: dict[str, Any]) -> bytes | str:
        """The body, or the reason why there is none."""
        try:
            return opener.open(row[source.url] or "", timeout=config.fetch.timeout).read()
        except (FetchError, ValueError) as error:
            return reasons.of_message(str(error))

    with ThreadPool(min(config.fetch.threads, len(rows))) as pool:
        answers = pool.map(fetch, rows)
    came = [(row, body) for row, body in zip(rows, answers, strict=True) if isinstance(body, bytes)]
    differ = sum(hashlib.new(source.hash_kind, body).hexdigest() != str(row[source.hash]).lower() for row, body in came)
    if len(came) < min(_ENOUGH, len(rows)):
        why = Counter(answer for answer in answers if isinstance(answer, str)).most_common(1)[0][0]
        few = f"Only {len(came)} of {len(rows)} probed URLs gave an image (mostly {why!r})"
        return [f"{few}, too few to check column {source.hash!r}."]
    if differ > 0.9 * len(came):
        raise UserError(
            f"Column {source.hash!r} does not hold the {source.hash_kind} of the bytes as served: {differ} of "
            f"{len(came)} probed images differ. Hashes of something else, such as the pixels or the URL, cannot verify "
            "a download: name the right column, or set source.hash=null."
        )
    if differ:
        return [f"{differ / len(came):.0%} of {len(came)} probed images have changed since their hash was taken."]
    return []

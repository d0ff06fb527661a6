"""Checks before the first URL: files, rows, columns, and that the columns have the expected content."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

from data_prep.settings.download_config import DownloadConfig, FetchConfig
from data_prep.settings.source_config import HASH_KINDS, SourceConfig
from data_prep.sources import metadata_tables
from data_prep.sources.text_columns import columns_of
from pipeline.errors import UserError

CHECKED_ROWS = 1_000
_HEX_LENGTH = {"md5": 32, "sha1": 40, "sha256": 64, "sha512": 128}
_URL = re.compile(r"^[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_HEX = re.compile(r"^[0-9a-f]+$", re.IGNORECASE)


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
        raise UserError(f"source.table = {source.table!r} {_why_no_rows(sum(unreadable), source)}")
    return [*_check_urls(rows, source), *_check_captions(rows, source), *_check_hashes(rows, source), *_notes(config)]


def check_rows(source: SourceConfig, found: int) -> None:
    """Compare the row count of the whole table, before any subset, with the published one.

    Raises:
        UserError: They differ.
    """
    if source.rows not in (None, found):
        raise UserError(
            f"The table has {found:,} rows, but {source.name} is published with {source.rows:,} (source.rows): it is "
            "incomplete or another version. Fetch it again, or set source.rows to what you mean to use."
        )


def check_blur(config: DownloadConfig) -> None:
    """Refuse settings that blur images but might store some of them as served, unblurred.

    An image that needs no resizing would be stored as served.

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


def first_rows(
    source: SourceConfig, count: int = CHECKED_ROWS, *, on_skipped: Callable[[int], None] = lambda rows: None
) -> list[dict[str, Any]]:
    """The first rows of the table, as dicts of the source's own column names; see `metadata_tables.read`."""
    batches = metadata_tables.read(source, on_skipped=on_skipped)
    return list(itertools.islice(itertools.chain.from_iterable(batch.to_pylist() for batch in batches), count))


def _why_no_rows(unreadable: int, source: SourceConfig) -> str:
    if not unreadable:
        return "has no rows."
    return (
        f"has {unreadable:,} rows, none of which can be read: each has a wrong number of fields, or bytes that are not "
        f"UTF-8 text in one of the columns {', '.join(columns_of(source))}. Name other columns, or store text in them."
    )


def _check_urls(rows: list[dict[str, Any]], source: SourceConfig) -> Iterator[str]:
    share = _share(rows, source.url, _is_url)
    if share >= 0.5:
        if share < 0.99:
            yield f"{1 - share:.0%} of the first {len(rows):,} values in column {source.url!r} are not URLs."
        return
    better = next((name for name in rows[0] if _share(rows, name, _is_url) >= 0.5), None)
    hint = f"Column {better!r} does: set source.url={better}." if better else "None of the columns read does."
    raise UserError(
        f"Column {source.url!r} does not hold URLs: {share:.0%} of its first {len(rows):,} values look like one, for "
        f"example {str(rows[0][source.url])[:80]!r}. {hint}"
    )


def _check_captions(rows: list[dict[str, Any]], source: SourceConfig) -> Iterator[str]:
    empty = 1 - _share(rows, source.caption, lambda value: bool(str(value).strip()))
    odd = _share(rows, source.caption, lambda value: _is_url(value) or _is_hash(value) or _is_number(value))
    if empty > 0.9 or odd > 0.9:
        what = "is empty" if empty > 0.9 else "holds URLs, hashes or numbers"
        raise UserError(
            f"Column {source.caption!r} {what} in {max(empty, odd):.0%} of the first {len(rows):,} rows, so it is not "
            f"the captions. Set source.caption to the right column."
        )
    if empty > 0.01:
        yield f"{empty:.0%} of the first {len(rows):,} captions are empty."


def _check_hashes(rows: list[dict[str, Any]], source: SourceConfig) -> Iterator[str]:
    if source.hash is None:
        return
    wanted = _HEX_LENGTH[source.hash_kind]

    def is_right(value: Any) -> bool:
        return _is_hash(value) and len(str(value)) == wanted

    share = _share(rows, source.hash, is_right)
    if share < 0.99:
        example = next((row[source.hash] for row in rows if row[source.hash] and not is_right(row[source.hash])), None)
        raise UserError(
            f"Column {source.hash!r} should hold {source.hash_kind} in hex ({wanted} digits), but {1 - share:.0%} of "
            f"the first {len(rows):,} values are not, {_what_instead(example)}"
        )
    yield from ()


def _what_instead(example: Any) -> str:
    """What a value that is no hash of the right kind seems to be, and what to do about it."""
    if example is None:
        return "because they are empty. Name the right column, or set source.hash=null."
    text = str(example)
    kind = next((kind for kind, length in _HEX_LENGTH.items() if length == len(text) and _is_hash(text)), None)
    shown = f"for example {text[:80]!r} of length {len(text)}."
    if kind is None:
        return f"{shown} It is not a hash of a known kind: name the right column, or set source.hash=null."
    if kind not in HASH_KINDS:
        return f"{shown} It looks like {kind}, which cannot be verified here: set source.hash=null."
    return f"{shown} It looks like {kind}: set source.hash_kind={kind}."


def _notes(config: DownloadConfig) -> Iterator[str]:
    if not config.guard.contact:
        yield "No guard.contact is set: the owners of servers cannot reach you. Give a page or an e-mail address."
    if config.source.hub and config.source.revision:
        yield f"{config.source.hub} is read at revision {config.source.revision}."


def _share(rows: list[dict[str, Any]], name: str, test: Any) -> float:
    return sum(row[name] is not None and test(row[name]) for row in rows) / len(rows)


def _is_url(value: Any) -> bool:
    return bool(_URL.match(str(value)))


def _is_hash(value: Any) -> bool:
    return len(str(value)) in _HEX_LENGTH.values() and bool(_HEX.match(str(value)))


def _is_number(value: Any) -> bool:
    return str(value).replace(".", "", 1).isdigit()

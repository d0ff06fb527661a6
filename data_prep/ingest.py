"""`neuclip download`: from a table of URLs to webdataset shards and a manifest, resumable and repeatable."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from data_prep.dataset.commit import part_lock, recover, shared_lock, worker_lock
from data_prep.dataset.dataset_folder import Folder
from data_prep.dataset.manifest_writer import expected_manifest, rules_of
from data_prep.dataset.shard_plan import Plan, load_plan, make_plan
from data_prep.download_config import DownloadConfig
from data_prep.fetching.shard_writer import Outcomes
from data_prep.fetching.supervisor import fetch
from data_prep.reasons import is_transient
from data_prep.sources import metadata_tables
from data_prep.sources.metadata_tables import check_rows, check_unchanged, pin
from data_prep.sources.text_columns import URL, columns_of
from pipeline.config import dump
from pipeline.data.shards.manifest_format import Manifest
from pipeline.errors import UserError
from pipeline.files import write_text

_CHECKED_ROWS = 1_000


class PartDone(UserError):
    """One of several workers has fetched its part, but others have not finished."""


def download(
    config: DownloadConfig,
    *,
    retry_failed: bool = False,
    on_progress: Callable[[int, Outcomes], None] = lambda total, outcomes: None,
    on_note: Callable[[str], None] = lambda note: None,
) -> Manifest:
    """Fetch what is missing, with `retry_failed` also the rows that failed for a transient reason; write the manifest.

    A run that was stopped in any way resumes where it was and ends with the manifest of an uninterrupted run.

    Raises:
        UserError: The settings, the table or its columns are wrong (raised before the first URL), or as for `fetch`.
        PartDone: Only shards of other workers are missing.
    """
    if config.fetch.distributor != "multiprocessing" and importlib.util.find_spec(config.fetch.distributor) is None:
        raise UserError(
            f"fetch.distributor = {config.fetch.distributor!r} needs a package that is not installed here: "
            "`pip install -c constraints.txt -e '.[scale]'`, or use multiprocessing."
        )
    config, plan = prepare(config, on_note=on_note)
    folder = Folder(Path(config.output), config.fetch.worker)
    own_shards = range(config.fetch.worker, plan.shards, config.fetch.workers)
    with shared_lock(folder, config.fetch.workers), worker_lock(folder):
        recover(folder, own_shards)
        write_text(folder.config, dump(config), durable=True)
        finished = [shard for shard in folder.finished() if shard in own_shards]
        folder.check_tars(finished)
        records = map(folder.read_record, finished) if retry_failed else ()
        transient = {r.shard: sum(n for reason, n in r.failures.items() if is_transient(reason)) for r in records}
        if retried := tuple(shard for shard, count in transient.items() if count):
            total = sum(transient.values())
            fetch(config, retried, total=total, on_progress=on_progress, on_note=on_note)
        if missing := tuple(sorted(set(own_shards).difference(finished))):
            fetch(config, missing, total=sum(map(plan.rows_of, missing)), on_progress=on_progress, on_note=on_note)
        if left := plan.shards - len(folder.finished()):
            raise PartDone(
                f"This worker's part is done, but {left:,} of {plan.shards:,} shards are unfinished, those of the "
                f"other {config.fetch.workers - 1}. The last worker to finish writes the manifest."
            )
        with part_lock(folder, "manifest"):  # else that of a worker that read older records could be the last
            manifest = expected_manifest(folder, plan)
            manifest.save(folder.root)
        return manifest


def prepare(
    config: DownloadConfig, *, on_note: Callable[[str], None] = lambda note: None
) -> tuple[DownloadConfig, Plan]:
    """Check the settings and the source, and lay out the plan; returns the resolved settings and the plan.

    Raises:
        UserError: Something is wrong with the settings or the table, or they have changed since the list was made.
    """
    source = config.source
    if source.table is None and source.hub is None:
        raise UserError(
            f"source.name = {source.name!r} needs source.table, a local file or folder (see docs/data.md): nothing is "
            "fetched from a hub for it."
        )
    folder = Folder(Path(config.output).absolute(), config.fetch.worker)
    plan_path = folder.plan / "plan.json"
    if not plan_path.exists():
        source = pin(source)
    elif source.hub and source.table is None and source.hub == (made := load_plan(folder).settings["source"])["hub"]:
        # At the revision that the plan pinned, unless it is pinned itself: a branch may have moved since.
        is_pinned = source.revision is not None and len(source.revision) == 40
        source = replace(source, revision=source.revision if is_pinned else made["revision"], table=made["table"])
    config = replace(config, source=source, output=str(folder.root))
    several = config.fetch.workers > 1
    with folder.made(), part_lock(folder, "plan", seconds=math.inf if several else 0):
        is_new = not plan_path.exists()
        if is_new:
            check_source(config, on_note=on_note)
        plan = make_plan(folder, source, config.subset, shard_size=config.fetch.shard_size, rules=rules_of(config))
        if not is_new and not check_unchanged(source, plan.files):
            on_note(f"source.table = {source.table!r} is gone: continuing with the list in {folder.plan}.")
    if is_new and plan.skipped:
        on_note(
            f"{plan.skipped:,} of {plan.seen:,} rows cannot be read (a wrong number of fields, or text that is not "
            "UTF-8) and were left out."
        )
    return config, plan


def check_source(config: DownloadConfig, *, on_note: Callable[[str], None]) -> None:
    """Check a resolved source: its files, its number of rows, and that its first thousand rows have URLs.

    Raises:
        UserError: Something is wrong; the message says what, and what would be right.
    """
    source = config.source
    if (known := metadata_tables.count_known(source)) is not None:
        check_rows(source, known)
    unreadable: list[int] = []
    batches = metadata_tables.read(source, on_skipped=unreadable.append)
    rows = list(itertools.islice(itertools.chain.from_iterable(b.to_pylist() for b in batches), _CHECKED_ROWS))
    if not rows:
        why = f"has {sum(unreadable):,} rows, none of which can be read" if unreadable else "has no rows"
        raise UserError(
            f"source.table = {source.table!r} {why}: each must have the right number of fields, and UTF-8 text in the "
            f"columns {', '.join(columns_of(source))}."
        )
    shares = {name: sum(bool(URL.match(str(row[name]))) for row in rows) / len(rows) for name in rows[0]}
    if shares[source.url] < 0.5:
        better = next((name for name, share in shares.items() if share >= 0.5), None)
        hint = f"Column {better!r} does: set source.url={better}." if better else "None of the columns read does."
        raise UserError(
            f"Column {source.url!r} does not hold URLs: {shares[source.url]:.0%} of its first {len(rows):,} values "
            f"look like one, for example {str(rows[0][source.url])[:80]!r}. {hint}"
        )
    if not config.guard.contact:
        on_note("No guard.contact is set: the owners of servers cannot reach you. Give a page or an e-mail address.")
    if source.hub and source.revision:
        on_note(f"{source.hub} is read at revision {source.revision}.")

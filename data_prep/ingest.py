"""`neuclip download`: from a table of URLs to webdataset shards and a manifest, resumable and repeatable."""

from __future__ import annotations

import fcntl
import importlib.metadata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_prep.dataset.dataset_folder import Folder, ShardRecord, tar_name, total_failures
from data_prep.dataset.journal import Journal
from data_prep.dataset.shard_plan import Plan, load_plan, make_plan
from data_prep.download_config import DownloadConfig
from data_prep.fetching.monitor import ALLOW_HINT
from data_prep.fetching.supervisor import Progress, fetch
from data_prep.reasons import REFUSED_ADDRESS, is_transient
from data_prep.sources import hash_check, table_checks
from data_prep.sources.hub import pin
from data_prep.sources.source import SourceConfig, resolve
from pipeline.config import dump, parse, read_yaml, to_tree
from pipeline.data.shards.manifest_format import Manifest, make_manifest
from pipeline.errors import UserError
from pipeline.files import write_text

__all__ = ["DownloadConfig", "PartDone", "download", "load_config", "prepare", "write_manifest"]

# What decides over the bytes of a shard; recorded in the manifest.
_TOOLS = ("img2dataset", "opencv-python-headless", "albumentations", "pyarrow")


class PartDone(UserError):
    """One of several workers has fetched its part, and others have not yet."""


def download(
    config: DownloadConfig,
    *,
    retry_failed: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    on_note: Callable[[str], None] = lambda note: None,
) -> Manifest:
    """Fetch what is missing and write the manifest.

    A run that was stopped, however, continues where it was and ends with the manifest of an undisturbed one.
    Args: retry_failed: ask again for the rows that failed for a passing reason, and only for those.
      on_progress: called a few times a second. on_note: called with one line for each thing a person should know.
    Raises: UserError before the first URL when the settings, the table or its columns are wrong; Paused when
      success collapses; PartDone when only the shards of other workers are left.
    """
    table_checks.check_distributor(config.fetch)
    config, plan = prepare(config, on_note=on_note)
    folder = Folder(Path(config.output), config.fetch.worker)
    with _alone(folder, config.fetch.worker), Journal(folder, config.fetch) as journal:

        def show(progress: Progress) -> None:
            journal.beat()
            on_progress(progress)

        write_text(folder.config, dump(config))
        if retry_failed:
            _retry(config, folder, plan, show)
        mine = range(config.fetch.worker, plan.shards, config.fetch.workers)
        finished = set(folder.finished())
        missing = tuple(shard for shard in mine if shard not in finished)
        if missing:
            total = sum(plan.rows_of(shard) for shard in missing)
            fetch(config, missing, total=total, on_progress=show)
        left = plan.shards - len(folder.finished())
        if left:
            raise PartDone(
                f"This worker's part is done; {left:,} of {plan.shards:,} shards are still with the other "
                f"{config.fetch.workers - 1}. The one that ends last writes the manifest."
            )
        with _alone(folder, "manifest", wait=True):
            return write_manifest(config, folder, plan)


def prepare(
    config: DownloadConfig, *, on_note: Callable[[str], None] = lambda note: None
) -> tuple[DownloadConfig, Plan]:
    """Check the settings and the source, probe a few URLs where hashes are verified, and lay out the plan.

    Returns: the resolved config, the plan. Raises: UserError.
    """
    source = resolve(config.source)
    plan_path = Folder(Path(config.output)).plan / "plan.json"
    if plan_path.exists():
        source = _as_planned(source, load_plan(Folder(Path(config.output))))
    else:
        source = pin(source)
    config = replace(config, source=source, output=str(Path(config.output).absolute()))
    table_checks.check_blur(config)
    folder = Folder(Path(config.output), config.fetch.worker)
    folder.make()
    with _alone(folder, "plan", wait=config.fetch.workers > 1):
        is_new = not (folder.plan / "plan.json").exists()
        if is_new:
            for note in [*table_checks.check_source(config), *hash_check.check_hashes(config)]:
                on_note(note)
        plan = make_plan(folder, source, config.subset, shard_size=config.fetch.shard_size)
    if is_new and plan.skipped:
        on_note(f"{plan.skipped:,} of {plan.seen:,} lines have a wrong number of fields and were left out.")
    return config, plan


def _as_planned(source: SourceConfig, plan: Plan) -> SourceConfig:
    """What was not pinned then and is not now is what the plan was made from: a branch may have moved since."""
    made = plan.settings["source"]
    if source.hub and source.hub == made["hub"] and source.table is None:
        moving = source.revision is None or len(source.revision) != 40
        return replace(source, revision=made["revision"] if moving else source.revision, table=made["table"])
    return source


def load_config(root: str | Path) -> DownloadConfig:
    """The settings that a data set was made with. Raises: UserError when it was not made by `neuclip download`."""
    folder = Folder(Path(root).absolute())
    if not folder.config.exists():
        raise UserError(f"{root} has no {folder.config.name}: it was not made by `neuclip download`.")
    return replace(parse(DownloadConfig, read_yaml(folder.config)), output=str(folder.root))


def write_manifest(config: DownloadConfig, folder: Folder, plan: Plan) -> Manifest:
    """The manifest of all finished shards, written into the folder.

    Raises: UserError when no URL gave a sample, or a record belongs to another URL list.
    """
    records = [folder.read_record(shard) for shard in folder.finished()]
    foreign = [record.shard for record in records if record.plan != plan.digest]
    if foreign:
        raise UserError(f"Shards {foreign[:5]} in {folder.root} were made from another URL list: remove them.")
    failures = total_failures(records)
    rows = [(tar_name(r.shard), r.samples, r.bytes, r.sha256) for r in records if r.samples]
    if not rows:
        named = ", ".join(f"{reason}: {count:,}" for reason, count in failures.most_common())
        hint = f" Note that {ALLOW_HINT}." if failures[REFUSED_ADDRESS] else ""
        raise UserError(f"None of {plan.rows:,} URLs gave a sample ({named}): there is nothing to train on.{hint}")
    manifest = make_manifest(rows, root=folder.root, failures=dict(failures), facts=_facts(config, plan))
    manifest.save(folder.root)
    return manifest


def _facts(config: DownloadConfig, plan: Plan) -> dict[str, Any]:
    """What the shards came from. No dates, durations or machine names: the same inputs give the same manifest."""
    source = {k: v for k, v in to_tree(config.source).items() if v not in (None, [], {})}
    return {
        "source": source,
        "source_rows": plan.seen,
        **({"source_rows_skipped": plan.skipped} if plan.skipped else {}),
        "subset": to_tree(config.subset),
        "urls": plan.rows,
        "urls_digest": plan.digest,
        "image": to_tree(config.image),
        "guard": to_tree(config.guard),
        "tools": {name: importlib.metadata.version(name) for name in _TOOLS},
    }


def _retry(config: DownloadConfig, folder: Folder, plan: Plan, on_progress: Callable[[Progress], None]) -> None:
    mine = range(config.fetch.worker, plan.shards, config.fetch.workers)
    records = [folder.read_record(shard) for shard in folder.finished() if shard in mine]
    passing = {record.shard: count for record in records if (count := _passing(record))}
    if passing:
        fetch(config, tuple(passing), total=sum(passing.values()), retry=True, on_progress=on_progress)


def _passing(record: ShardRecord) -> int:
    return sum(count for reason, count in record.failures.items() if is_transient(reason))


@contextmanager
def _alone(folder: Folder, part: int | str, *, wait: bool = False) -> Iterator[None]:
    """Hold the folder's lock for one part of the work. Raises: UserError when another process has it."""
    with (folder.locks / f"lock-{part}").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            raise UserError(f"Another download is working in {folder.root}: wait for it, or stop it.") from error
        yield

"""`neuclip download`: from a table of URLs to webdataset shards and a manifest, resumable and repeatable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from data_prep.dataset.dataset_folder import Folder, ShardRecord
from data_prep.dataset.journal import Journal
from data_prep.dataset.locks import alone
from data_prep.dataset.manifest_writer import write_manifest
from data_prep.dataset.shard_plan import Plan, load_plan, make_plan
from data_prep.fetching import hash_check
from data_prep.fetching.supervisor import Progress, fetch
from data_prep.reasons import is_transient
from data_prep.settings.download_config import DownloadConfig
from data_prep.settings.source_config import SourceConfig, resolve
from data_prep.sources import table_checks
from data_prep.sources.hub import pin
from pipeline.config import dump
from pipeline.data.shards.manifest_format import Manifest
from pipeline.errors import UserError
from pipeline.files import write_text


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
    with alone(folder, config.fetch.worker), Journal(folder, config.fetch) as journal:

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
        with alone(folder, "manifest", wait=True):
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
    with alone(folder, "plan", wait=config.fetch.workers > 1):
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


def _retry(config: DownloadConfig, folder: Folder, plan: Plan, on_progress: Callable[[Progress], None]) -> None:
    mine = range(config.fetch.worker, plan.shards, config.fetch.workers)
    records = [folder.read_record(shard) for shard in folder.finished() if shard in mine]
    passing = {record.shard: count for record in records if (count := _passing(record))}
    if passing:
        fetch(config, tuple(passing), total=sum(passing.values()), retry=True, on_progress=on_progress)


def _passing(record: ShardRecord) -> int:
    return sum(count for reason, count in record.failures.items() if is_transient(reason))

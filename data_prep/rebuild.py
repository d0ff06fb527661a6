"""`neuclip verify --rebuild`: restore damaged files of a data set, and fetch only samples that are lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from data_prep.dataset.dataset_folder import Folder, load_config
from data_prep.dataset.manifest_writer import check_recorded, rules_of, write_manifest
from data_prep.dataset.removal import finish_removal
from data_prep.dataset.sessions import exclusive_lock, read_sessions
from data_prep.dataset.shard_commit import recover
from data_prep.dataset.shard_plan import Plan, check_list, load_plan, make_plan
from data_prep.dataset.verification import Problem, changed_settings
from data_prep.fetching.supervisor import Progress, fetch, job_file
from data_prep.settings.download_config import DownloadConfig
from pipeline.data.shards.manifest_format import Manifest
from pipeline.errors import UserError
from pipeline.files import write_text

_SHOWN = 5


def rebuild(
    root: str | Path,
    problems: list[Problem],
    *,
    allow_addresses: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    on_note: Callable[[str], None] = lambda note: None,
) -> Manifest:
    """Repair the problems that `verify` found, and write the manifest.

    Intact samples are kept. Only the others are fetched again, and nothing is replaced until that is done. The web may
    serve other images by then; the new manifest describes the result.

    Args:
        root: The folder.
        problems: The problems found in it.
        allow_addresses: Whether to request what the folder's `download.yaml` exempts from the guard. Whoever made the
            data set wrote that file, so only the user may say so.
        on_progress: Called a few times a second.
        on_note: Called with a line that says what is kept, and what is written again.

    Raises:
        UserError: Its settings have exceptions to the guard that are not allowed; the folder was not made by `neuclip
            download`; a file in it is not one of its own; the URL list is damaged and its table has changed; or the
            settings have been changed.
    """
    config = load_config(root)
    # The settings were written by the last worker, and may name somebody else's cluster; here this machine does it all.
    here = replace(config.fetch, worker=0, workers=1, distributor="multiprocessing", master=None)
    config = replace(config, fetch=here)
    folder = Folder(Path(config.output))
    folder.make()
    with exclusive_lock(folder):
        plan = _repaired_plan(config, folder)
        check_recorded(folder, plan)
        _check_settings(config, folder, plan)
        recover(folder, range(plan.shards))
        shards = _shards_at_fault(folder, plan, problems)
        _repair_sessions(folder)
        if shards:
            _check_consent(config, allow_addresses=allow_addresses)
        for note in _notes(folder, shards):
            on_note(note)
        if shards:
            total = sum(plan.rows_of(shard) for shard in shards)
            fetch(config, shards, total=total, mode="rebuild", on_progress=on_progress)
        job_file(folder).unlink(missing_ok=True)
        finish_removal(folder)
        return write_manifest(folder, plan)


def _notes(folder: Folder, shards: tuple[int, ...]) -> Iterator[str]:
    """What is repeated of a rebuild that was interrupted, whose job is still there, and what is done now."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        job = json.loads(job_file(folder).read_bytes())
        before = set(job["shards"]) if job["mode"] == "rebuild" else set()
        done, left = len(before - set(shards)), len(before & set(shards))
        if before:
            yield f"A rebuild of {len(before):,} shards was interrupted; done and kept: {done:,}, repeated: {left:,}."
    if shards:
        names = ", ".join(folder.tar(shard).name for shard in shards[:_SHOWN]) + ", ..." * (len(shards) > _SHOWN)
        yield f"Written again: {names} ({len(shards):,} in all). Intact samples are kept, the others are fetched."


def _check_consent(config: DownloadConfig, *, allow_addresses: bool) -> None:
    guard = config.guard
    exceptions = [f"guard.allow_addresses={list(guard.allow_addresses)}"] if guard.allow_addresses else []
    exceptions += ["guard.trust_proxy=true"] if guard.trust_proxy else []
    if exceptions and not allow_addresses:
        raise UserError(
            f"{config.output}/download.yaml has {' and '.join(exceptions)}, so that its URLs may reach machines of "
            "your network. If you wrote it or trust whoever did, use --allow-addresses."
        )


def _check_settings(config: DownloadConfig, folder: Folder, plan: Plan) -> None:
    different = changed_settings(plan, config)
    if different:
        raise UserError(
            f"{folder.config} has been changed since the shards were made ({'; '.join(different)}). Run the same "
            "`neuclip download` again: it writes the file, and fetches nothing that is there."
        )


def _shards_at_fault(folder: Folder, plan: Plan, problems: list[Problem]) -> tuple[int, ...]:
    """The shards affected by the problems, and those without a record."""
    found = set(range(plan.shards)) - set(folder.finished())
    for problem in problems:
        path = folder.root / problem.shard
        if path.suffix != ".tar" and not (path.parent.name == "meta" and path.suffix in (".json", ".parquet")):
            continue
        number = int(path.stem) if path.stem.isdecimal() else plan.shards
        if number >= plan.shards or path not in (folder.tar(number), folder.meta(number), folder.record(number)):
            raise UserError(f"{problem.shard} is not one of this folder's shards: move it away by hand.")
        if path.is_dir():  # not our file: kept under another name
            path.rename(path.with_name(f"{path.name}.aside"))
        found.add(number)
    return tuple(sorted(found))


def _repaired_plan(config: DownloadConfig, folder: Folder) -> Plan:
    """The plan, rebuilt from its table if it is damaged."""
    try:
        plan = load_plan(folder)
        check_list(folder, plan)
        return plan
    except UserError:
        scratch = Folder(folder.staging / "plan-anew")
    shutil.rmtree(scratch.root, ignore_errors=True)
    scratch.make()
    plan = make_plan(scratch, config.source, config.subset, shard_size=config.fetch.shard_size, rules=rules_of(config))
    _check_same_list(folder, plan)
    for path in folder.plan.glob("*"):
        path.unlink()
    for path in sorted(scratch.plan.iterdir(), key=lambda path: path.name == "plan.json"):  # that one last
        path.rename(folder.plan / path.name)
    shutil.rmtree(scratch.root, ignore_errors=True)
    return plan


def _check_same_list(folder: Folder, plan: Plan) -> None:
    for shard in folder.finished():
        try:
            digest = folder.read_record(shard).plan
        except UserError:
            continue
        if digest != plan.digest:
            raise UserError(
                f"The URL list in {folder.plan} is damaged, and its source does not give the same list any more. "
                "Restore the table that it was made from, and run the same command again."
            )


def _repair_sessions(folder: Folder) -> None:
    """Keep the readable lines, and a copy of the original file next to them."""
    sessions, damaged = read_sessions(folder)
    if damaged:
        shutil.copyfile(folder.sessions, folder.sessions.with_suffix(".damaged"))
        write_text(folder.sessions, "".join(json.dumps(session) + "\n" for session in sessions))

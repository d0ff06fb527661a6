"""Fetch the evaluation sets from the hub or a local mirror, with every digest and count verified.

What was fetched is written to `evalsets.json` beside the sets: repository, commit, size and SHA-256 of every file.
Later runs use the same commits, fetch only what is missing or damaged, and `check` needs no network at all.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from data_prep.dataset.canonical_tar import sha256_of
from data_prep.evalsets.hub_sets import HUB_SETS, HubSet
from data_prep.sources.hub import in_a_line
from pipeline.config import suggest
from pipeline.errors import UserError
from pipeline.files import replacing, write_json

LOCK_NAME = "evalsets.json"
Lock = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class PublishedSet:
    """Where sets come from: a folder that holds them under their folder names, or the hub (or a mirror of it)."""

    mirror: Path | None = None
    endpoint: str | None = None


@dataclass
class MirrorOutcome:
    """What became of each set: `good` with their number of samples, `problems` with what is wrong, by key."""

    good: dict[str, int] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


def fetch_evalsets(
    root: str | Path,
    keys: Iterable[str] = (),
    *,
    source: PublishedSet = PublishedSet(),
    on_note: Callable[[str], None] = lambda note: None,
) -> MirrorOutcome:
    """Bring the sets of `keys` (default: all 38) below `root` and verify them; one bad set does not stop the others.

    Raises: UserError for an unknown key or a mirror that is not there.
    """
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    if source.mirror is not None and not source.mirror.is_dir():
        raise UserError(f"The mirror {source.mirror} is not a folder.")
    lock, outcome = read_lock(root), MirrorOutcome()
    mirrored = read_lock(source.mirror) if source.mirror else {}
    for chosen in choose(keys):
        try:
            if source.mirror is not None:
                entry = _from_mirror(chosen, root, source.mirror, mirrored.get(chosen.key))
            else:
                entry = _from_hub(chosen, root, source.endpoint, lock.get(chosen.key))
            outcome.good[chosen.key] = entry["samples"] = count(chosen, root / chosen.folder)
            lock[chosen.key] = entry
            write_json(root / LOCK_NAME, lock)
        except (UserError, OSError, ValueError, tarfile.TarError) as error:
            outcome.problems[chosen.key] = str(error)
        on_note(f"{chosen.key}: {outcome.problems.get(chosen.key) or 'verified'}")
    return outcome


def check_evalsets(root: str | Path, keys: Iterable[str] = ()) -> MirrorOutcome:
    """Verify sets that were fetched before against `evalsets.json`, without network."""
    root = Path(root)
    lock, outcome = read_lock(root), MirrorOutcome()
    for chosen in choose(keys):
        if chosen.key not in lock:
            outcome.problems[chosen.key] = "was never fetched"
            continue
        wrong = _differing(root / chosen.folder, lock[chosen.key]["files"])
        if wrong:
            outcome.problems[chosen.key] = f"{', '.join(wrong[:3])} differ from what was fetched"
            continue
        try:
            outcome.good[chosen.key] = count(chosen, root / chosen.folder)
        except (UserError, OSError, ValueError, tarfile.TarError) as error:
            outcome.problems[chosen.key] = str(error)
    return outcome


def choose(keys: Iterable[str]) -> list[HubSet]:
    """The sets of these keys, or all. Raises: UserError naming the nearest key."""
    keys = list(keys) or list(HUB_SETS)
    for key in keys:
        if key not in HUB_SETS:
            raise UserError(f"There is no evaluation set {key!r}. {suggest(key, tuple(HUB_SETS))}")
    return [HUB_SETS[key] for key in keys]


def read_lock(root: Path) -> Lock:
    """What was fetched into a folder before."""
    path = root / LOCK_NAME
    lock: Lock = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return lock


def count(chosen: HubSet, folder: Path) -> int:
    """The samples that a set really holds. Raises: UserError when these or its classes are not the official number."""
    counting = {"classification": _count_tars, "retrieval": _count_parquet, "association": _count_csv}
    found = counting[chosen.task.protocol](folder)
    if found != chosen.task.samples:
        raise UserError(f"{folder.name} holds {found:,} samples, but the benchmark has {chosen.task.samples:,}.")
    if chosen.task.classes is not None:
        # A blank line is a class with an empty name (CLEVR Distance has one): only the last line's end is dropped.
        names = (folder / "classnames.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n")
        if len(names) != chosen.task.classes:
            raise UserError(f"{folder.name} names {len(names)} classes, but the benchmark has {chosen.task.classes}.")
    return found


def _count_tars(folder: Path) -> int:
    shards = int((folder / "test" / "nshards.txt").read_text())
    total = 0
    for shard in range(shards):
        with tarfile.open(folder / "test" / f"{shard}.tar", "r:") as archive:
            total += sum(member.name.endswith(".cls") for member in archive)
    return total


def _count_parquet(folder: Path) -> int:
    import pyarrow.parquet as pq

    return sum(pq.ParquetFile(path).metadata.num_rows for path in sorted(folder.rglob("*.parquet")))


def _count_csv(folder: Path) -> int:
    import pandas as pd

    return sum(len(pd.read_csv(path)) for path in sorted(folder.rglob("*.csv")))


def _from_mirror(chosen: HubSet, root: Path, mirror: Path, known: dict[str, Any] | None) -> dict[str, Any]:
    origin = mirror / chosen.folder
    if not origin.is_dir():
        raise UserError(f"The mirror has no folder {chosen.folder}.")
    names = sorted(str(path.relative_to(origin)) for path in origin.rglob("*") if path.is_file())
    files = _wanted(chosen, names)
    if known is not None:
        wrong = _differing(origin, known["files"])
        if wrong:
            raise UserError(f"The mirror's {', '.join(wrong[:3])} differ from its own {LOCK_NAME}.")
    target = root / chosen.folder
    digests = {}
    for name in files:
        digests[name] = {"bytes": (origin / name).stat().st_size, "sha256": sha256_of(origin / name)}
        if _differing(target, {name: digests[name]}):
            _copy(origin / name, target / name)
    wrong = _differing(target, digests)
    if wrong:
        raise UserError(f"{', '.join(wrong[:3])} were not copied faithfully: is the disk full or failing?")
    facts = known or {"repo": f"mirror {mirror}", "commit": None}
    return {"repo": facts["repo"], "commit": facts["commit"], "files": digests}


def _copy(origin: Path, target: Path) -> None:
    with replacing(target, unique=False) as temporary:
        shutil.copyfile(origin, temporary)


def _from_hub(chosen: HubSet, root: Path, endpoint: str | None, known: dict[str, Any] | None) -> dict[str, Any]:
    from huggingface_hub import HfApi, snapshot_download

    api = HfApi(endpoint=endpoint)
    pinned = known["commit"] if known and known["repo"] == chosen.repo else None
    try:
        commit = pinned or api.repo_info(chosen.repo, repo_type="dataset", revision=chosen.revision).sha
        tree = api.list_repo_tree(chosen.repo, recursive=True, revision=commit, repo_type="dataset")
        published = {item.path: item for item in tree if hasattr(item, "size")}
        names = _wanted(chosen, list(published))
        target = root / chosen.folder
        # The hub's client trusts what lies there already: what is damaged has to go first.
        for name in names:
            if (target / name).exists() and not _is_published(target / name, published[name]):
                (target / name).unlink()
        snapshot_download(
            chosen.repo,
            repo_type="dataset",
            revision=commit,
            allow_patterns=names,
            local_dir=target,
            endpoint=endpoint,
        )
    except UserError:
        raise
    except Exception as error:  # the hub's client raises its own kinds, and those of what it talks through
        raise UserError(f"{chosen.repo} cannot be fetched: {in_a_line(error)}") from error
    wrong = [name for name in names if not _is_published(target / name, published[name])]
    if wrong:
        raise UserError(f"{', '.join(wrong[:3])} of {chosen.repo} came with a wrong digest: try again.")
    files = {n: {"bytes": (target / n).stat().st_size, "sha256": sha256_of(target / n)} for n in names}
    return {"repo": chosen.repo, "commit": commit, "files": files}


def _wanted(chosen: HubSet, names: list[str]) -> list[str]:
    found = sorted(n for n in names if any(fnmatch(n, p) for p in chosen.patterns) and not n.startswith("."))
    if not found:
        raise UserError(f"{chosen.folder} has none of the files {', '.join(chosen.patterns)}.")
    return found


def _is_published(path: Path, published: Any) -> bool:
    """Whether a file has the size and the digest that the hub states: SHA-256 of large files, git's of small ones."""
    if not path.exists() or path.stat().st_size != published.size:
        return False
    if published.lfs is not None:
        return sha256_of(path) == published.lfs.sha256
    body = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest() == published.blob_id


def _differing(folder: Path, files: dict[str, dict[str, Any]]) -> list[str]:
    def differs(name: str, facts: dict[str, Any]) -> bool:
        path = folder / name
        return not path.exists() or path.stat().st_size != facts["bytes"] or sha256_of(path) != facts["sha256"]

    return [name for name, facts in files.items() if differs(name, facts)]

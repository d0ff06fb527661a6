"""`neuclip verify --rebuild`: fetch damaged shards again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from data_prep.dataset.dataset_folder import Folder, load_config
from data_prep.dataset.shard_plan import load_plan
from data_prep.dataset.verification import Problem
from data_prep.ingest import download
from pipeline.data.shards.manifest_format import Manifest
from pipeline.errors import UserError


def rebuild(root: str | Path, problems: list[Problem]) -> Manifest:
    """Fetch anew just the shards that have a problem, and write the manifest.

    What the web serves may have changed meanwhile: the new manifest says what is there now.
    Raises: UserError when the folder was not made by `neuclip download`.
    """
    config = load_config(root)
    # The settings are those of the worker that wrote them last; all shards at fault are fetched here.
    config = replace(config, fetch=replace(config.fetch, worker=0, workers=1))
    folder = Folder(Path(config.output))
    plan = load_plan(folder)
    for name in sorted({problem.shard for problem in problems}):
        stem = Path(name).stem
        if not stem.isdigit() or int(stem) >= plan.shards or folder.tar(int(stem)) != folder.root / name:
            raise UserError(f"{name} is not one of this folder's shards: move it away by hand.")
        folder.withdraw(int(stem))
    return download(config)

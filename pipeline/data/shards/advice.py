"""Which command turns data without a manifest into shards that training reads."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from pipeline.data.shards.tar_reader import FORMAT_SUFFIXES
from pipeline.run_files import RUN_CONFIG_NAME

TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".arrow", ".json")
IMAGES = tuple(f".{suffix}" for suffix in FORMAT_SUFFIXES)
_LOOKED_AT = 10_000  # files: a folder of millions need not be walked to the end for a hint


def advice(path: Path) -> str:
    """The command for what is at `path` (a folder, a file, or the manifest that is missing in a folder)."""
    folder = path.parent if path.name == "manifest.json" else path
    suffixes, quoted = _suffixes(folder), shlex.quote(str(folder))
    if path.name == "manifest.json" and (folder / "download.yaml").is_file():
        if path.is_file():
            return "It is damaged: the same `neuclip download` writes it again."
        return "The download is not finished: run the same `neuclip download` again, which continues."
    if path.name == "manifest.json" and path.is_file():
        return "It is damaged: restore it, or write another with `neuclip manifest --replace`."
    if path.suffix == ".tar" and path.is_file():
        return f"It is a shard: give its folder, after `neuclip manifest {shlex.quote(str(path.parent))}`."
    if (folder / RUN_CONFIG_NAME).is_file():
        return f"It is the folder of a run: `neuclip doctor {quoted}` checks a run. Give the folder of its data."
    if ".tar" in suffixes:
        return (
            f"`neuclip manifest {quoted}` writes one for the webdataset shards there, and they stay as they are; "
            f"`neuclip pairs {quoted} --output FOLDER` makes new shards of them."
        )
    if suffixes & {*TABLES, *IMAGES}:
        return (
            f"`neuclip pairs {quoted} --output FOLDER` turns the image-text pairs there into shards; then train with "
            "data.sources=FOLDER. (Tables of URLs: `neuclip download`.)"
        )
    text = "There is no such file or folder." if not folder.exists() else "Nothing there looks like image-text pairs."
    return (
        f"{text} `neuclip pairs SOURCE --output FOLDER` makes shards of your own pairs, `neuclip download` of a table "
        "of URLs, and `neuclip manifest FOLDER` takes webdataset shards as they are."
    )


def _suffixes(path: Path) -> set[str]:
    """The suffixes of a file, or of the files below a folder."""
    if path.is_file():
        return {path.suffix.lower()}
    suffixes, count = set[str](), 0
    for _, below, files in os.walk(path):
        below.sort()
        suffixes |= {os.path.splitext(name)[1].lower() for name in files}
        count += len(files)
        if count > _LOOKED_AT:
            break
    return suffixes

"""`neuclip verify`: check shards against their manifest, rebuild damaged ones, find duplicates, remove samples."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from data_prep.dataset.bookkeeping import Problem
    from pipeline.data.shards.manifest_format import Manifest

EXIT_PROBLEMS = 1


@click.command()
@click.argument("folder", type=click.Path(file_okay=False))
@click.option("--decode", default=16, show_default=True, type=click.IntRange(min=0), help="Images to decode per shard.")
@click.option("--rebuild", is_flag=True, help="Repair damaged files, and fetch lost samples again.")
@click.option(
    "--duplicates", type=click.Path(dir_okay=False), help="Find duplicates; list all but the first in this file."
)
@click.option(
    "--overlap",
    nargs=2,
    type=click.Path(),
    metavar="SUITE FILE",
    help="Find samples that look like an image of the evaluation sets in SUITE; write their keys to FILE.",
)
@click.option("--remove", type=click.Path(dir_okay=False), help="Remove the uids, URLs, hashes or keys in this file.")
def command(
    folder: str,
    decode: int,
    rebuild: bool,
    duplicates: str | None,
    overlap: tuple[str, str] | None,
    remove: str | None,
) -> int:
    """Check the shards in FOLDER against the manifest; exits with 1 if there is a problem.

    With --duplicates, --overlap or --remove, only that is done. The first two write lists of keys, one per line, which
    --remove accepts.
    """
    from data_prep.dataset.disk_errors import disk_errors_explained

    with disk_errors_explained(folder):
        if remove:
            _remove(folder, Path(remove))
            return 0
        if duplicates:
            _duplicates(folder, _writable(duplicates))
            return 0
        if overlap:
            _overlap(folder, overlap[0], _writable(overlap[1]))
            return 0
        return _check(folder, decode, rebuild=rebuild)


def _check(folder: str, decode: int, *, rebuild: bool) -> int:
    from data_prep.dataset import verification
    from data_prep.dataset.dataset_folder import Folder

    verdict = verification.inspect(folder, decode=decode)
    problems, manifest = verdict.problems, verdict.manifest
    for problem in problems:
        click.echo(str(problem))
    if not problems and manifest is not None:
        size = f"{len(manifest.shards):,} shards, {manifest.n:,} samples, {manifest.bytes / 1e6:,.1f} MB"
        click.echo(f"{size}: everything matches.")
        return 0
    shards = len({problem.shard for problem in problems if problem.shard.endswith(".tar")})
    others = len({problem.shard for problem in problems}) - shards
    total = f" of {len(manifest.shards):,}" if manifest else ""
    named = [f"{shards:,}{total} shards" if shards else "", f"{others:,} other file(s)" if others else ""]
    click.echo(f"There is a problem with {' and '.join(filter(None, named))}.")
    if rebuild:
        _rebuild(folder, problems, manifest)
        return 0
    click.echo(
        "`neuclip verify --rebuild` repairs them and fetches only what is lost."
        if Folder(Path(folder)).config.exists()
        else "Copy them again from their source; if their contents change, run `neuclip manifest --replace`."
    )
    return EXIT_PROBLEMS


def _rebuild(folder: str, problems: list[Problem], before: Manifest | None) -> None:
    from data_prep.dataset.ingest_report import write_report
    from data_prep.rebuild import rebuild

    again = rebuild(folder, problems)
    write_report(folder)
    if before is None:
        click.echo(f"Repaired; {again.n:,} samples.")
        return
    is_same = again.digest == before.digest
    same = (
        "bit-identical to the original"
        if is_same
        else "with changes: servers answered differently, or a removal was finished"
    )
    click.echo(f"Repaired, {same}; {again.n:,} samples now, {before.n:,} before.")


def _writable(path: str) -> Path:
    """The path of a list, checked before the hour-long work that produces the list."""
    from pipeline.errors import UserError

    if not Path(path).absolute().parent.is_dir():
        raise UserError(f"Cannot write {path}: its folder does not exist. Create it, or name another file.")
    if Path(path).is_dir():
        raise UserError(f"Cannot write {path}: it is a folder. Name a file for the list of keys.")
    return Path(path)


def _duplicates(folder: str, output: Path) -> None:
    from data_prep.dataset.duplicates import find_duplicates

    undecodable: list[str] = []
    found = find_duplicates(folder, on_undecodable=undecodable.append)
    surplus = found.surplus()
    output.write_text("".join(f"{key}\n" for key in surplus), encoding="utf-8")
    for kind, groups in (("exact", found.exact), ("near", found.near)):
        samples = sum(map(len, groups))
        shown = "; ".join(" = ".join(group[:4]) for group in groups[:5])
        click.echo(
            f"{len(groups):,} groups of {kind} duplicates with {samples:,} samples{': ' + shown if shown else ''}"
        )
    _report_undecodable(undecodable)
    click.echo(f"All but the first of each group, {len(surplus):,} keys, are in {output}: check them, then --remove.")


def _overlap(folder: str, suite: str, output: Path) -> None:
    from collections import Counter

    from data_prep.dataset.duplicates import find_overlap

    undecodable: list[str] = []
    found = find_overlap(folder, suite, on_undecodable=undecodable.append)
    output.write_text("".join(f"{key}\n" for key in found), encoding="utf-8")
    for name, count in Counter(found.values()).most_common():
        click.echo(f"  {name:<48}{count:>8,}")
    _report_undecodable(undecodable)
    click.echo(
        f"{len(found):,} samples look like an evaluation image; their keys are in {output}: check, then --remove."
    )


def _report_undecodable(names: list[str]) -> None:
    if names:
        click.echo(f"{len(names):,} images cannot be decoded and were not compared: {', '.join(names[:5])}")


def _remove(folder: str, names: Path) -> None:
    from data_prep.dataset.dataset_folder import read_lines
    from data_prep.dataset.ingest_report import write_report
    from data_prep.dataset.removal import remove
    from pipeline.errors import UserError

    try:
        names.stat()
        listed = set(read_lines(names))
    except OSError as error:
        raise UserError(f"Cannot read the removal list {names}: {error.strerror}.") from error
    done, manifest = remove(folder, listed)
    click.echo(
        f"{done.found:,} of {done.asked:,} names found, {done.samples:,} samples removed from {done.shards:,} shards."
    )
    if manifest is None:
        click.echo("The download is not finished: `neuclip download` will skip them, too, and write the manifest.")
        return
    write_report(folder)
    click.echo(
        f"{manifest.n:,} samples are left. The manifest has changed: runs on the old one cannot be resumed on it."
    )


if __name__ == "__main__":
    from jobs.cli import run

    run(command, prog_name="python -m jobs.verify")

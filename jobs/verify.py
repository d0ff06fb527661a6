"""`neuclip verify`: check shards against their manifest, delete damaged ones, find duplicates, remove samples."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path

import click

from jobs.plan import contents, counted

EXIT_PROBLEMS = 1
_SHOWN = 20


@click.command(name="verify")
@click.argument("folder", type=click.Path(file_okay=False))
@click.option("--decode", default=16, show_default=True, type=click.IntRange(min=0), help="Images to decode per shard.")
@click.option(
    "--allow-outside", is_flag=True, help="Read shards outside of FOLDER, too; with --remove, follow links out of it."
)
@click.option(
    "--delete-damaged",
    is_flag=True,
    help="Delete damaged shards of a download or of `neuclip pairs`; the same command as before makes them again.",
)
@click.option(
    "--duplicates", type=click.Path(dir_okay=False), help="Find duplicates; list all but the first in this file."
)
@click.option(
    "--overlap",
    nargs=2,
    type=click.Path(),
    metavar="SUITE FILE",
    help="Find samples that equal or look like an image of the evaluation sets in SUITE (a folder or tasks.yaml); "
    "write their keys to FILE.",
)
@click.option("--remove", type=click.Path(dir_okay=False), help="Remove the uids, URLs, hashes or keys in this file.")
def command(
    folder: str,
    decode: int,
    allow_outside: bool,
    delete_damaged: bool,
    duplicates: str | None,
    overlap: tuple[str, str] | None,
    remove: str | None,
) -> int:
    """Check the shards in FOLDER against the manifest; exits with 1 if there is a problem.

    With --duplicates, --overlap or --remove, only that is done. The first two write lists of keys, one per line, which
    --remove accepts.
    """
    from data_prep.dataset import verification
    from data_prep.dataset.dataset_folder import Folder
    from data_prep.dataset.manifest_writer import local_manifest
    from pipeline.files import check_writable

    if remove:
        return _remove(folder, remove, allow_outside=allow_outside)
    if duplicates:
        return _duplicates(folder, check_writable(duplicates), allow_outside=allow_outside)
    if overlap:
        return _overlap(folder, overlap[0], check_writable(overlap[1]), allow_outside=allow_outside)
    problems = verification.verify(folder, decode=decode, allow_outside=allow_outside)
    for problem in problems:
        click.echo(str(problem))
    if not problems:
        manifest = local_manifest(folder, allow_outside=allow_outside)
        click.echo(f"{contents(manifest)}: everything matches.")
        return 0
    files = len({problem.shard for problem in problems})
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in Counter(p.kind for p in problems).most_common())
    click.echo(f"There is a problem with {counted(files, 'file')} ({kinds}).")
    if delete_damaged:
        deleted = verification.delete_damaged(folder, problems)
        shown = ", ".join(deleted[:_SHOWN]) + (", ..." if len(deleted) > _SHOWN else "")
        click.echo(f"Deleted ({len(deleted):,}): {shown}. The command that made {folder} makes them again: run it now.")
    else:
        click.echo(Folder(Path(folder)).repair_hint)
    return EXIT_PROBLEMS


def _duplicates(folder: str, output: Path, *, allow_outside: bool) -> int:
    from data_prep.dataset.duplicates import RULE, find_duplicates

    undecodable: list[str] = []
    exact, near = find_duplicates(folder, allow_outside=allow_outside, on_undecodable=undecodable.append)
    surplus = sorted({*near, *(key for group in exact for key in group[1:])})
    output.write_text("".join(f"{key}\n" for key in surplus), encoding="utf-8")
    samples, shown = sum(map(len, exact)), "; ".join(" = ".join(group[:4]) for group in exact[:5])
    click.echo(f"{counted(len(exact), 'group')} of exact duplicates with {samples:,} samples{shown and ': ' + shown}")
    shown = "; ".join(f"{key} like {kept}" for key, kept in list(near.items())[:5])
    click.echo(f"{counted(len(near), 'near duplicate')} of an earlier sample ({RULE}){shown and ': ' + shown}")
    _report_undecodable(undecodable)
    click.echo(
        f"{output} lists what is surplus ({len(surplus):,}); captions were not compared. Check them, then remove "
        f"them: neuclip verify {shlex.quote(str(folder))} --remove {shlex.quote(str(output))}"
        if surplus
        else f"There is nothing to remove; {output} is empty."
    )
    return 0


def _overlap(folder: str, suite: str, output: Path, *, allow_outside: bool) -> int:
    from data_prep.dataset.duplicates import find_overlap

    undecodable, unread = list[str](), list[str]()
    overlap = find_overlap(
        folder, suite, allow_outside=allow_outside, on_undecodable=undecodable.append, on_unread=unread.append
    )
    output.write_text("".join(f"{key}\n" for key in overlap), encoding="utf-8")
    for name, count in Counter(overlap.values()).most_common():
        click.echo(f"  {name:<48}{count:>8,}")
    _report_undecodable(undecodable)
    click.echo(
        f"{len(overlap):,} samples look like an evaluation image; their keys are in {output}: check, then --remove."
    )
    for problem in unread:
        click.echo(problem, err=True)
    return EXIT_PROBLEMS if unread else 0


def _report_undecodable(names: list[str]) -> None:
    if names:
        click.echo(f"{len(names):,} images cannot be decoded and were not compared: {', '.join(names[:5])}")


def _remove(folder: str, names: str, *, allow_outside: bool) -> int:
    from data_prep.dataset.dataset_folder import REPORT_NAME, Folder, read_lines
    from data_prep.dataset.ingest_report import write_report
    from data_prep.dataset.removal import remove
    from pipeline.errors import UserError

    if not Path(names).exists():
        raise UserError(f"There is no removal list {names}: give a file with one uid, URL, hash or key a line.")
    listed = read_lines(Path(names))
    has_page = (Path(folder) / REPORT_NAME).exists() or Folder(Path(folder)).is_download
    done, manifest = remove(folder, listed, allow_outside=allow_outside)  # also finishes one that was interrupted
    if not listed:
        click.echo(f"{names} names nothing: nothing was removed.")
        return 0
    matched = len(listed) - len(done.missing)
    removed = f"{counted(done.samples, 'sample')} removed from {counted(done.shards, 'shard')}"
    click.echo(f"{matched:,} of {counted(len(listed), 'name')} found, {removed}.")
    if manifest is None:
        click.echo("The download is not finished: `neuclip download` will skip them, too, and write the manifest.")
    else:
        if has_page:
            write_report(folder)
        changed = " The manifest has changed: runs on the old one cannot be resumed on it." if done.samples else ""
        click.echo(f"{manifest.n:,} samples are left.{changed}")
    if not done.missing:
        return 0
    shown = ", ".join(map(repr, done.missing[:_SHOWN])) + (", ..." if len(done.missing) > _SHOWN else "")
    click.echo(f"{len(done.missing):,} names match no uid, URL, hash or key of {folder}: {shown}")
    return EXIT_PROBLEMS


if __name__ == "__main__":
    from jobs.cli import run

    run(command, prog_name="python -m jobs.verify")

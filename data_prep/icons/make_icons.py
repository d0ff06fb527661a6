"""`neuclip download --recipe icons`: shards with a manifest, a datasheet with the sets' licences, a held-out suite.

The icons are a source of `data_prep/pairs`: listed once with everything that is needed to render them, then rendered
shard by shard. The suite has the layout of the DataComp benchmark, which `neuclip evaluate` reads.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from data_prep import reasons
from data_prep.dataset.dataset_folder import Folder, read_meta
from data_prep.dataset.ingest_report import DATASHEET_NAME, template
from data_prep.evalsets.write_sets import SHARD_SIZE, write_retrieval, write_zeroshot
from data_prep.icons import icon_list
from data_prep.icons.icon_list import BLANK, HELD_OUT, NOT_RENDERED, TASKS, IconOptions, list_icons
from data_prep.icons.icon_package import PACKAGE, IconsConfig, SetFacts, package_folder, read_sets
from data_prep.pairs.listing import Listed, ListedSource, Listing, write_listing
from data_prep.pairs.make_shards import DROPPED_NAME, PairsConfig, make_shards
from data_prep.pairs.pair import Pair
from pipeline.data.shards.manifest_format import Manifest, make_manifest
from pipeline.errors import UserError
from pipeline.evaluation.datasets.task_data import FACTS_NAME, read_facts
from pipeline.files import write_json, write_text
from pipeline.pixels import read_rgb

SETS_NAME = "sets.json"
TEMPLATES = ("{c}", "{c} icon")
MEANINGS = {
    icon_list.LICENCE: "the set's licence is not in source.licences",
    icon_list.BRAND: "a set of logos, which are trademarks",
    icon_list.HIDDEN: "the set has withdrawn it",
    icon_list.NO_DRAWING: "the package has no drawing for it",
    icon_list.DUPLICATE: "the same drawing as an earlier icon",
    icon_list.NOT_RENDERED: "the renderer refused it",
    icon_list.BLANK: "one colour only, such as white on white or the start of an animation",
    reasons.NO_CAPTION: "its name has no letters",
    HELD_OUT: "in the evaluation suite, or too much like an icon in it",
}


@dataclass(frozen=True)
class IconsMade:
    """What `make_icons` made."""

    manifest: Manifest
    tasks: Mapping[str, Mapping[str, Any]]
    """Facts of the held-out tasks by key."""
    suite: Path


def make_icons(config: IconsConfig, *, on_rows: Callable[[int, int], None] = lambda done, total: None) -> IconsMade:
    """Make what is missing of the shards, the datasheet and the suite; `on_rows` is that of `make_shards`.

    Raises:
        UserError: The package cannot be had or is damaged, or the folder holds something else.
    """
    source = config.source
    options = IconOptions(source.version, source.licences, source.fraction, config.held_out, config.image.size)
    output = Path(config.output)
    pairs = PairsConfig(
        f"{PACKAGE}@{source.version}",
        output,
        options=options,
        opener=partial(open_icons, package=source.package),
        made_by="neuclip download --recipe icons",
        shard_size=config.fetch.shard_size,
        processes=config.fetch.processes,
    )
    made = make_shards(pairs, on_rows=on_rows)
    icons = cast(IconSource, made.source)
    suite = output.with_name(f"{output.name}-suite")  # beside the shards: every tar below their folder is one of them
    tasks = write_icon_suite(icons, suite)
    _write_datasheet(Folder(output), made.manifest, icons, tasks, suite)
    return IconsMade(made.manifest, tasks, suite)


def _write_datasheet(
    folder: Folder, manifest: Manifest, source: IconSource, tasks: Mapping[str, Any], suite: Path
) -> None:
    counts = _counts(folder)
    sets = [{"facts": facts, "samples": counts[prefix]} for prefix, facts in source.sets.items() if counts[prefix]]
    failures = sorted(manifest.failures.items(), key=lambda item: (-item[1], item[0]))
    facts = {
        "name": folder.root.absolute().name,
        "manifest": manifest,
        "source": manifest.facts["source"],
        "reasons": [(reason, count, MEANINGS.get(reason, "")) for reason, count in failures],
        "sets": sets,
        "licences": _licences(sets),
        "captions": _captions(source),
        "tasks": tasks,
        "suite": suite.name,
        "dropped": DROPPED_NAME,
    }
    write_text(folder.root / DATASHEET_NAME, template("icons.md.j2").render(facts), durable=True)


def _counts(folder: Folder) -> Counter[str]:
    """Samples by set."""
    counts: Counter[str] = Counter()
    for shard in folder.finished():
        table = read_meta(folder, shard, ["place", "status"]).to_pydict()
        rows = zip(table["place"], table["status"], strict=True)
        counts.update(place.partition(":")[0] for place, status in rows if status == "success")
    return counts


def _captions(source: IconSource) -> dict[str, float]:
    """How long and how frequent the captions of the icons to train on are."""
    times = Counter(row.captions[0] for row in source.listing.read(0, source.rows) if not row.problem)
    words = sum(len(caption.split()) * count for caption, count in times.items())
    once = sum(count == 1 for count in times.values())
    return {"distinct": len(times), "once": once / max(1, len(times)), "words": words / max(1, times.total())}


def _licences(sets: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    """Licence, number of sets and number of samples."""
    kinds, samples = Counter(one["facts"].licence for one in sets), Counter[str]()
    for one in sets:
        samples[one["facts"].licence] += one["samples"]
    return [(licence, kinds[licence], count) for licence, count in samples.most_common()]


@dataclass(frozen=True)
class IconSource(ListedSource):
    """The icons in the order of a hash of their names, so that every shard holds all styles."""

    sets: Mapping[str, SetFacts]

    def pair(self, row: Listed) -> Pair:
        """A listed icon with its picture, or why there is none."""
        about = self.sets[row.place.partition(":")[0]]
        try:
            picture = render(row.image, self.about["icon_size"])
        except ValueError as error:
            return Pair(row.place, problem=NOT_RENDERED, detail=str(error))
        if picture is None:
            return Pair(row.place, problem=BLANK)
        facts = {"set": about.name, "author": about.author, "author_url": about.author_url}
        facts |= {"licence": about.licence, "licence_url": about.licence_url}
        return Pair(row.place, picture, row.captions, about=facts)


def render(svg: str, size: int) -> bytes | None:
    """An icon as a PNG of `size` x `size` pixels on white; None if all pixels are equal.

    Raises:
        ValueError: It is not SVG that can be rendered.
    """
    import resvg_py

    png = resvg_py.svg_to_bytes(svg_string=svg, width=size, height=size, background="white", skip_system_fonts=True)
    picture = read_rgb(png)
    if not np.ptp(np.asarray(picture), axis=(0, 1)).any():
        return None
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def open_icons(
    source: str, options: IconOptions, *, listing: Path, stored: Listing | None, package: str | None
) -> IconSource:
    """List the icons of the package, or continue with the list of an interrupted run, which needs no package.

    Args:
        source: The package's name and version, for messages.
        options: Which icons, and how.
        listing: Where the list is stored.
        stored: The list, if it has been made.
        package: Local folder or archive; None fetches it.

    Raises:
        UserError: The package cannot be had or is damaged, or resvg-py is not installed.
    """
    try:
        renderer = importlib.metadata.version("resvg-py")
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(
            "Rendering icons needs resvg-py: pip install -c constraints.txt -e '.[icons]' in a copy of the repository, "
            "or pip install resvg-py."
        ) from error
    names = listing.with_name(SETS_NAME)
    if stored is None:
        with package_folder(package, options.version, scratch=listing.parent) as folder:
            sets = read_sets(folder)
            write_json(names, {one.prefix: asdict(one) for one in sets}, durable=True)
            stored = write_listing(listing, list_icons(folder, sets, options), root=folder, group_images=False)
    known = {prefix: SetFacts(**facts) for prefix, facts in json.loads(names.read_text(encoding="utf-8")).items()}
    about = {**asdict(options), "licences": list(options.licences), "renderer": f"resvg-py {renderer}"}
    return IconSource(stored, {"kind": "icons", "package": PACKAGE, **about}, known)


def write_icon_suite(source: IconSource, folder: Path) -> dict[str, dict[str, Any]]:
    """Write the tasks `icons/...`; nothing is written if the folder has those of the same icons.

    Retrieval tasks have a `manifest.json`, too: `validation.sources` can name their folders. `suite.json` is written
    last. It has the counts and digests that every evaluation checks, and how many icons could not be rendered.

    Returns:
        The facts of each task.
    """
    facts_path, made_from = folder / FACTS_NAME, json.loads(json.dumps(source.facts))
    if facts_path.is_file() and json.loads(facts_path.read_bytes()).get("source") == made_from:
        return read_facts(folder)
    facts_path.unlink(missing_ok=True)
    held: dict[str, list[Listed]] = {}
    for row in source.listing.read(0, source.rows):
        if row.problem == HELD_OUT and row.detail:
            held.setdefault(row.detail, []).append(row)
    tasks = {}
    for task in (task for task in TASKS if task in held):
        place = folder / f"wds_icons-{task}_test"
        if place.exists():
            shutil.rmtree(place)
        tasks[f"icons/{task}"] = _write_task(task, held[task], source, place)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(facts_path, {"source": made_from, "tasks": tasks})
    return tasks


def _write_task(task: str, rows: list[Listed], source: IconSource, place: Path) -> dict[str, Any]:
    missing: Counter[str] = Counter()

    def pictures() -> Iterator[tuple[str, bytes, str]]:
        for row in rows:
            pair = source.pair(row)
            if pair.problem:
                missing[pair.problem] += 1
            else:
                assert isinstance(pair.image, bytes)
                yield "png", pair.image, pair.captions[0]

    classes: dict[str, Any] = {}
    if task != "rare-phrases":
        digests = write_retrieval(pictures(), place)
        _write_manifest(place, digests, len(rows) - missing.total())
    else:
        names = sorted({row.captions[0] for row in rows})
        labelled = ((suffix, image, names.index(caption)) for suffix, image, caption in pictures())
        digests = write_zeroshot(labelled, place, classnames=names, templates=TEMPLATES)
        classes = {"classes": len(names), "chance": 1 / len(names)}
    return {"samples": len(rows) - missing.total(), **classes, "sha256": digests, "excluded": dict(missing)}


def _write_manifest(place: Path, digests: dict[str, str], samples: int) -> None:
    """Make the pairs of a retrieval task usable as `validation.sources`."""
    rest = [min(SHARD_SIZE, samples - k * SHARD_SIZE) for k in range(len(digests))]
    sizes = [(place / name).stat().st_size for name in digests]
    make_manifest(zip(digests, rest, sizes, digests.values(), strict=True), root=place).save(place)

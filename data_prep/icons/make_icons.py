"""`neuclip download --recipe icons`: shards with a manifest, a datasheet with every set's licence, and the suite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep import reasons
from data_prep.dataset.dataset_folder import Folder, read_meta
from data_prep.dataset.ingest_report import DATASHEET_NAME, template
from data_prep.icons import icon_source
from data_prep.icons.held_out import HELD_OUT
from data_prep.icons.icon_source import IconOptions, IconSource, open_icons
from data_prep.icons.icon_suite import suite_folder, write_icon_suite
from data_prep.pairs.make_shards import DROPPED_NAME, PairsConfig, make_shards
from data_prep.settings.icons_config import PACKAGE, IconsConfig
from pipeline.data.shards.manifest_format import Manifest
from pipeline.files import write_text

MEANINGS = {
    icon_source.LICENCE: "the set's licence is not in source.licences",
    icon_source.BRAND: "a set of logos, which are trademarks",
    icon_source.HIDDEN: "the set has withdrawn it",
    icon_source.NO_DRAWING: "the package has no drawing for it",
    icon_source.DUPLICATE: "the same drawing as an earlier icon",
    icon_source.NOT_RENDERED: "the renderer refused it",
    icon_source.BLANK: "one colour only, such as white on white or the start of an animation",
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
    """Make what is missing of the shards, the datasheet and the suite.

    Args:
        config: All settings.
        on_rows: Called with the number of icons done so far and the total.

    Raises:
        UserError: The package cannot be had or is damaged, or the folder holds something else.
    """
    opened: list[IconSource] = []

    def opener(*args: Any, **kwargs: Any) -> IconSource:
        opened.append(open_icons(*args, package=config.source.package, **kwargs))
        return opened[0]

    source = config.source
    options = IconOptions(source.version, source.licences, source.fraction, config.held_out, config.image.size)
    output = Path(config.output)
    pairs = PairsConfig(
        f"{PACKAGE}@{source.version}",
        output,
        options=options,
        opener=opener,
        made_by="neuclip download --recipe icons",
        shard_size=config.fetch.shard_size,
        processes=config.fetch.processes,
    )
    manifest = make_shards(pairs, on_rows=on_rows).manifest
    suite = suite_folder(output)
    tasks = write_icon_suite(opened[0], suite)
    _write_datasheet(Folder(output), manifest, opened[0], tasks, suite)
    return IconsMade(manifest, tasks, suite)


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

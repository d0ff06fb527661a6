"""The ingestion report (one HTML page for people) and the datasheet (Markdown, to stay with the shards)."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.dataset import canonical_tar
from data_prep.dataset.dataset_folder import Folder
from data_prep.dataset.fault_points import fault_point
from data_prep.dataset.journal import read_sessions
from data_prep.dataset.locks import REPORT, part_lock
from data_prep.dataset.statistics import SIDE_EDGES, WORD_EDGES, Census, take_census
from data_prep.reasons import is_transient
from data_prep.settings.source_config import SourceConfig
from pipeline.config import to_tree
from pipeline.data.shards.manifest_format import Manifest, load_manifest
from pipeline.data.shards.rgb_image import rgb_image
from pipeline.data.shards.tar_reader import CorruptSample
from pipeline.files import write_text

REPORT_NAME, DATASHEET_NAME = "report.html", "datasheet.md"
_PICTURES = 18

MEANINGS = {
    "timeout": "no answer, or not all of it, in time",
    "dns": "the host name does not resolve",
    "connection": "refused, reset or closed without an answer",
    "tls": "the certificate or the encryption failed",
    "cut off": "fewer bytes received than announced",
    "redirects": "too many redirects, or a loop",
    "bad url": "not a URL that can be requested",
    "refused scheme": "neither http nor https",
    "refused address": "private, loopback or another special address",
    "opted out": "the owner's headers say not to use it (X-Robots-Tag)",
    "removed": "on this set's removal list",
    "empty": "an answer without a body",
    "not an image": "a page or another file where an image should be",
    "truncated": "an image file that stops before its end",
    "too many bytes": "larger than guard.max_bytes",
    "too many pixels": "larger than guard.max_pixels",
    "too small": "smaller than image.min_size",
    "extreme aspect ratio": "longer than image.max_aspect_ratio",
    "hash mismatch": "no longer the file that was published",
    "undecodable": "the image decoder failed",
    "not encoded": "the image could not be stored without changing it",
    "too little memory": "decoding it needs more memory than the machine had left",
    "quarantined": "decoding it killed a worker process twice",
    "no caption": "the table has no text for it",
    "internal error": "lost to a bug in neuclip",
    "http 403": "forbidden",
    "http 404": "not found",
    "http 410": "gone for good",
    "http 429": "asked too often",
    "http 503": "temporarily unavailable",
}


def meaning_of(reason: str) -> str:
    """A reason in words."""
    return MEANINGS.get(reason, "the server's answer" if reason.startswith("http ") else "")


def write_report(root: str | Path) -> Path:
    """Write the report and the datasheet of a finished data set next to its shards.

    Returns:
        The path of the report.
    """
    folder = Folder(Path(root))
    manifest = load_manifest(folder.root)
    facts = page_facts(folder, manifest, take_census(folder))
    with part_lock(folder, REPORT, wait=True):
        for name in (REPORT_NAME, DATASHEET_NAME):
            fault_point(name.partition(".")[0])
            write_text(folder.root / name, template(f"{name}.j2").render(facts), durable=True)
    return folder.root / REPORT_NAME


def page_facts(folder: Folder, manifest: Manifest, census: Census) -> dict[str, Any]:
    """The context of both templates."""
    sessions, damaged = read_sessions(folder)
    reasons = [
        {
            "name": reason,
            "count": count,
            "share": count / max(1, manifest.attempted),
            "meaning": meaning_of(reason),
            "transient": is_transient(reason),
        }
        for reason, count in sorted(manifest.failures.items(), key=lambda item: (-item[1], item[0]))
    ]
    return {
        "name": folder.root.absolute().name,
        "manifest": manifest,
        "source": {**to_tree(SourceConfig()), **manifest.facts["source"]},
        "facts": manifest.facts,
        "bytes": manifest.bytes,
        "reasons": reasons,
        "hosts": _hosts(census),
        "host_count": len(census.hosts),
        "served": _bars(census.served_sides, SIDE_EDGES),
        "stored": _bars(census.stored_sides, SIDE_EDGES),
        "words": _bars(census.caption_words, WORD_EDGES),
        "languages": _shares(census),
        "captions_guessed": len(census.captions),
        "sessions": sessions,
        "damaged_sessions": damaged,
        "seconds": sum(session["seconds"] for session in sessions),
        "pictures": _pictures(manifest),
        "removed": len(folder.removed_names()),
    }


def _hosts(census: Census, shown: int = 15) -> list[dict[str, Any]]:
    rows = []
    for host, urls in census.hosts.most_common(shown):
        failed = {reason: n for (name, reason), n in census.host_reasons.items() if name == host}
        worst = max(failed, key=lambda reason: failed[reason], default="")
        rows.append({"name": host, "urls": urls, "success": census.host_samples[host] / urls, "worst": worst})
    return rows


def _bars(counts: np.ndarray, edges: np.ndarray) -> list[dict[str, Any]]:
    """One bar per bin between the first and the last that is not empty; `height` is relative to the tallest."""
    filled = np.flatnonzero(counts)
    if not len(filled):
        return []
    bars = []
    for i in range(filled[0], filled[-1] + 1):
        last = int(edges[i + 1]) - 1
        label = str(int(edges[i])) if last == edges[i] else f"{edges[i]}–{last}"
        label = f"≥ {edges[i]}" if edges[i + 1] >= 1 << 31 else label
        height = counts[i] / counts.max()
        bars.append({"label": label, "count": int(counts[i]), "height": height, "share": counts[i] / counts.sum()})
    return bars


def _shares(census: Census, shown: int = 8) -> list[dict[str, Any]]:
    total = census.languages.total()
    common = [(code, n) for code, n in census.languages.most_common(shown) if n >= 0.005 * total]
    rest = total - sum(count for _, count in common)
    return [{"name": code, "share": n / total} for code, n in [*common, *([("other", rest)] if rest else [])]]


def _pictures(manifest: Manifest) -> list[dict[str, str]]:
    """Thumbnails of samples spread over the data set, as data URLs."""
    wanted: dict[str, set[int]] = {}
    count = min(_PICTURES, manifest.n)
    for k in range(count):
        shard, place = manifest.locate((2 * k + 1) * manifest.n // (2 * count))
        wanted.setdefault(shard.name, set()).add(place)
    pictures = []
    for shard in (shard for shard in manifest.shards if shard.name in wanted):
        for place, (_, parts) in enumerate(canonical_tar.intact_samples(manifest.url(shard))):
            if place not in wanted[shard.name]:
                continue
            try:
                small = rgb_image(canonical_tar.picture(parts))
            except CorruptSample:  # stored as served, and only OpenCV decodes it; `neuclip verify` reports it
                continue
            small.thumbnail((192, 192))
            buffer = io.BytesIO()
            small.save(buffer, "JPEG", quality=85)
            source = "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
            pictures.append({"source": source, "caption": parts.get("txt", b"").decode(errors="replace")})
    return pictures


def template(name: str) -> Any:
    """A template of this package, by its file name."""
    import jinja2

    folder = Path(__file__).parent / "templates"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=name.endswith("html.j2"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["count"] = lambda value: f"{value:,}"
    environment.filters["percent"] = _percent
    environment.filters["size"] = _size
    environment.filters["duration"] = _duration
    return environment.get_template(name)


def _percent(value: float) -> str:
    return f"{value:.1%}" if value >= 0.001 or value == 0 else f"{value:.2%}"


def _size(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"

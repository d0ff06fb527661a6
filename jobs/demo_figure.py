"""The README's picture, drawn from a demo's results: `python -m jobs.demo_figure runs/demo`.

The run's last evaluation is written to docs/figures/demo.json; demo-light.svg and demo-dark.svg beside it are drawn
from that file alone. Without a run, the pictures are redrawn from the existing file.
"""

from __future__ import annotations

import base64
import io
import json
import shlex
import textwrap
from html import escape
from pathlib import Path
from typing import Any

import click

from pipeline.files import write_text
from pipeline.pixels import read_rgb

FOLDER = Path(__file__).parents[1] / "docs" / "figures"
DATA_NAME = "demo.json"
EXAMPLES, IMAGES, SIDE = 4, 5, 72
WIDTH, HEIGHT = 960, 424
ROLES = ("page", "ink", "muted", "track", "bar", "good")
COLOURS = {
    "light": ("#ffffff", "#1b1d21", "#5c6169", "#e6e8ec", "#2b62c9", "#136b43"),
    "dark": ("#0d1117", "#e9e8e4", "#a2a8b1", "#262b34", "#6f9df2", "#5fc596"),
}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', sans-serif"


@click.command(name="demo-figure")
@click.argument("run", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), default=FOLDER, help="[docs/figures]")
def command(run: Path | None, output: Path) -> None:
    """Draw the README's picture of the demo from RUN, or from the stored data without RUN."""
    if run is not None:
        write_text(output / DATA_NAME, json.dumps(collect(run), indent=1, ensure_ascii=False) + "\n")
    data = json.loads((output / DATA_NAME).read_text(encoding="utf-8"))
    for theme in COLOURS:
        write_text(output / f"demo-{theme}.svg", draw(data, theme))
        click.echo(output / f"demo-{theme}.svg")


def collect(run: Path) -> dict[str, Any]:
    """Scores and retrieval examples of the run's last evaluation, as written to demo.json."""
    from pipeline.report.run_data import read_run

    found = read_run(run)
    if found.latest is None:
        from pipeline.errors import UserError

        evaluate = f"neuclip evaluate {shlex.quote(str(run))} --suite FOLDER"
        raise UserError(f"{run} has no evaluation: run `neuclip demo`, or `{evaluate}`.")
    tasks = sorted(found.latest.of("classification"), key=lambda score: -(score.times_chance or 0))
    retrieval = found.latest.of("retrieval")[0]
    examples = found.latest.examples
    chosen = [examples[k * len(examples) // EXAMPLES] for k in range(min(EXAMPLES, len(examples)))]
    return {
        "pairs": sum(manifest.n for manifest in found.manifests),
        "samples": found.rows[-1]["samples"],
        "tasks": [{"name": s.label, "score": s.score, "chance": s.chance} for s in tasks],
        "retrieval": {"score": retrieval.score, "candidates": retrieval.samples},
        "examples": [
            {
                "caption": example["caption"],
                "rank": example["rank"] + 1,
                "images": [
                    {"right": image["right"], "jpeg": _thumbnail(image["file"])} for image in example["images"][:IMAGES]
                ],
            }
            for example in chosen
        ],
    }


def _thumbnail(path: Path) -> str:
    image = read_rgb(path.read_bytes()).resize((2 * SIDE, 2 * SIDE))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=80)
    return base64.b64encode(buffer.getvalue()).decode()


def draw(data: dict[str, Any], theme: str) -> str:
    """The picture as SVG: retrieval examples on the left, zero-shot scores on the right."""
    look = dict(zip(ROLES, COLOURS[theme], strict=True))
    best = f"Best of {data['retrieval']['candidates']:,} images for a caption"
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="t"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}">',
        '<title id="t">The demo&#8217;s model: images retrieved for captions, and zero-shot accuracy by task</title>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="{look["page"]}"/>',
        _text(24, 32, best, look["ink"], size=16, bold=True),
        _text(600, 32, "Zero-shot accuracy after the demo", look["ink"], size=16, bold=True),
    ]
    for row, example in enumerate(data["examples"]):
        parts += _example(example, 54 + row * 92, look)
    for row, task in enumerate(data["tasks"]):
        parts += _task(task, 60 + row * 39, look)
    note = f"{data['pairs']:,} pairs, {data['samples'] / 1e3:,.0f}k samples seen, two CPU cores"
    marks = "Tick: chance. Ring: the caption's own image."
    parts += [_text(600, HEIGHT - 38 + 19 * k, line, look["muted"], size=13) for k, line in enumerate((note, marks))]
    return "\n".join([*parts, "</svg>", ""])


def _example(example: dict[str, Any], top: int, look: dict[str, str]) -> list[str]:
    lines = textwrap.wrap(example["caption"], 20, break_long_words=False, break_on_hyphens=False)
    parts = [_text(24, top + 14 + 19 * k, line, look["ink"], size=15) for k, line in enumerate(lines[:4])]
    for k, image in enumerate(example["images"]):
        x = 208 + k * (SIDE + 2)
        place = f'x="{x}" y="{top}" width="{SIDE - 4}" height="{SIDE - 4}"'
        parts.append(f'<image {place} href="data:image/jpeg;base64,{image["jpeg"]}"/>')
        if image["right"]:
            place = f'x="{x - 1}" y="{top - 1}" width="{SIDE - 2}" height="{SIDE - 2}"'
            parts.append(f'<rect {place} rx="4" fill="none" stroke="{look["good"]}" stroke-width="4"/>')
    return parts


def _task(task: dict[str, Any], top: int, look: dict[str, str]) -> list[str]:
    x, width = 704, 190
    mark = x + width * task["chance"]
    return [
        _text(600, top + 14, task["name"], look["ink"], size=16),
        f'<rect x="{x}" y="{top + 2}" width="{width}" height="15" rx="4" fill="{look["track"]}"/>',
        f'<rect x="{x}" y="{top + 2}" width="{width * task["score"]:.1f}" height="15" rx="4" fill="{look["bar"]}"/>',
        f'<rect x="{mark - 1:.1f}" y="{top - 1}" width="2" height="21" fill="{look["ink"]}"/>',
        _text(x + width + 12, top + 14, f"{100 * task['score']:.0f}%", look["ink"], size=16),
    ]


def _text(x: float, y: float, words: str, colour: str, *, size: int, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x}" y="{y}" fill="{colour}" font-size="{size}"{weight}>{escape(words)}</text>'


if __name__ == "__main__":
    from jobs.cli import run as run_command

    run_command(command, prog_name="jobs.demo_figure")

"""Renders the pages of runs, comparisons and data sets, which have one design (`base.html`), and formats numbers."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def render(template: str, context: Mapping[str, Any], *, folder: Path | None = None) -> str:
    """Render a template of this folder, or of another one that extends `base.html`; its name says whether values
    are escaped for HTML or for tables of markdown."""
    import jinja2

    in_html = ".html" in template
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([Path(__file__).parent, *([folder] if folder else [])]),
        autoescape=in_html,
        finalize=None if in_html else in_markdown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"data_uri": _data_uri, "count": "{:,}".format, "percent": percent, "size": size}
    return environment.get_template(template).render(context)


def in_markdown(value: Any) -> Any:
    """Text escaped for a cell of a markdown table."""
    return value.replace("|", "\\|").replace("<", "&lt;") if isinstance(value, str) else value


def percent(value: float) -> str:
    """A share in percent: 0.5 -> 50.0%."""
    return f"{value:.1%}" if value >= 0.0005 or not value else "<0.1%"


def short(value: float) -> str:
    """A number in short form: 1234567 -> 1.23M."""
    scale, suffix = next(((scale, suffix) for scale, suffix in UNITS if abs(value) >= scale), (1, ""))
    return f"{value / scale:.3g}{suffix}"


def rounded(value: float) -> str:
    """At most three significant digits: 1.79951 -> 1.8, 0.00002231 -> 2.23e-05, 123456 -> 123,456."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def size(value: float) -> str:
    """Bytes as text: 1_500_000 -> 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"


def duration(seconds: float) -> str:
    """A duration as text: 75.3 -> 1 min 15 s."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _data_uri(path: Path) -> str | None:
    """None if the thumbnail is missing; the page then shows an empty frame."""
    try:
        return f"data:image/jpeg;base64,{base64.b64encode(path.read_bytes()).decode()}"
    except OSError:
        return None

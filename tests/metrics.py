"""The records of a run's metrics.jsonl, also while the run writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def metrics(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The records of one kind, or all; a last line without its end is still being written and is left out."""
    whole, _, _ = (run / "metrics.jsonl").read_text().rpartition("\n")
    found = map(json.loads, whole.splitlines())
    return [record for record in found if kind in (None, record["kind"])]

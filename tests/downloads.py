"""Settings of downloads from servers on this machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_prep.download_config import DownloadConfig
from pipeline.config import dump, parse


def download_config(
    output: Path, table: Path, *, source: Mapping[str, Any] | None = None, **sections: Any
) -> DownloadConfig:
    """Return the settings of a download to `output` of what a table lists; a section is added, `guard` extended."""
    guard = {"allow_addresses": ["127.0.0.1"], "contact": "x@example.org", **sections.pop("guard", {})}
    tree = {"output": str(output), "source": {"table": str(table), **(source or {})}, "guard": guard, **sections}
    return parse(DownloadConfig, tree)


def command_of(config: DownloadConfig) -> list[str]:
    """The command that downloads with these settings, in a recipe beside the output."""
    recipe = Path(f"{config.output}.yaml")
    recipe.write_text(dump(config))
    return [sys.executable, "-m", "jobs.download", "--recipe", str(recipe)]

"""Settings of downloads and guarded requests to servers on this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from data_prep import reasons
from data_prep.download_config import DownloadConfig, GuardConfig
from data_prep.fetching.opener import Opener
from data_prep.reasons import FetchError
from pipeline.config import dump, parse
from tests.web import Site, serve


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


@pytest.fixture
def site() -> Iterator[Site]:
    with serve() as site:
        yield site


def opener(retries: int = 0, total: float = 5.0, connections: int = 8, **guard: object) -> Opener:
    settings = {"allow_addresses": ("127.0.0.1",), "backoff": 0.05, **guard}
    return Opener(GuardConfig(**settings), connections=connections, retries=retries, total_seconds=total)


def refusal(given: Opener, url: str) -> str:
    with pytest.raises(FetchError) as caught:
        given.open(url, timeout=2)
    assert reasons.of_message(str(caught.value)) == caught.value.reason
    return caught.value.reason

"""Settings of downloads and guarded requests to servers on this machine."""

import sys
from pathlib import Path

import pytest

from data_prep import reasons
from data_prep.download_config import DownloadConfig, GuardConfig
from data_prep.fetching.opener import Opener
from data_prep.reasons import FetchError
from pipeline.config import dump, parse
from tests.web import serve


def download_config(output, table, *, source=None, **sections):
    """Return the settings of a download to `output` of what a table lists; a section is added, `guard` extended."""
    guard = {"allow_addresses": ["127.0.0.1"], "contact": "x@example.org", **sections.pop("guard", {})}
    tree = {"output": str(output), "source": {"table": str(table), **(source or {})}, "guard": guard, **sections}
    return parse(DownloadConfig, tree)


def command_of(config):
    """The command that downloads with these settings, in a recipe beside the output."""
    recipe = Path(f"{config.output}.yaml")
    recipe.write_text(dump(config))
    return [sys.executable, "-m", "jobs.download", "--recipe", str(recipe)]


@pytest.fixture
def site():
    with serve() as site:
        yield site


def opener(retries=0, total=5.0, connections=8, **guard):
    settings = {"allow_addresses": ("127.0.0.1",), "backoff": 0.05, **guard}
    return Opener(GuardConfig(**settings), connections=connections, retries=retries, total_seconds=total)


def refusal(given, url):
    with pytest.raises(FetchError) as caught:
        given.open(url, timeout=2)
    assert reasons.of_message(str(caught.value)) == caught.value.reason
    return caught.value.reason

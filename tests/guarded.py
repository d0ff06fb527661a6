"""Guarded requests to a server on this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from data_prep import reasons
from data_prep.download_config import GuardConfig
from data_prep.fetching.opener import Opener
from data_prep.reasons import FetchError
from tests.web import Site, serve


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

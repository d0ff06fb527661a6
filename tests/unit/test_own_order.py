"""The documentation's order of samples, in a package outside of the repository; test_own_package.py trains on it."""

from pathlib import Path

import numpy as np
import pytest

from pipeline.data.order.canonical_order import ORDERS
from pipeline.data.order.mixture import Segments
from pipeline.errors import UserError
from tests.plugins import install
from tests.shards import open_loader, write_shards

ROOT = Path(__file__).parents[2]
EXAMPLE = (ROOT / "docs/data.md").read_text().partition("#### An order of your own")[2]


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """An installed package that offers the order."""
    example = EXAMPLE.partition("```python\n")[2].partition("```")[0]
    entry_points = "[neuclip.orders]\nas_stored = order_as_stored\n"
    install(monkeypatch, ORDERS, tmp_path / "site", entry_points, order_as_stored=example)


@pytest.mark.usefixtures("plugin")
def test_an_order_of_ones_own_is_read_and_resumed(tmp_path, monkeypatch):
    write_shards(tmp_path / "shards", [7, 13, 5, 11])

    def loader(order, workers):
        return open_loader(tmp_path / "shards", streams=4, order=order, workers=workers)

    with loader("as_stored", 2) as read:
        found = [next(read).sample_id.tolist() for _ in range(3)]
        state = read.state_dict()
    assert found == [[9 * stream + 2 * batch + row for stream in range(4) for row in (0, 1)] for batch in range(3)]
    with loader("as_stored", 0) as resumed:
        resumed.load_state_dict(state)
        assert next(resumed).sample_id.tolist()[:2] == [6, 7]
    with loader("canonical", 0) as other, pytest.raises(UserError, match=r"data.order was as_stored, now canonical"):
        other.load_state_dict(state)
    with pytest.raises(UserError, match=r"data.order = 'as_stord': no such data order. The nearest is as_stored"):
        loader("as_stord", 0)

    broken = type("Short", (ORDERS["as_stored"],), {"segments": lambda self, epoch: Segments(*3 * [np.arange(2)], 2)})
    monkeypatch.setitem(ORDERS.registered, "short", broken)
    with (
        loader("short", 0) as read,
        pytest.raises(UserError, match=r"'short': segments\(0\) gave 2 samples in 2 .* the 36 "),
    ):
        next(read)

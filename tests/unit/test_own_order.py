"""The documentation's order of samples, in a package outside of the repository, through the commands."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from jobs.plan import command as plan
from jobs.settings import command as settings
from pipeline.config import parse
from pipeline.data.data_config import DataConfig
from pipeline.data.loading.loader import Loader, build_loader
from pipeline.data.order.canonical_order import ORDERS
from pipeline.data.order.mixture import Segments
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.training.recipe import load_recipe
from pipeline.training.run import train
from tests.metrics import metrics
from tests.plugins import install
from tests.shards import count_tokens, write_shards
from tests.towers import write_tiny
from tests.training import SMALL, in_this_process

ROOT = Path(__file__).parents[2]
EXAMPLE = (ROOT / "docs/data.md").read_text().partition("#### An order of your own")[2]


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that offers the order."""
    example = EXAMPLE.partition("```python\n")[2].partition("```")[0]
    entry_points = "[neuclip.orders]\nas_stored = order_as_stored\n"
    install(monkeypatch, ORDERS, tmp_path / "site", entry_points, order_as_stored=example)


@pytest.mark.usefixtures("plugin")
def test_an_order_of_ones_own_is_planned_read_and_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tmp_path / "shards", [7, 13, 5, 11])
    given = [f"data.sources={tmp_path / 'shards'}", "data.order=as_stored"]

    def loader(order: str, workers: int) -> Loader:
        tree = {"sources": str(tmp_path / "shards"), "streams": 4, "order": order, "workers": workers}
        config = parse(DataConfig, tree)
        return build_loader(config, world=World(), global_batch=8, seed=3, image_size=16, tokenize=count_tokens)

    with loader("as_stored", 2) as read:
        found = [next(read).sample_id.tolist() for _ in range(3)]
        place = read.place
    assert found == [[9 * stream + 2 * batch + row for stream in range(4) for row in (0, 1)] for batch in range(3)]
    with loader("as_stored", 0) as resumed:
        resumed.move_to(place)
        assert next(resumed).sample_id.tolist()[:2] == [6, 7]
    with loader("canonical", 0) as other, pytest.raises(UserError, match=r"data.order was as_stored, now canonical"):
        other.move_to(place)
    with pytest.raises(UserError, match=r"data.order = 'as_stord': no such data order. The nearest is as_stored"):
        loader("as_stord", 0)

    broken = type("Short", (ORDERS["as_stored"],), {"segments": lambda self, epoch: Segments(*3 * [np.arange(2)], 2)})
    monkeypatch.setitem(ORDERS.registered, "short", broken)
    with (
        loader("short", 0) as read,
        pytest.raises(UserError, match=r"'short': segments\(0\) gave 2 samples in 2 .* the 36 "),
    ):
        next(read)

    assert "data.order" in CliRunner().invoke(settings, ["data.order"]).output
    recipe = [*SMALL, *given, f"output={tmp_path / 'run'}", f"model.arch={write_tiny(tmp_path)}", "samples=32"]
    planned = CliRunner().invoke(plan, ["--recipe", "own", *recipe])
    assert planned.exit_code == 0, planned.output
    with in_this_process():
        assert train(load_recipe(ROOT / "jobs/recipes/own.yaml", recipe)) == 0
    assert len(metrics(tmp_path / "run", "train")) == 4

"""The batch that is put together ahead: whose turn it is, and when what goes wrong with it is told."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from pipeline.data.loader import Batch
from pipeline.heartbeat import Heartbeat
from pipeline.timing import Meter, Phases
from pipeline.trainer import Trainer
from pipeline.world import World


class Marks:
    def mark(self, phase: str) -> None:
        assert phase == "data"


class Run:
    total_steps = 4


def trainer(batches: list[Any]) -> Trainer:
    """A trainer of nothing but the order in which it takes batches; those that are exceptions are raised."""

    def loader() -> Any:
        for batch in batches:
            if isinstance(batch, Exception):
                raise batch
            yield batch

    one = Trainer.__new__(Trainer)
    one.loader, one.run, one.world, one.step = cast(Any, loader()), cast(Any, Run), World(), 0
    return one


def take(one: Trainer, *, look_ahead: bool) -> Batch:
    meter = Meter(1, Phases(torch.device("cpu")))
    batch = one._next_batch(meter)
    if look_ahead:
        one._look_ahead(meter, cast(Heartbeat, Marks()))
    one.step += 1
    return batch


@pytest.mark.parametrize("look_ahead", [[True] * 4, [False] * 4, [True, False, False, True]])
def test_batches_come_in_their_order_and_none_after_the_last_step(look_ahead: list[bool]) -> None:
    one = trainer(["a", "b", "c", "d", "e"])
    assert [take(one, look_ahead=ahead) for ahead in look_ahead] == ["a", "b", "c", "d"]
    assert next(one.loader) == "e", "the batch after the last step is not asked for"


def test_what_goes_wrong_ahead_is_told_at_its_own_turn() -> None:
    one = trainer(["a", "b", ValueError("the third")])
    assert take(one, look_ahead=True) == "a"
    assert take(one, look_ahead=True) == "b"
    with pytest.raises(ValueError, match="the third"):
        take(one, look_ahead=True)


def test_only_waits_that_nothing_hides_are_counted() -> None:
    meter = Meter(1, Phases(torch.device("cpu")))
    with meter.waiting(hidden_by=torch.device("cpu")):
        torch.zeros(10).sum()
    assert meter.read()["data_wait"] > 0

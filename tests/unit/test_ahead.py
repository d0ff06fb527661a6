"""The batch that is put together ahead: whose turn it is, and when what goes wrong with it is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pipeline.distributed.timing import Meter, Phases
from pipeline.training.prefetch import BatchesAhead

CPU = torch.device("cpu")


def ahead_of(batches: list[Any], meter: Meter | None = None) -> tuple[BatchesAhead, Iterator[Any]]:
    """Those that are exceptions are raised."""

    def loader() -> Iterator[Any]:
        for batch in batches:
            if isinstance(batch, Exception):
                raise batch
            yield batch

    source = loader()
    return BatchesAhead(source, meter=meter or Meter(1, Phases(CPU)), device=CPU), source


@pytest.mark.parametrize("prepared", [[True] * 3, [False] * 3, [True, False, True]])
def test_batches_come_in_their_order_prepared_or_not(prepared: list[bool]) -> None:
    batches, source = ahead_of(["a", "b", "c", "d", "e"])
    taken = []
    for ahead in prepared:
        taken.append(batches.next())
        if ahead:
            batches.prepare()
    assert [*taken, batches.next()] == ["a", "b", "c", "d"]
    assert next(source) == "e", "nothing was asked for that was not given out"


def test_what_goes_wrong_ahead_is_told_at_its_own_turn() -> None:
    batches, _ = ahead_of(["a", ValueError("the second")])
    assert batches.next() == "a"
    batches.prepare()
    with pytest.raises(ValueError, match="the second"):
        batches.next()


def test_waits_that_nothing_hides_are_counted() -> None:
    meter = Meter(1, Phases(CPU))
    batches, _ = ahead_of(["a", "b"], meter)
    batches.next()
    first = meter.read()["data_wait"]
    batches.prepare()
    assert first > 0
    assert meter.read()["data_wait"] > 0

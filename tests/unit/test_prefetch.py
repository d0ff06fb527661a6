"""Prefetching the next batch: the order of batches, and when an error is raised."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.distributed.timing import Meter, Phases
from pipeline.training.prefetch import PrefetchedBatches

CPU = torch.device("cpu")


def prefetched(batches: list[Any], *, steps: int = 99) -> tuple[PrefetchedBatches, Iterator[Any], Meter]:
    """Return the batches (exceptions among them are raised), their source, and the meter of the time spent waiting."""

    def loader() -> Iterator[Any]:
        for batch in batches:
            if isinstance(batch, Exception):
                raise batch
            yield batch

    source = loader()
    phases = Phases(CPU)
    meter = Meter(1, phases)
    return PrefetchedBatches(source, steps=steps, meter=meter, phases=phases, device=CPU), source, meter


@pytest.mark.parametrize("ahead", [[True] * 3, [False] * 3, [True, False, True]])
def test_batches_keep_their_order_with_and_without_prefetching(ahead: list[bool]) -> None:
    batches, source, _ = prefetched(["a", "b", "c", "d", "e"])
    taken = []
    for step, fetch in enumerate(ahead):
        taken.append(batches.next())
        if fetch:
            batches.fetch_ahead(step)
    assert [*taken, batches.next()] == ["a", "b", "c", "d"]
    assert next(source) == "e", "a batch was fetched but not returned"


def test_nothing_is_prefetched_past_the_last_step() -> None:
    batches, source, _ = prefetched(["a", "b", "c"], steps=2)
    batches.next()
    batches.fetch_ahead(0)
    assert batches.next() == "b"
    batches.fetch_ahead(1)
    assert next(source) == "c"


def test_an_error_while_prefetching_is_raised_when_that_batch_is_due() -> None:
    batches, _, _ = prefetched(["a", ValueError("the second")])
    assert batches.next() == "a"
    batches.fetch_ahead(0)
    with pytest.raises(ValueError, match="the second"):
        batches.next()


def test_waiting_time_is_counted_with_and_without_prefetching() -> None:
    batches, _, meter = prefetched(["a", "b"])
    batches.next()
    first = meter.read()["data_wait"]
    batches.fetch_ahead(0)
    assert first > 0
    assert meter.read()["data_wait"] > 0


class FakeStream:
    """A CUDA stream that records what is called on it."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def record_event(self) -> str:
        self.calls.append(f"{self.name} records")
        return "arrived"

    def wait_event(self, event: str) -> None:
        self.calls.append(f"{self.name} waits until {event}")


class FakeImage:
    """Pinned images that record on which stream they are copied."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def to(self, device: torch.device, *, non_blocking: bool) -> FakeImage:
        assert non_blocking
        self.calls.append("copy")
        return self

    def record_stream(self, stream: FakeStream) -> None:
        self.calls.append(f"memory in use by {stream.name}")


def test_images_are_copied_ahead_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    own, current = FakeStream("copies", calls), FakeStream("current", calls)

    @contextlib.contextmanager
    def stream(used: FakeStream) -> Iterator[None]:
        calls.append(f"on {used.name}")
        yield

    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: own)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    phases = Phases(CPU)
    meter = Meter(1, phases)
    source: Any = iter([SimpleNamespace(image=FakeImage(calls)) for _ in range(3)])
    batches = PrefetchedBatches(source, steps=9, meter=meter, phases=phases, device=device)
    batches._device = CPU  # the meter asks the device for its queued work
    first = batches.next()
    batches.image(first)
    assert calls == ["copy"], "nothing was copied ahead"
    calls.clear()
    batches.fetch_ahead(0)
    assert calls == ["on copies", "copy", "copies records"]
    calls.clear()
    batches.image(batches.next())
    assert calls == ["current waits until arrived", "memory in use by current"]
    calls.clear()
    batches.fetch_ahead(1)
    calls.clear()
    batches.image(first)
    assert calls == ["copy"], "another batch than the one copied ahead"

"""Prefetching the next batch: the order of batches, when an error is raised, and what a GPU's step waits for."""

import gc
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from pipeline.distributed import timing
from pipeline.distributed.timing import Meter, Phases, collect_garbage
from pipeline.model.trimming import TextChunks
from pipeline.training.inputs import PrefetchedBatches
from pipeline.training.loop import Trainer
from pipeline.training.step import TrainStep
from tests.metrics import equal, weights
from tests.training import prepare, settings_in, train_here

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LIMIT = 60.0


@pytest.fixture
def streams(monkeypatch):
    """CUDA streams without a GPU; what was called on them."""
    calls = []

    def fake(name):
        arrived = SimpleNamespace(name="arrived", synchronize=lambda: None)
        return SimpleNamespace(
            name=name,
            record_event=lambda _: calls.append(f"{name} records") or arrived,
            wait_event=lambda event: calls.append(f"{name} waits until {event.name}"),
        )

    own, current = fake("copies"), fake("current")

    @contextmanager
    def stream(used):
        calls.append(f"on {used.name}")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: own)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    return calls


def prefetched(source, *, steps=99, device=GPU, **options):
    """Batches that are fetched as for a GPU, with the `streams` of the fixture."""
    options = {"texts": texts, "meter": Meter(1, Phases(CPU)), **options}
    batches = PrefetchedBatches(source, steps=steps, device=device, **options)
    batches._device = CPU  # the meter asks the device for its queued work
    return batches


def texts(tokens):
    return TextChunks(tokens, [slice(0, len(tokens))])


def batch(name):
    tensors = {"image": torch.zeros(1), "text": torch.zeros(1, 4), "sample_id": torch.zeros(1)}
    return SimpleNamespace(name=name, **tensors)


@pytest.mark.usefixtures("streams")
def test_batches_keep_their_order_and_none_is_fetched_past_the_last_step_or_on_a_cpu():
    for ahead in ([True] * 3, [False] * 3, [True, False, True]):
        source = map(batch, "abcde")
        batches, taken = prefetched(source, steps=4), []
        for step, fetch in enumerate(ahead):
            taken.append(batches.next().name)
            if fetch:
                batches.fetch_ahead(step)
                batches.fetch_ahead(step)  # nothing more
        assert [*taken, batches.next().name] == ["a", "b", "c", "d"]
        batches.fetch_ahead(3)
        assert next(source).name == "e", "a batch was fetched but not returned"
    on_cpu = prefetched(map(batch, "abc"), device=CPU)
    on_cpu.fetch_ahead(0)
    assert on_cpu._ahead is None

    def failing():
        yield batch("a")
        raise ValueError("the second")

    batches = prefetched(failing())
    batches.next()
    batches.fetch_ahead(0)
    batches.wait()
    with pytest.raises(ValueError, match="the second"):  # when that batch is due
        batches.next()


@pytest.mark.usefixtures("streams")
def test_waiting_time_is_counted_with_and_without_prefetching():
    go_on, meter = threading.Event(), Meter(1, Phases(CPU))

    def source():
        yield batch("a")
        assert go_on.wait(LIMIT)
        yield batch("b")

    batches = prefetched(source(), meter=meter)
    batches.next()
    assert meter.read()["data_wait"] > 0
    batches.fetch_ahead(0)  # does not wait
    assert meter.read()["data_wait"] == 0
    threading.Timer(0.1, go_on.set).start()
    assert batches.next().name == "b"
    assert meter.read()["data_wait"] > 0.5


def test_batches_are_copied_ahead_on_a_stream_of_their_own(streams):
    """Images, texts and ids, which are pinned."""

    class Pinned:
        def to(self, device, *, non_blocking):
            assert non_blocking
            streams.append("copy")
            return self

        def record_stream(self, stream):
            streams.append(f"memory in use by {stream.name}")

    def source():
        while True:
            streams.append("fetch")
            yield SimpleNamespace(image=Pinned(), text=Pinned(), sample_id=Pinned())

    def texts(tokens):
        moved = tokens.to(CPU, non_blocking=True)
        return SimpleNamespace(tensors=lambda: [moved])

    batches = prefetched(source(), texts=texts)
    first = batches.next()
    batches.inputs(first)
    assert streams == ["fetch", *["copy"] * 3], "nothing was copied ahead"
    streams.clear()
    batches.fetch_ahead(0)
    batches.wait()
    expected = ["on copies", "fetch", *["copy"] * 3, "copies records"]
    assert streams == expected, "memory is pinned for the stream's device"
    streams.clear()
    batches.inputs(batches.next())
    assert streams == ["current waits until arrived", *["memory in use by current"] * 3]
    batches.fetch_ahead(1)
    batches.next()
    streams.clear()
    batches.inputs(first)
    assert streams == ["copy"] * 3, "another batch than the one copied ahead"


@pytest.mark.usefixtures("streams")
def test_a_step_waits_nowhere_for_the_next_batch(tmp_path, monkeypatch):
    """It is fetched from before the forward pass until after the update, and the weights are the same."""
    prepare(tmp_path, image_size=32)

    def train(name):
        train_here(*settings_in(tmp_path, name, "samples=32", "model.patch_dropout=0.5", "engine.probe=false"))
        return weights(tmp_path / name, 4)

    without = train("without")
    began, stepped, number = threading.Event(), threading.Event(), 0
    call = TrainStep.__call__

    def source(loader):
        nonlocal number
        for found in loader:
            number += 1
            if number > 1:
                began.set()
                assert stepped.wait(LIMIT), "the step waits for the next batch"
                stepped.clear()
            yield found

    def step(self, *arguments, **options):
        last = options["step"] == 3
        assert last or began.wait(LIMIT), "the next batch was not being fetched when the step began"
        began.clear()
        assert gc.get_freeze_count() > 10_000, "collections look at the objects of the start"
        found = call(self, *arguments, **options)
        stepped.set()
        return found

    def ahead(trainer):
        loader, texts = source(trainer.state.loader), trainer.batches._texts
        trainer.batches = prefetched(loader, steps=4, texts=texts, meter=trainer.meter)
        return fit(trainer)

    fit = Trainer.fit
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(TrainStep, "__call__", step)
    monkeypatch.setattr(Trainer, "fit", ahead)
    assert equal(train("ahead"), without)
    assert gc.get_freeze_count() == 0


def test_objects_that_compiling_leaves_are_looked_at_once():
    """Regression test: torch.compile leaves so many objects that the collection of every record took 0.09 s."""
    try:
        gc.freeze()
        before = gc.get_freeze_count()
        kept = [[] for _ in range(1000)]
        collect_garbage()
        assert gc.get_freeze_count() <= before, "a few objects are left to the next collection"
        kept += [[] for _ in range(timing.MANY_OBJECTS)]
        collect_garbage()
        assert gc.get_freeze_count() - before > timing.MANY_OBJECTS
    finally:
        gc.unfreeze()

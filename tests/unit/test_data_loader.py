"""The loader end to end in one process: same global batches on every layout, exact resume, each sample once."""

import json
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch

from pipeline.data.loading.decode import ImageDecoder
from pipeline.data.loading.stream_reader import ALTERED
from pipeline.data.shards.storage import open_records
from pipeline.distributed.processes import means_worker_died
from pipeline.distributed.world import World
from pipeline.errors import UserError
from tests.shards import count_tokens, open_loader, write_shards

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on machines with fewer cores

SIZES = [7, 13, 5, 11, 9, 3]  # 48 samples; no number of ranks divides the shards evenly
BATCH = 8
COLOURS = {"color_jitter": [0.4, 0.4, 0.4, 0.1], "color_jitter_prob": 0.8, "gray_scale_prob": 0.2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    write_shards(folder, SIZES)
    return folder


def loaders(folder, *, ranks=1, **settings):
    options = {"streams": 4, "shuffle_buffer": 5, **settings}
    return [open_loader(folder, world=World(rank=k, size=ranks), **options) for k in range(ranks)]


def run(ranks, steps):
    """Return the sample ids [steps, B] and images of the global batches."""
    ids, images = [], []
    for _ in range(steps):
        batches = [next(loader) for loader in ranks]
        ids.append(torch.cat([batch.sample_id for batch in batches]))
        images.append(torch.cat([batch.image for batch in batches]))
        for batch in batches:
            assert torch.equal(batch.text[:, 0], batch.sample_id), "caption and sample id do not match"
    return torch.stack(ids), torch.stack(images)


@pytest.mark.parametrize(("ranks", "workers"), [(4, 0), (1, 3), (2, 3)])
def test_global_batches_are_the_same_on_every_layout(folder, ranks, workers):
    expected = run(loaders(folder), 14)
    group = loaders(folder, ranks=ranks, workers=workers)
    try:
        found = run(group, 14)
        assert all(loader.workers == min(workers, 4 // ranks) for loader in group)
    finally:
        for loader in group:
            loader.close()
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_changed_colours_resume_exactly_and_are_recorded(folder, caplog):
    (plain,), (writer,), (reader,) = loaders(folder), loaders(folder, augment=COLOURS), loaders(folder, augment=COLOURS)
    (ids, images), (same_ids, colours) = run([plain], 9), run([writer], 9)
    assert torch.equal(ids, same_ids)
    assert plain.state_dict()["order_hash"] == writer.state_dict()["order_hash"]
    assert not torch.equal(images, colours)
    again = run(loaders(folder, ranks=2, augment=COLOURS), 9)[1]
    assert torch.equal(colours, again)
    assert not torch.equal(colours[0], run([reader], 7)[1][6]), "another epoch"
    reader.load_state_dict(json.loads(json.dumps(writer.state_dict())))
    assert torch.equal(run([reader], 3)[1], run([writer], 3)[1])
    plain.load_state_dict(writer.state_dict())
    reader.load_state_dict(plain.state_dict())
    assert "data.augment was [0.4, 0.4, 0.4, 0.1, 0.8, 0.2], now off" in caplog.text
    assert "data.augment was off, now [" in caplog.text


def test_what_does_not_fit_is_refused_before_the_first_step(folder):
    for settings, ranks, message in [
        ({"streams": 3}, 1, "global batch of 8 is not divisible by data.streams = 3.*2 or 4"),
        ({"streams": 4}, 3, "data.streams = 4 is not divisible by 3 ranks"),
    ]:
        with pytest.raises(UserError, match=message):
            loaders(folder, ranks=ranks, **settings)
    with pytest.raises(UserError, match=r"cannot be sent to worker processes.*data.workers=0"):
        loaders(folder, workers=2, tokenize=lambda texts: count_tokens(texts))


@pytest.fixture(scope="module")
def second(folder):
    """A second source; its captions hold its sample ids, which follow those of the first source."""
    other = folder.parent / f"{folder.name}-second"
    write_shards(other, [6, 10, 4], first=48)
    return other


def test_mixtures_resume_exactly_on_another_layout(folder, second):
    weighted = zip((folder, second), (0.5, 1.5), strict=True)
    options = {"sources": [{"manifest": str(path), "weight": weight} for path, weight in weighted]}
    (whole,) = loaders(folder, **options)
    assert (whole.n, whole.layout.samples) == (68, 24 + 30)
    expected, _ = run([whole], 20)
    assert set(expected.flatten().tolist()) <= set(range(68))
    assert (expected >= 48).any(), "the second source never appears"
    (writer,) = loaders(folder, **options)
    run([writer], 11)
    group = loaders(folder, ranks=4, **options)
    for loader in group:
        loader.load_state_dict(writer.state_dict())
    assert torch.equal(run(group, 9)[0], expected[11:])


def test_resume_with_another_order_is_refused(folder, second, caplog):
    halved = [{"manifest": str(folder)}, {"manifest": str(second), "weight": 0.5}]
    both = [str(folder), str(second)]
    for before, after, change, message in [
        ({}, {"streams": 2}, {}, r"data.streams was 4, now 2"),
        ({}, {}, {"proof": "0" * 16}, "computes another order"),
        ({}, {}, {"batch": 2**52}, "computes another order"),
        ({"sources": halved}, {"sources": both}, {}, r"weights was \[1.0, 0.5\], now \[1.0, 1.0\]"),
    ]:
        (writer,) = loaders(folder, **before)
        run([writer], 2)
        with pytest.raises(UserError, match=message):
            loaders(folder, **after)[0].load_state_dict(writer.state_dict() | change)
    (writer,) = loaders(folder)
    loaders(folder, decoding="exact")[0].load_state_dict(writer.state_dict())
    assert "data.decoding was fast, now exact" in caplog.text, "another decoder is allowed"


def test_an_altered_shard_stops_the_run_or_its_remaining_samples_are_replaced_and_counted(tmp_path):
    """In a worker process. The shard is altered so that every sample can still be read."""
    write_shards(tmp_path, [12, 12, 12, 12])
    path = tmp_path / "00002.tar"
    body = path.read_bytes()
    path.write_bytes(body.replace(b'{"url": "x"}', b'{"url": "y"}', 1))
    for policy, raised in (("stop", True), ("ignore", False)):
        (loader,) = loaders(tmp_path, workers=1, altered_shards=policy)
        with loader, pytest.raises(UserError, match="ids 24 to 35") if raised else nullcontext():
            run([loader], 6)
    (loader,) = loaders(tmp_path, workers=1, altered_shards="skip", corrupt_limit=1.0)
    with loader:
        ids, _ = run([loader], 6)
        report = loader.report()
    assert report.corrupt_by_reason == {ALTERED: report.replaced}
    assert report.corrupt_by_shard == {"00002.tar": report.replaced}
    shown = sum(1 for i in ids.flatten().tolist() if 24 <= i < 36)
    assert 0 < report.replaced <= 6, "those in the shuffle buffer, and the last one"
    assert shown == 12 - report.replaced


def test_unreadable_data_ends_the_run_with_a_message(tmp_path):
    """This also holds in a worker process, and the message has no worker traceback."""
    write_shards(tmp_path, [20, 20], replace={i: {"txt": b"no image"} for i in range(40)})
    (loader,) = loaders(tmp_path, workers=2, corrupt_limit=1.0)
    words = r"no readable sample was found in \d+ .*: image is missing \(\d+\).*neuclip verify"
    with loader, pytest.raises(UserError, match=words) as raised:
        next(loader)
    assert "Traceback" not in str(raised.value)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batches_that_are_kept_are_not_written_again_and_a_closed_loader_continues(folder, workers):
    """More batches than the loader has memory for are kept, and some of them only as a view of their images."""
    (loader,) = loaders(folder, workers=workers)
    (other,) = loaders(folder)
    with loader:
        kept = [next(loader).image[1:, :, ::2] for _ in range(9)]
        expected = [next(other).image[1:, :, ::2].clone() for _ in range(9)]
        assert all(torch.equal(*pair) for pair in zip(kept, expected, strict=True))
        loader.close()
        assert all(torch.equal(*pair) for pair in zip(kept, expected, strict=True))
        assert torch.equal(run([loader], 2)[0], run([other], 2)[0])


def test_resume_does_not_decode_skipped_samples(folder):
    (writer,) = loaders(folder)
    run([writer], 4)
    (reader,) = loaders(folder)
    reader.load_state_dict(writer.state_dict())
    with patch.object(ImageDecoder, "__call__", autospec=True, side_effect=ImageDecoder.__call__) as decode:
        run([reader], 1)
    assert decode.call_count == BATCH


def test_every_stream_reads_its_shards_once_and_in_order(folder):
    (loader,) = loaders(folder)
    with patch("pipeline.data.loading.stream_reader.open_records", side_effect=open_records) as opened:
        run([loader], loader.steps_per_epoch)
    assert opened.call_count <= len(SIZES) + loader.layout.streams - 1, "they are opened again only at boundaries"


def test_only_killed_workers_count_as_killed():
    for error, died in [
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), True),
        (RuntimeError("DataLoader worker (pid(s) 7, 8) exited unexpectedly"), True),
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (RuntimeError("Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback ..."), False),
        (OSError("Caught OSError in DataLoader worker process 0.\nOriginal Traceback ..."), False),
    ]:
        assert means_worker_died(error) == died


def test_killing_a_real_worker_is_reported(folder):
    (loader,) = loaders(folder, workers=2)
    with loader:
        next(loader)
        for worker in loader._parts._workers:
            worker.kill()
        died = r"RuntimeError: DataLoader worker \(pid|ConnectionResetError: |BrokenPipeError: |EOFError: "
        with pytest.raises(UserError, match=rf"A worker of the loader was killed \(({died}).*out of memory"):
            [next(loader) for _ in range(100)]

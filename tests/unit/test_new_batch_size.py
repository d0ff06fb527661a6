"""Resuming with another batch size: data, steps, schedule, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from pipeline.data.loading.loader import Loader
from pipeline.engine.optim import ScheduleConfig, lr_scale
from pipeline.errors import UserError
from tests.metrics import metrics
from tests.shards import open_loader
from tests.training import prepare, settings_in, train_here


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("batch"), [30, 34])


def loader(base: Path, batch: int, streams: int = 4) -> Loader:
    return open_loader(base / "shards", batch=batch, streams=streams, shuffle_buffer=5)


@pytest.mark.parametrize(
    ("before", "steps", "after", "skipped"), [(16, 2, 8, 0), (8, 3, 16, 8), (8, 2, 32, 16), (16, 4, 8, 0)]
)
def test_no_sample_of_the_epoch_is_repeated(base, before, steps, after, skipped):
    first, second = loader(base, before), loader(base, after)
    seen = torch.cat([next(first).sample_id for _ in range(steps)]).tolist()
    assert second.load_state_dict(first.state_dict(), new_batch_size=True) == skipped
    left = (64 - len(seen) - skipped) // after
    rest = torch.cat([torch.empty(0, dtype=torch.int64), *(next(second).sample_id for _ in range(left))]).tolist()
    assert len(set(seen + rest)) == len(seen) + len(rest) == 64 - skipped
    assert next(second).position.epoch == 1
    again = loader(base, after)
    again.load_state_dict(second.state_dict())
    assert torch.equal(next(again).sample_id, next(second).sample_id)


def test_another_number_of_streams_is_still_refused(base):
    first, second = loader(base, 8), loader(base, 16, streams=8)
    next(first)
    with pytest.raises(UserError, match=r"continued: data\.streams was 4, now 8\. Restore"):  # the size is no reason
        second.load_state_dict(first.state_dict(), new_batch_size=True)
    with pytest.raises(UserError, match="global batch was 8, now 16"):
        loader(base, 16).load_state_dict(first.state_dict())


def test_a_run_continues_with_another_batch_size_in_a_new_folder(base):
    given = settings_in(base, "first", "samples=128")
    train_here(*given, "checkpoint.every=4", "checkpoint.keep_last=9")
    checkpoint = str(base / "first" / "checkpoints" / "step-00000004")
    new = settings_in(base, "second", "samples=128", "batch_size=16")
    with pytest.raises(UserError, match=r"batch_size = 8, and this run has 16.*--new-batch-size with a new output"):
        train_here(*new, resume=checkpoint)
    with pytest.raises(UserError, match="choose another output, with --resume"):
        train_here(*given, "batch_size=16", resume=checkpoint, new_batch_size=True)
    with pytest.raises(UserError, match="is at step 8 of 8 of this run: there is nothing to train"):
        train_here(*new, resume=str(base / "first" / "checkpoints" / "step-00000016"), new_batch_size=True)
    train_here(*new, resume=checkpoint, new_batch_size=True)
    (message,) = [r["message"] for r in metrics(base / "second", "event") if "New batch size" in r["message"]]
    assert "8 -> 16" in message
    assert "step-00000004 is step 2 of 8 now" in message
    assert "0 samples of this epoch are skipped" in message
    steps = metrics(base / "second", "train")
    assert [(record["step"], record["samples"]) for record in steps] == [(n, 16 * n) for n in range(3, 9)]
    expected = [0.001 * lr_scale(ScheduleConfig(warmup_steps=1), step=n - 1, total_steps=8) for n in range(3, 9)]
    assert [record["lr"] for record in steps] == pytest.approx(expected, rel=1e-6)
    train_here(*new, "samples=160", resume="latest")
    assert metrics(base / "second", "train")[-1]["step"] == 10
    # The same command again, as by a scheduler, continues the fork: steps are not counted anew.
    train_here(*new, "samples=192", resume=checkpoint, new_batch_size=True)
    assert [record["step"] for record in metrics(base / "second", "train")] == list(range(3, 13))
    shutil.move(checkpoint, base / "pruned")  # also when its origin was removed, as often as it is repeated
    for samples in (208, 224):
        train_here(*new, f"samples={samples}", resume=checkpoint, new_batch_size=True)
    assert metrics(base / "second", "train")[-1]["step"] == 14
    assert json.loads((base / "second" / "origin.json").read_text())["digest"]
    other = str(base / "first" / "checkpoints" / "step-00000008")
    with pytest.raises(UserError, match=r"of a run that was not begun from .*step-00000008"):
        train_here(*new, "samples=256", resume=other, new_batch_size=True)
    with pytest.raises(UserError, match=r"was not begun from .*nothing, which does not exist: choose another output"):
        train_here(*new, "samples=256", resume=str(base / "nothing"), new_batch_size=True)
    shutil.copytree(other, checkpoint)  # made anew since
    with pytest.raises(UserError, match=r"of a run that was not begun from .*step-00000004"):
        train_here(*new, "samples=256", resume=checkpoint, new_batch_size=True)


def test_a_fork_whose_disk_is_lost_continues_from_its_mirror(base):
    train_here(*settings_in(base, "origin", "samples=32", "checkpoint.every=2"))
    start = str(base / "origin" / "checkpoints" / "step-00000002")
    fork = settings_in(base, "fork", f"checkpoint.mirror=file://{base / 'mirror'}")
    train_here(*fork, "samples=48", resume=start)
    for lost in ("fork", "fork/checkpoints"):
        shutil.rmtree(base / lost)
        train_here(*fork, "samples=56", resume=start)
        assert [record["step"] for record in metrics(base / "fork", "train")][-1] == 7
        (message,) = [r["message"] for r in metrics(base / "fork", "event") if "was downloaded" in r["message"]][-1:]
        assert "step-00000006" in message or "step-00000007" in message
    another = str(base / "origin" / "checkpoints" / "step-00000004")
    shutil.rmtree(base / "fork")
    with pytest.raises(UserError, match="belongs to run"):
        train_here(*fork, "samples=56", resume=another)


@pytest.mark.parametrize(("before", "after"), [(8, 16), (16, 8)])
def test_a_batch_may_reach_the_number_of_prototypes(base, before, after):
    """Regression test: the queue of features, which only smaller batches need, made the start be refused."""
    of = ("objective.name=neuclip", "objective.prototypes=16", "objective.restart_every=3", "samples=128")
    train_here(
        *settings_in(
            base, f"from-{before}", *of, f"batch_size={before}", "checkpoint.every=4", "checkpoint.keep_last=9"
        )
    )
    (start,) = (base / f"from-{before}" / "checkpoints").glob("step-00000004")
    train_here(*settings_in(base, f"to-{after}", *of, f"batch_size={after}"), resume=str(start), new_batch_size=True)
    assert all(math.isfinite(record["loss"]) for record in metrics(base / f"to-{after}", "train"))
    assert metrics(base / f"to-{after}", "train")[-1]["samples"] == 128

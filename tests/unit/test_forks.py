"""Forks: runs that begin at another run's checkpoint, and are started again by the same command."""

import json
import shutil

import pytest

from pipeline.errors import UserError
from tests.metrics import metrics
from tests.training import prepare, settings_in, train_here


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = prepare(tmp_path_factory.mktemp("forks"), [30, 34])
    train_here(*settings_in(base, "first", "samples=48", "checkpoint.every=2", "checkpoint.keep_last=9"))
    return base


def test_the_command_of_a_fork_continues_it(base):
    first, second, third = (str(base / "first" / "checkpoints" / f"step-0000000{step}") for step in (2, 4, 6))
    fork = settings_in(base, "fork", "optimizer.lr=1e-4")
    with pytest.raises(UserError, match="is at step 6 of 6 of this run: there is nothing to train"):
        train_here(*fork, "samples=48", resume=third)
    train_here(*fork, "samples=48", resume=first)
    assert [record["step"] for record in metrics(base / "fork", "train")] == [3, 4, 5, 6]
    train_here(*fork, "samples=64", resume=first)
    shutil.move(first, base / "pruned")  # also when its origin was removed, as often as it is repeated
    for samples in (72, 80):
        train_here(*fork, f"samples={samples}", resume=first)
    assert [record["step"] for record in metrics(base / "fork", "train")] == list(range(3, 11))
    assert json.loads((base / "fork" / "origin.json").read_text())["digest"]
    shutil.copytree(second, first)  # made anew since
    for origin, more in ((second, ""), (str(base / "nothing"), ", which does not exist"), (first, "")):
        with pytest.raises(UserError, match=rf"of a run that was not begun from {origin}{more}: choose another output"):
            train_here(*fork, "samples=96", resume=origin)


def test_a_fork_whose_disk_is_lost_continues_from_its_mirror(base):
    start, another = (str(base / "first" / "checkpoints" / f"step-0000000{step}") for step in (4, 6))
    fork = settings_in(base, "mirrored", f"checkpoint.mirror=file://{base / 'mirror'}")
    train_here(*fork, "samples=48", resume=start)
    for lost in ("mirrored", "mirrored/checkpoints"):
        shutil.rmtree(base / lost)
        train_here(*fork, "samples=56", resume=start)
        assert [record["step"] for record in metrics(base / "mirrored", "train")][-1] == 7
        messages = [record["message"] for record in metrics(base / "mirrored", "event")]
        (message,) = [text for text in messages if "was downloaded" in text][-1:]
        assert "step-00000006" in message or "step-00000007" in message
    shutil.rmtree(base / "mirrored")
    with pytest.raises(UserError, match="belongs to run"):
        train_here(*fork, "samples=56", resume=another)

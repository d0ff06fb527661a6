"""The loader end to end in one process: the same global batches for every layout, exact resume, exactly once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config import parse
from pipeline.data.config import DataConfig
from pipeline.data.loader import Loader, build_loader
from pipeline.errors import UserError
from pipeline.world import World
from tests.shards import count_tokens, write_shards

SIZES = [7, 13, 5, 11, 9, 3]  # 48 samples in shards that no number of ranks divides
BATCH = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    write_shards(folder, SIZES)
    return folder


def loaders(folder: Path, *, ranks: int = 1, **settings: Any) -> list[Loader]:
    options = {"sources": str(folder), "streams": 4, "shuffle_buffer": 5, "workers": 0, "retries": 0} | settings
    config = parse(DataConfig, options)
    return [
        build_loader(
            config, world=World(rank=k, size=ranks), global_batch=BATCH, seed=3, image_size=16, tokenize=count_tokens
        )
        for k in range(ranks)
    ]


def run(ranks: list[Loader], steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample ids [steps, B] and images of global batches."""
    ids, images = [], []
    for _ in range(steps):
        batches = [next(loader) for loader in ranks]
        ids.append(torch.cat([batch.sample_id for batch in batches]))
        images.append(torch.cat([batch.image for batch in batches]))
        for batch in batches:
            assert torch.equal(batch.text[:, 0], batch.sample_id), "a caption strayed from its id"
    return torch.stack(ids), torch.stack(images)


@pytest.mark.parametrize(("ranks", "workers"), [(2, 0), (4, 0), (1, 3), (2, 2)])
def test_global_batches_are_the_same_on_every_layout(folder: Path, ranks: int, workers: int) -> None:
    expected = run(loaders(folder), 14)
    group = loaders(folder, ranks=ranks, workers=workers)
    try:
        found = run(group, 14)
    finally:
        for loader in group:
            loader.close()
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_every_sample_appears_once_per_epoch(folder: Path) -> None:
    (loader,) = loaders(folder)
    assert (loader.n, loader.steps_per_epoch, loader.layout.dropped) == (48, 6, 0)
    ids, _ = run([loader], 12)
    first, second = ids[:6].flatten(), ids[6:].flatten()
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(48))
    assert first.tolist() != second.tolist()


@pytest.mark.parametrize("stop", [1, 5, 6, 9])
@pytest.mark.parametrize("ranks", [1, 2])
def test_resume_continues_exactly_on_another_layout(folder: Path, stop: int, ranks: int) -> None:
    expected = run(loaders(folder), 15)
    (writer,) = loaders(folder)
    run([writer], stop)
    state = json.loads(json.dumps(writer.state_dict()))
    group = loaders(folder, ranks=ranks)
    for loader in group:
        loader.load_state_dict(state)
    found = run(group, 15 - stop)
    assert torch.equal(found[0], expected[0][stop:])
    assert torch.equal(found[1], expected[1][stop:])
    run([writer], 15 - stop)
    hashes = sum(loader.position.order_hash for loader in group) % 2**64
    assert f"{hashes:016x}" == writer.state_dict()["order_hash"]


def test_resume_with_another_order_is_refused(folder: Path) -> None:
    (writer,) = loaders(folder)
    run([writer], 2)
    (reader,) = loaders(folder, streams=2)
    with pytest.raises(UserError, match=r"data.streams was 4, now 2"):
        reader.load_state_dict(writer.state_dict())
    forged = writer.state_dict() | {"proof": "0" * 16}
    with pytest.raises(UserError, match="in another way"):
        loaders(folder)[0].load_state_dict(forged)


def test_numbers_that_do_not_fit_are_refused_before_any_step(folder: Path) -> None:
    for settings, ranks, message in [
        ({"streams": 3}, 1, "global batch of 8 cannot be shared among data.streams = 3.*2 or 4"),
        ({"streams": 4}, 3, "data.streams = 4 cannot be shared among 3 ranks"),
        ({"streams": 4, "workers": 3}, 2, "at most 2 workers"),
    ]:
        with pytest.raises(UserError, match=message):
            loaders(folder, ranks=ranks, **settings)

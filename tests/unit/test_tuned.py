"""The study `tuned`: exact importance weights, the prototype against the method, tuning, resumption, and its page."""

from __future__ import annotations

import csv
import itertools
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import torch
from torch import Tensor

from jobs.studies import tuned, tuned_page
from jobs.studies.schedule import in_processes
from jobs.studies.small_towers import orders
from jobs.studies.tuned_run import NearPlus, TunedSetting, blocks_of_two, load, log_weights, settings_of, train
from pipeline.objectives import build_objective
from tests.unit.objectives_reference import unit_features

VALUES = dict(zip(tuned.VALUES, (4e-3, 0.1, 2e-3, 1e-3, 1.5, -5.0, 0.5), strict=True))


def matchings(items: list[int]) -> Iterator[list[tuple[int, int]]]:
    """All divisions into pairs."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for other in rest:
        for further in matchings([one for one in rest if one != other]):
            yield [(first, other), *further]


def divisions(clusters: list[int]) -> Iterator[list[tuple[int, int]]]:
    """All equally likely divisions into blocks: a left-over of every odd cluster, pairs within, pairs of left-overs."""
    members = [[i for i, c in enumerate(clusters) if c == one] for one in sorted(set(clusters))]
    choices = [[*own] if len(own) % 2 else [None] for own in members]
    for left in itertools.product(*choices):
        within = [list(matchings([i for i in own if i not in left])) for own in members]
        among = list(matchings([i for i in left if i is not None]))
        for parts in itertools.product(*within, among):
            yield [block for part in parts for block in part]


@pytest.mark.parametrize("clusters", [[0, 0, 0, 1, 1, 1, 2, 2], [0, 0, 0, 0, 1, 1, 1, 2], [0] * 8])
def test_weighted_batches_have_the_dataset_s_mean_as_their_expectation(clusters: list[int]) -> None:
    """By enumeration of all batches of two blocks, in float64: the mean over all negatives of each anchor is exact."""
    n, labels = len(clusters), torch.tensor(clusters)
    sizes, terms = torch.bincount(labels), torch.rand(n, n, dtype=torch.float64)
    totals, seen = torch.zeros(n, dtype=torch.float64), torch.zeros(n)
    for blocks in divisions(clusters):
        for batches in matchings(list(range(n // 2))):
            for batch in batches:
                ids = torch.tensor([i for block in batch for i in blocks[block]])
                weighted = log_weights(labels[ids], sizes, n=n).exp() * terms[ids][:, ids]
                totals[ids] += weighted.fill_diagonal_(0).sum(1) / (len(ids) - 1)
                seen[ids] += 1
    exact = terms.clone().fill_diagonal_(0).sum(1) / (n - 1)
    torch.testing.assert_close(totals / seen, exact, rtol=1e-12, atol=0)


def test_blocks_are_drawn_as_the_weights_assume() -> None:
    """The partners of sample 0, in a cluster of three, over 6,000 divisions: within five standard errors."""
    clusters = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
    generator, found = torch.Generator().manual_seed(0), torch.zeros(8)
    for _ in range(6000):
        blocks = blocks_of_two(clusters, generator=generator)
        assert sorted(blocks.flatten().tolist()) == list(range(8))
        (own,) = (block.tolist() for block in blocks if 0 in block)
        found[own[0] + own[1]] += 1  # the partner: sample 0 adds nothing
    expected = torch.tensor([0, 1 / 3, 1 / 3, 1 / 9, 1 / 9, 1 / 9, 0, 0])
    assert ((found / 6000 - expected).abs() <= 5 * (expected * (1 - expected) / 6000).sqrt()).all()


def advance(objective: object, seed: int, ids: Tensor) -> list[Tensor]:
    image, text = (f.requires_grad_() for f in unit_features(16, 8, seed=seed, dtype=torch.float32))
    loss = objective.loss(image, text, sample_ids=ids)  # type: ignore[attr-defined]
    loss.backward()
    objective.commit(lr_scale=0.7)  # type: ignore[attr-defined]
    return [x.grad for x in (image, text) if x.grad is not None]


def test_without_weights_the_prototype_is_neuclip_plus() -> None:
    setting = TunedSetting("synthetic", 256, 16, 512, learned=True, dim=8)
    near = NearPlus("near_unweighted", setting, VALUES, seed=0)
    plus = build_objective(
        settings_of("neuclip_plus", setting, VALUES), dim=8, batch_size=16, dataset_size=256, total_steps=32
    )
    order = orders(256, 16, seed=3)
    for step in range(20):
        ids = next(order)
        for ours, theirs in zip(advance(near, step, ids), advance(plus, step, ids), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=1e-7)
    assert near.logit_parameters()[0] == pytest.approx(plus.logit_parameters()[0], abs=1e-5)


@pytest.mark.parametrize("arm", tuned.ARMS)
def test_every_arm_runs_and_a_seed_gives_the_same_result(arm: str, tmp_path: Path) -> None:
    setting = TunedSetting("synthetic", 256, 16, 768, learned=True, hidden=16, dim=8)
    one, two = (train(arm, setting, VALUES, seed=1000, tuning=True, folder=tmp_path) for _ in range(2))
    assert {**one, "cpu_seconds": 0} == {**two, "cpu_seconds": 0}
    assert all(value is None or abs(value) < 1e6 for value in one.values())


def test_tuning_and_reported_pairs_differ(tmp_path: Path) -> None:
    setting = TunedSetting("synthetic", 64, 16, 64, learned=True)
    reported, tuning = (load(setting, seed=3, tuning=flag, folder=tmp_path) for flag in (False, True))
    assert not torch.equal(reported.held_out[0], tuning.held_out[0])
    sides = {"image": torch.randn(80, 4), "text": torch.randn(80, 4), "group": torch.tensor([0] * 70 + [1] * 10)}
    torch.save(sides, tmp_path / "features.pt")
    icons = TunedSetting("icons", 64, 16, 64, learned=True)
    reported, tuning = (load(icons, seed=3, tuning=flag, folder=tmp_path) for flag in (False, True))
    assert torch.equal(reported.training[0], tuning.training[0])
    both = torch.cat([tuning.held_out[0], reported.held_out[0]])
    assert len(both.unique(dim=0)) == 10


CELL = "icons-64-b16-learned"


def line(arm: str, seed: int, nce: float, **other: str) -> dict[str, str]:
    """A line of the CSV."""
    measures = {"nce": nce, "recall_at_1": 20 + seed, "mrr": 30, "error_batch": 1, "cpu_seconds": 2, "tau_end": 0.1}
    found = {"phase": "report", "cell": CELL, "arm": arm, "seed": seed, "trial": "0", "samples": 64, **other}
    return {key: str({**VALUES, **measures, **found}.get(key, "")) for key in tuned.COLUMNS}


def test_what_is_in_the_file_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    monkeypatch.setattr(tuned, "RUNS", tmp_path / "runs.csv")
    cell = "synthetic-256-b16-learned"
    runs = [tuned.TunedRun("tune", cell, "openclip", seed, "0", 64, tuple(VALUES.values())) for seed in (1000, 1001)]
    tuned.do(runs[:1], tmp_path, processes=1)
    tuned.do(runs, tmp_path, processes=1)
    with (tmp_path / "runs.csv").open() as file:
        assert [row["seed"] for row in csv.DictReader(file)] == ["1000", "1001"]
    assert tuned.best(cell, "openclip")[0] == "0"
    assert tuned.best(cell, "near_openclip") == tuned.best(cell, "openclip")


def test_more_trials_leave_the_choice_of_the_cell_without_them_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {"1000": [5, 3, 2, 4, 6, 7, 8, 9, 1, 2.5], "1001": {1: 3, 2: 4, 8: 1.5, 9: 0.5}}
    pairs = [(seed, enumerate(found) if isinstance(found, list) else found.items()) for seed, found in losses.items()]
    lines = [
        {**line("siglip", int(seed), nce, phase="tune", trial=str(trial)), "seed": seed, "lr": str(trial / 100)}
        for seed, found in pairs
        for trial, nce in found
    ]
    monkeypatch.setattr(tuned, "finished", lambda: lines)
    assert tuned.finalists(CELL, "siglip") == ["2", "1"]
    assert tuned.best(CELL, "siglip")[0] == "1"  # of the first eight, and of the best two by the first seed
    more = f"{CELL}-16trials"
    assert tuned.finalists(more, "siglip") == ["8", "2", "9", "1"]
    assert tuned.best(more, "siglip")[0] == "8"
    assert tuned.best(more, "siglip")[1][0] == 0.08
    with pytest.raises(click.BadParameter):
        tuned.setting_of(f"{CELL}-trials", 64)
    runs = tuned.trials_of(more, ["siglip"], seeds=[1000], chosen={"siglip": ["3"]})
    assert runs[0].cell == CELL  # trials are shared


def test_runs_that_have_not_begun_are_cancelled_when_the_caller_stops(tmp_path: Path) -> None:
    calls = {n: (["sh", "-c", f"sleep 0.3; touch {tmp_path / str(n)}"],) for n in range(9)}
    results = in_processes(subprocess.run, calls, parallel=1)
    next(results)
    results.close()
    assert len(list(tmp_path.iterdir())) < 5


def test_the_page_compares_at_equal_samples_and_at_equal_time() -> None:
    lines = [line("openclip", s, 4.0 + 0.01 * s) for s in range(5)]
    lines += [line("batch_gcl", s, 3.9 + 0.01 * s + 0.001 * s**2) for s in range(5)]
    lines += [line("openclip", s, 3.8, phase="equal", trial="3 for batch_gcl") for s in range(5)]
    found = tuned_page.comparisons(lines, "report", CELL)
    name = ("report", CELL, "batch_gcl")
    assert found[*name, "openclip", "nce"].mean == pytest.approx(-0.1 + 0.006)
    assert found[*name, f"openclip{tuned_page.EQUAL}", "nce"].mean == pytest.approx(0.1 + 0.02 + 0.006)
    text = tuned_page.page(lines, arms=tuned.ARMS)
    assert "the tables: 2 of 2" in text  # R@1 does not differ
    assert "**-0.094 ± " in text


def test_the_page_compares_with_openclip_at_four_times_the_batch() -> None:
    small, large = "icons-16384-b16-learned", "icons-16384-b64-learned"
    lines = [line("openclip", s, 4.1 + 0.01 * s, cell=large) for s in range(5)]
    lines += [line("batch_gcl", s, 4.0 + 0.01 * s, cell=small) for s in range(5)]
    found = tuned_page.comparisons(lines, "report", small)
    assert {key[2:]: round(gain.mean, 6) for key, gain in found.items()} == {
        ("batch_gcl", tuned_page.LARGER, "nce"): -0.1,
        ("batch_gcl", tuned_page.LARGER, "recall_at_1"): 0,
    }
    assert not tuned_page.comparisons(lines, "report", large)

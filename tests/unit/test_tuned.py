"""The study `tuned`: exact importance weights, the prototype against the method, tuning, resumption, and its page."""

from __future__ import annotations

import csv
import subprocess
from pathlib import Path

import click
import pytest
import torch

from jobs.studies import tuned, tuned_page
from jobs.studies.schedule import in_processes
from jobs.studies.tuned_run import TunedSetting, load, train

VALUES = dict(zip(tuned.VALUES, (4e-3, 0.1, 2e-3, 1e-3, 1.5, -5.0, 0.5), strict=True))


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
    assert f"| {CELL} | – | – | – | **-0.094 ± " in text  # after siglip, fastclip_v3 and amorlip, which were not run


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


def test_the_figure_has_the_gains_of_the_cells_with_wide_towers(monkeypatch: pytest.MonkeyPatch) -> None:
    cell, drawn = "icons-64-b16-learned-w2048-16trials", []
    lines = [line("openclip", seed, 4.0, cell=cell) for seed in (10, 11)]
    lines += [line("neuclip_power", seed, 3.9 + seed / 1000, cell=cell) for seed in (10, 11)]
    lines += [line("openclip", s, 3.95, cell=cell, phase="equal", trial="0 for neuclip_power") for s in (10, 11)]
    monkeypatch.setattr("matplotlib.axes.Axes.errorbar", lambda _, x, y, **how: drawn.append((how["label"], x)))
    assert "<svg" in tuned_page.figure(lines)
    gains = {label: values for label, values in drawn[:3] if values}
    assert gains == {"openclip at equal CPU time": [pytest.approx(3.95 - 3.9105)]}

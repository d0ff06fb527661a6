"""The training benchmarks run at a small size and print the expected rows."""

from __future__ import annotations

import pytest

from tests.launch import run

pytestmark = pytest.mark.daily

SMALL = ("--arch", "scenes-vit-micro", "--batch", "8", "--rounds", "1", "--device", "cpu", "--threads", "1")


@pytest.mark.slow
def test_options_are_compared_with_the_baseline() -> None:
    options = ("none", "accumulation")
    done = run("jobs.bench.options", *SMALL, "--micro-batch", "4", "--options", *options)
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()[-2:]}
    assert tuple(rows) == options
    assert rows["none"][1] == rows["none"][5] == "1.00"
    assert all(float(figure) > 0 for row in rows.values() for figure in row[:-1])
    assert all(row[-1] == "?" for row in rows.values())  # the share of a CPU's peak is not known


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["whole", "gathered"])
def test_overhead_of_neuclip_is_measured(setting: str) -> None:
    small = ("--ranks", "4", "--prototypes", "8", "--micro-batch", "4", "--setting", setting)
    done = run("jobs.bench.neuclip_overhead", *SMALL[:-2], *small)
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if "%" in line}
    assert rows.pop("openclip")[1] == "+0.00%"
    expected = {"whole": ["neuclip"], "gathered": ["replicated", "prototypes"]}
    assert list(rows) == expected[setting], done.stdout


@pytest.mark.slow
def test_ways_of_computing_texts_are_compared() -> None:
    done = run("jobs.bench.text_tower", *SMALL, "--steps", "1")
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()[-4:]}
    assert list(rows) == ["trimmed", "packed", "groups_of_4", "padded"]
    assert rows["packed"][-1] == "1.00"
    assert float(rows["padded"][-1]) >= float(rows["trimmed"][-1]) >= float(rows["groups_of_4"][-1]) >= 1

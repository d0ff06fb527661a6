"""The training benchmarks run at a small size and print the expected rows."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jobs.bench.forecast import take_turns
from tests.launch import run

SMALL = ("--arch", "scenes-vit-micro", "--batch", "8", "--rounds", "1", "--device", "cpu", "--threads", "1")


def start_process(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
def test_options_are_compared_with_the_baseline() -> None:
    options = ("none", "accumulation", "image_features_cache")
    done = run("jobs.bench.options", *SMALL, "--micro-batch", "4", "--options", *options)
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()[-3:]}
    assert tuple(rows) == options
    assert rows["none"][1] == rows["none"][5] == "1.00"
    assert all(float(figure) > 0 for row in rows.values() for figure in row[:-1])
    assert all(row[-1] == "?" for row in rows.values())  # the share of a CPU's peak is not known


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["whole", "gathered"])
def test_overhead_of_neuclip_is_measured(setting: str) -> None:
    small = ("--ranks", "4", "--prototypes", "8", "--micro-batch", "4", "--setting", setting)
    done = run("jobs.bench.neuclip_overhead", *SMALL[:-2], *small)
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.endswith("%")}
    expected = {"whole": ["neuclip"], "gathered": ["replicated", "prototypes", "sharded"]}
    assert list(rows) == expected[setting], done.stdout


@pytest.mark.slow
def test_forecast_and_real_rate_are_measured_in_turns() -> None:
    small = ("--seconds", "3", "--rounds", "1", "--only", "scenes-vit-micro, batch 32")
    done = run("jobs.bench.forecast", *small)
    row = done.stdout.splitlines()[-1].removeprefix("scenes-vit-micro, batch 32").split()
    forecast, real, ratio = map(float, row[:3])
    assert forecast > 0
    assert real > 0
    assert ratio == pytest.approx(forecast / real, abs=0.01)


def test_a_run_that_ends_before_the_forecast_is_reported() -> None:
    waiting = start_process("import time; time.sleep(60)")
    ended = start_process("print('no data')")
    try:
        with pytest.raises(SystemExit, match="ended before the forecast:\nno data"):
            take_turns(waiting, ended)
    finally:
        waiting.kill()
        waiting.wait()

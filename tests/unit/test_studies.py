"""Studies: every declaration gives valid runs, equal runs are shared, and the statistics are correct."""

import functools
import itertools
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import scipy.stats
import torch

from jobs import study as job
from jobs.studies import declare
from jobs.studies.declare import SIZES, load_study
from jobs.studies.outcomes import COLUMNS, PAIRED, Outcome, holm
from jobs.studies.publish import as_markdown, render
from jobs.studies.unit import cost_of
from jobs.study import prepare_corpora, study_names
from pipeline.errors import UserError
from pipeline.metrics.mfu import training_flops
from pipeline.training.recipe import load_recipe, stages_of

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:objective.npn_lr", "ignore:objective.rho")
units_of = functools.cache(declare.units_of)


@pytest.mark.parametrize("name", study_names())
def test_every_study_gives_distinct_runs_at_every_size(name):
    study = load_study(name)
    assert set(study.columns) <= COLUMNS.keys() | PAIRED.keys()
    assert study.against is None or study.against in COLUMNS
    grouped = {arm for names in study.groups.values() for arm in names}
    for size in SIZES:
        units = units_of(name, size=size)
        assert len({unit.key for unit in units}) == len(units), "two arms of a study give the same run"
        assert len({unit.label for unit in units}) == len(units)
        assert size == "smoke" or study.baseline in {unit.arm for unit in units}
        assert {unit.seed for unit in units} == set(range(len({unit.seed for unit in units})))
        assert size != "desk" or not grouped or {unit.arm for unit in units} <= grouped, "an arm is in no figure"


def test_wrong_keys_and_values_of_a_size_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(declare, "FOLDER", tmp_path)
    for wrong, message in (
        ("rnks: 1", "nearest valid key is .*ranks"),
        ("ranks: 0", "ranks = 0"),
        ("", "ranks is required"),
    ):
        (tmp_path / "sizes.yaml").write_text(f"desk: {{anchors: 8, defaults: [], set: [], {wrong}}}")
        with pytest.raises(UserError, match=message):
            declare.load_size("desk")


def test_all_ablations_of_the_paper_are_included():
    """NeuCLIP Tables 17 to 21: the values of T_r, T_u and m, at the learning rate of Table 4."""
    runs = [unit.run.objective for unit in units_of("npn", size="paper") if unit.setting == "dfn14m" and not unit.seed]
    assert {run.restart_every for run in runs if run.npn == "prototypes"} == {20, 100, 500, 2500, 0}
    assert {run.inner_steps for run in runs} == {1, 5, 10, 20, 50}
    assert {run.prototypes for run in runs} == {1024, 2048, 4096, 8192}
    varied = [run.npn_lr for run in runs if run.name == "neuclip_literal" and run.npn_optimizer == "adagrad"]
    assert varied == [1.0] * len(varied)
    assert len(varied) >= 13


def test_the_equal_compute_arm_compensates_for_the_cost_of_the_network():
    """NeuCLIP Table 13, with the time shares of Table 5."""
    units = {(unit.setting, unit.arm): unit.run.samples for unit in units_of("methods", size="paper") if not unit.seed}
    shares = {"cc3m": 0.0930, "cc12m": 0.0603, "dfn14m": 0.0603, "dfn192m": 0.0598, "dfn1b": 0.0598}
    for setting, share in shares.items():
        less = units[setting, "literal_same_compute"] / units[setting, "neuclip_literal"]
        assert less == pytest.approx(1 - share, rel=1e-6)


def test_errors_are_compared_at_equal_samples_between_restarts():
    """NeuCLIP, section 5.2 and appendix B.6: five checkpoints per run, after the same numbers of samples."""
    seen: dict[str, set[tuple[int, ...]]] = {}
    for unit in units_of("normalizers", size="paper"):
        run, every = unit.run, unit.run.checkpoint.keep_every
        steps = [every * k for k in range(1, 6)]
        assert run.checkpoint.every == every
        assert steps[-1] < run.samples // run.batch_size < steps[-1] + every
        assert all(step % 500 for step in steps), "a restart"
        name = unit.setting.partition("-")[0].replace("1.4m", "14m")
        seen.setdefault(name, set()).add(tuple(step * run.batch_size for step in steps))
    assert {name: len(samples) for name, samples in seen.items()} == {"cc3m": 1, "dfn14m": 1}


def test_studies_share_identical_runs_whatever_their_folder(tmp_path):
    methods = {unit.arm: unit.key for unit in units_of("methods", size="desk") if unit.setting == "many-epochs"}
    gamma = {unit.arm: unit.key for unit in units_of("gamma", size="desk")}
    assert gamma["fastclip_v3"] == methods["fastclip_v3"]
    assert gamma["v3_constant"] not in methods.values()
    every = {unit.key for unit in units_of("methods", size="desk")}
    assert {unit.key for unit in units_of("temperature", size="desk")} < every
    here, there, other = (
        units_of("gamma", size="smoke", overrides=overrides)[0].key
        for overrides in ((), (f"output={tmp_path}",), ("optimizer.lr=1e-4",))
    )
    assert here == there != other
    with pytest.raises(UserError, match=r"methods, many-epochs, openclip: .*optimizer\.lr"):
        units_of("methods", size="desk", overrides=("optimizer.lrr=1",))


def test_comparisons_have_intervals_and_are_corrected_for_their_number():
    """Two arms with three seeds against the third, in two measures: differences, t and p by scipy, and Holm's step."""
    gains = {"openclip": (0, 0, 0), "neuclip": (0.10, 0.11, 0.12), "siglip": (0.01, -0.01, 0.02)}
    outcomes = []
    for (arm, gain), seed in itertools.product(gains.items(), range(3)):
        scores = {"scenes/colour": 0.3 + gain[seed], "scenes/shape": 0.5 + gain[seed]}
        result = {"curve": [{"samples": 100, "scores": scores}], "last": {"samples": 100}, "normalizers": []}
        outcomes.append(Outcome("many-epochs", arm, seed, f"{arm}{seed}", result))
    machine = {"cores": 2, "cpu": "x"}
    data = {"size": "desk", "command": "c", "date": "2026", "units": 9, "versions": {}, "machine": machine}
    page = as_markdown(load_study("methods"), data, outcomes, [])
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if ": `" in line]
    rows = {row[0]: row[1:] for row in table}
    (average,) = (name for name in rows if name.startswith("average") and "neuclip" in name)
    test = scipy.stats.ttest_1samp([100 * gain for gain in gains["neuclip"]], 0)
    low, high = test.confidence_interval(0.95)
    shown = [f"{11:+.2f}", f"{low:+.2f} to {high:+.2f}", f"{test.statistic:+.1f}", f"{test.pvalue:.2g}"]
    assert rows[average][:4] == shown
    assert float(rows[average][4]) == pytest.approx(len(rows) * test.pvalue, rel=0.05), "the smallest of all p"
    assert f"| {len(rows)} comparisons, " in page


def test_each_rank_of_a_run_gets_a_gpu_that_the_study_may_use(tmp_path, monkeypatch):
    """Regression tests: all ranks of a run shared one GPU, and CUDA_VISIBLE_DEVICES of the study was not heeded."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-a,6,7")
    used, seen, lock = list[str](), list[tuple[int, int]](), threading.Lock()

    def popen(words, *, env, **_):
        mine = env["CUDA_VISIBLE_DEVICES"].split(",")
        ranks = int(words[words.index("--nproc-per-node") + 1]) if "--nproc-per-node" in words else 1
        with lock:
            used.extend(mine)
            assert len(set(used)) == len(used), "two runs have a GPU at a time"
            assert set(mine) <= {"4", "GPU-a", "6", "7"}
            seen.append((ranks, len(mine)))

        def wait():
            time.sleep(0.05)
            with lock:
                used[:] = [name for name in used if name not in mine]
            return 0

        return SimpleNamespace(wait=wait, terminate=lambda: None)

    monkeypatch.setattr(job.subprocess, "Popen", popen)
    monkeypatch.setattr(job.signal, "signal", lambda *_: None)
    for ranks in ({1, 2}, {1, 4}):
        units = [unit for unit in units_of("scaling", size="desk") if unit.ranks in ranks]
        for unit in units:
            unit.folder(tmp_path).mkdir(parents=True, exist_ok=True)
        seen.clear()
        assert job.run_all(units, tmp_path, parallel=None) == {}
        assert sorted(seen) == sorted((unit.ranks, unit.ranks) for unit in units)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match="needs 4 GPUs, but 2 are visible here"):
        job.run_all(units, tmp_path, parallel=None)


def test_tasks_of_a_job_array_do_not_make_the_same_corpus_at_once(tmp_path, monkeypatch):
    """Regression test: the second of two ended with "Address already in use", because the table names the port."""
    running: list[str] = []

    def ingest(scenes, data):
        running.append("begin")
        time.sleep(0.2)
        running.append("end")

    monkeypatch.setattr("jobs.demo.ingest", ingest)
    monkeypatch.setattr("jobs.demo.make_suite", lambda *given: None)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: prepare_corpora({"wide"}, size="desk", place=tmp_path), range(2)))
    assert running == ["begin", "end"] * 2


def test_costs_are_medians_of_each_stage_times_its_steps():
    run = load_recipe(
        None,
        ["output=x", "data.sources=x", "samples=600", "batch_size=10", "data.streams=10", "schedule.warmup_steps=0",
         "model.arch=scenes-vit-tiny", "schedule.stages=[{until: 0.5, image_size: 24, text_tokens: 8}]"],
    )  # fmt: skip
    slow = {10: 500.0, 20: 2.0, 30: 2.0, 40: 900.0, 50: 5.0, 60: 5.0}  # the first record of a stage has its warm-up
    rows = [{"step": step, "cpu_ms": ms, "text_tokens": 8.0 if step <= 30 else 16.0} for step, ms in slow.items()]
    found = cost_of(run, rows)
    assert found["cpu_seconds"] == pytest.approx(30 * 2e-3 + 30 * 5e-3)
    small, full = (stage.run.model for stage in stages_of(run))
    per_sample = [training_flops(small, text_tokens=8), training_flops(full, text_tokens=16)]
    assert per_sample[0] < per_sample[1] / 2
    assert found["training_flops"] == pytest.approx(300 * sum(per_sample))
    assert cost_of(run, rows[:3]) == {}, "a stage without a record"


PUBLISHED = sorted((ROOT / "docs" / "studies").glob("*/results.json"))


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.parent.name)
def test_published_pages_match_their_data(path, tmp_path):
    (tmp_path / path.name).write_bytes(path.read_bytes())
    render(tmp_path)
    for name in ("results.csv", "results.md"):
        assert (tmp_path / name).read_text() == (path.parent / name).read_text(), f"{name}: neuclip study --render"
    pages = {f.name for f in tmp_path.iterdir()}
    assert pages == {f.name for f in path.parent.iterdir()} - {"plan.md"}  # plans are written by hand


def test_p_values_are_corrected_for_their_number():
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})  # Wikipedia's: 0.02, 0.03, 0.06, 0.06
    assert adjusted == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
    assert holm({"x": 0.7, "y": 0.6}) == {"y": 1.0, "x": 1.0}
    assert holm({"x": math.nan, "y": 0.02}) == {"x": 1.0, "y": 0.04}  # a diverged seed hides no other comparison

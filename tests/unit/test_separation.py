"""The separation study: paired runs, exact references, resumption, and correct statistics."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from jobs.studies import separation, separation_page
from jobs.studies.outcomes import Spread, holm, significant
from jobs.studies.separation import SeparationSetting, course_of, measure, train, watch
from jobs.studies.small_towers import draw_pairs, exact_log_normalizers, make_towers, oracle_loss

SMALL = SeparationSetting(pairs=128, batch=16, epochs=2, held_out=64, anchors=32, checks=4)
pytestmark = pytest.mark.filterwarnings("ignore:objective.npn_lr")


def test_every_seed_has_pairs_of_its_own() -> None:
    one, other = (course_of(SMALL, seed=seed) for seed in (0, 1))
    assert not torch.equal(one.pairs[0], other.pairs[0])


def test_pairs_depend_only_on_their_seed_and_share_their_classes() -> None:
    image, text = draw_pairs(256, seed=1)
    again, _ = draw_pairs(256, seed=1)
    other, _ = draw_pairs(256, seed=2)
    assert torch.equal(image, again)
    assert not torch.equal(image, other)
    assert image.shape == text.shape == (256, 64)
    assert float(image.std()) == pytest.approx(math.sqrt(1 + 0.15**2), rel=0.05)


def test_exact_normalizers_equal_the_definition() -> None:
    image, text = (torch.nn.functional.normalize(torch.randn(40, 8, dtype=torch.float64), dim=1) for _ in range(2))
    rows = torch.tensor([3, 17, 39])
    found = exact_log_normalizers(image, text, tau=0.1, rows=rows, block=2)
    for side, (a, b) in enumerate(((image, text), (text, image))):
        for place, i in enumerate(rows.tolist()):
            terms = [math.exp(float(a[i] @ b[j] - image[i] @ text[i]) / 0.1) for j in range(40) if j != i]
            assert float(found[side][place]) == pytest.approx(math.log(sum(terms) / 39), rel=1e-10)


def test_all_methods_of_a_seed_share_weights_and_batches() -> None:
    one, two, other = (course_of(SMALL, seed=seed) for seed in (5, 5, 6))
    weights, same, different = (parameters_to_vector(course.towers.parameters()) for course in (one, two, other))
    assert torch.equal(weights, same)
    assert not torch.equal(weights, different)
    batches = [[next(course.batches) for _ in range(SMALL.steps)] for course in (one, two)]
    assert all(torch.equal(a, b) for a, b in zip(*batches, strict=True))
    epoch = torch.cat(batches[0][: SMALL.pairs // SMALL.batch])
    assert torch.equal(epoch.sort().values, torch.arange(SMALL.pairs))


def test_building_towers_does_not_change_the_global_random_state() -> None:
    before = torch.random.get_rng_state()
    make_towers({"image": 64, "text": 64}, hidden=8, dim=4, seed=1)
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_oracle_gradient_is_that_of_the_global_loss() -> None:
    """With B = n it is the gradient of tau mean (log g1 + log g2)."""
    torch.manual_seed(0)
    tau, n = 0.2, 24
    image, text = (
        torch.nn.functional.normalize(torch.randn(n, 6, dtype=torch.float64), dim=1).requires_grad_() for _ in range(2)
    )
    similarity = image @ text.T
    own, positive = torch.eye(n, dtype=torch.bool), similarity.diagonal()[:, None]
    logs = [
        ((side - positive) / tau).masked_fill(own, -math.inf).logsumexp(1) - math.log(n - 1)
        for side in (similarity, similarity.T)
    ]
    expected = torch.autograd.grad(tau * (logs[0] + logs[1]).mean(), [image, text], retain_graph=True)
    exact = exact_log_normalizers(image.detach(), text.detach(), tau=tau, rows=torch.arange(n))
    found = torch.autograd.grad(oracle_loss(image, text, tau=tau, exact=exact), [image, text])
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)


def test_fastclip_v3_with_a_fixed_temperature_equals_v1() -> None:
    v1 = train({"name": "fastclip_v1", "tau": 0.1}, SMALL, seed=0)
    v3 = train({"name": "fastclip_v3", "tau_init": 0.1, "tau_min": 0.001, "tau_lr": 0.0, "rho": 2.0}, SMALL, seed=0)
    assert v3["nce"] == pytest.approx(v1["nce"], rel=1e-5)
    assert v3["error_in_use"] == pytest.approx(v1["error_in_use"], rel=1e-4)


def test_every_arm_trains_and_the_shared_trajectory_is_that_of_the_oracle() -> None:
    results = {arm: train(config, SMALL, seed=1) for arm, config in separation.ARMS.items()}
    assert all(math.isfinite(result[key]) for result in results.values() for key in ("nce", "mrr", "gcl", "chi2"))
    assert results["oracle"]["error_in_use"] is None
    assert all(result["error_in_use"] > 0 for arm, result in results.items() if arm != "oracle")
    watched = watch({"neuclip": separation.ARMS["neuclip"], "openclip": separation.ARMS["openclip"]}, SMALL, seed=1)
    assert set(watched) == {"neuclip", "openclip"}
    assert watched["openclip"]["error_in_use"] == watched["openclip"]["error_cold"] > 0


def test_a_perfect_model_gets_perfect_scores() -> None:
    course = course_of(SMALL, seed=0)

    class Perfect(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.eye(len(x), max(SMALL.pairs, SMALL.held_out))[: len(x)]

    course.towers = torch.nn.ModuleDict({"image": Perfect(), "text": Perfect()})
    found = measure(course, SMALL, seed=0)
    assert found["mrr"] == found["recall_at_1"] == 100
    assert found["nce"] == pytest.approx(0, abs=1e-6)
    assert found["gcl"] == pytest.approx(2 * -1.0, rel=1e-5)  # log g = -1 / tau on both sides
    assert found["chi2"] == pytest.approx(0, abs=1e-5)


def test_a_stopped_study_resumes_and_the_page_is_rendered_from_the_data(tmp_path: Path) -> None:
    runs = [run for run in separation.runs_of("smoke") if run.arm in ("openclip", "neuclip_u1") and run.batch == 32]
    messages: list[str] = []
    assert separation.run_all(runs[:2], place=tmp_path, parallel=1, report=messages.append) == []
    first = separation.path_of(runs[0], tmp_path).stat().st_mtime_ns
    assert separation.run_all(runs, place=tmp_path, parallel=1, report=messages.append) == []
    assert f"{len(runs)} runs, 2 of them done." in messages
    assert separation.path_of(runs[0], tmp_path).stat().st_mtime_ns == first
    results = separation.read_results("smoke", tmp_path)
    files = separation_page.publish("smoke", results, total=38, folder=tmp_path / "page", command="neuclip study")
    before = {file.name: file.read_bytes() for file in files}
    separation_page.render(tmp_path / "page")
    assert before == {file.name: file.read_bytes() for file in files}
    assert json.loads(before["results.json"])["commit"]
    page = before["results.md"].decode()
    assert f"{len(runs)} of 38 runs are finished" in page
    assert page.count("| `neuclip_u1` | 2 |") == 1


PAGE = {
    "size": "desk", "command": "c", "date": "2026", "units": 32, "versions": {}, "machine": {"cores": 2, "cpu": "x"},
}  # fmt: skip


def result(arm: str, seed: int, nce: float) -> dict:
    run = {"pairs": 512, "epochs": 1, "batch": 8, "arm": arm, "seed": seed}
    return {"run": run, "nce": nce, "mrr": 1.0, "gcl": 0.0, "chi2": 1.0, "error_in_use": 0.1, "error_cold": 0.2}


def test_differences_between_arms_are_paired_by_seed() -> None:
    results = [
        result("openclip", 0, 1.0),
        result("openclip", 1, 2.0),
        result("neuclip", 1, 1.5),
        result("neuclip", 0, 0.7),
    ]
    found = separation_page.both_ways(separation_page.comparisons(results))[512, 8, "neuclip", "openclip"]
    assert found.values == pytest.approx((-0.3, -0.5))
    assert found.standard_error == pytest.approx(0.1)
    assert found.t == pytest.approx(-4.0)
    turned = separation_page.both_ways(separation_page.comparisons(results))[512, 8, "openclip", "neuclip"]
    assert turned.values == pytest.approx((0.3, 0.5))
    lone = separation_page.both_ways(separation_page.comparisons(results[:1] + results[3:]))
    assert lone[512, 8, "neuclip", "openclip"].t is None


def test_holm_s_correction_on_a_worked_example() -> None:
    found = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})  # Wikipedia's: 0.02, 0.03, 0.06, 0.06
    assert found == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
    assert holm({"x": 0.7, "y": 0.6}) == {"y": 1.0, "x": 1.0}


def test_a_seed_that_diverged_makes_its_own_comparison_insignificant_only() -> None:
    """Regression test: it ended with an AttributeError, and a NaN of a p could hide all others."""
    good, diverged = Spread((1.0, 1.01, 0.99)), Spread((1.0, math.nan, 1.0))
    assert diverged.p == 1.0
    for compared in ({"a": diverged, "b": good}, {"b": good, "a": diverged}):
        assert significant(compared) == {"b"}


def test_only_what_survives_the_correction_is_bold() -> None:
    """Eight seeds: large differences, and two with t = -2.6 (p = 0.035), which the correction removes."""
    noise = {"batch_gcl": [1, -1, 2, -2, 3, -3, 4, -4], "fastclip_v1": [4, -4, 3, -3, 2, -2, 1, -1]}
    means = {"openclip": 0.0, "neuclip": -50.0, "batch_gcl": -2.7, "fastclip_v1": -2.7}
    results = [
        result(arm, seed, mean + noise.get(arm, [0.0] * 8)[seed]) for arm, mean in means.items() for seed in range(8)
    ]
    for one in results:
        if one["run"]["arm"] == "neuclip":
            one["nce"] += 0.01 * one["run"]["seed"] ** 2
    compared = separation_page.comparisons(results)
    weak = [(512, 8, arm, "openclip") for arm in noise]
    assert all(compared[cell].p == pytest.approx(0.035, abs=0.001) for cell in weak)
    clear = significant(compared)
    assert {(512, 8, "neuclip", "openclip"), (512, 8, "openclip", "neuclip")} & clear
    assert not clear & set(weak)
    page = separation_page.as_markdown({**PAGE, "runs": results}, [])
    (row,) = (line for line in page.splitlines() if line.startswith("| `neuclip` |"))
    (back,) = (line for line in page.splitlines() if line.startswith("| `openclip` |"))
    assert row.count("**") == back.count("**") == 2, "bold in both directions"

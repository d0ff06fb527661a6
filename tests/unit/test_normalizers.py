"""Exact log-normalizers compared with brute force, and the errors measured against them."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from jobs.normalizers import command
from pipeline.analysis import normalizer_error
from pipeline.analysis.normalizer_error import checkpoints_of, compare, exact_log_normalizers, measure, run_of
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.objectives import parse_objective
from tests.launch import run as launch
from tests.shards import write_shards


def brute_force(anchors, others, tau):
    s = anchors @ others.T
    h = (s - s.diagonal()[:, None]) / tau[:, None]
    h.fill_diagonal_(-math.inf)
    return h.exp().sum(1).div(len(others) - 1).log()


@pytest.mark.parametrize("columns", [1, 64, 10_000])
def test_exact_log_normalizers_equal_brute_force(columns, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    image, text = (
        torch.nn.functional.normalize(torch.randn(700, 8, generator=generator, dtype=torch.float64), dim=1)
        for _ in range(2)
    )
    tau = 0.05 + 0.1 * torch.rand(700, generator=generator, dtype=torch.float64)
    expected = brute_force(image, text, tau)
    for start, stop in ((0, 700), (300, 500), (699, 700)):
        monkeypatch.setattr(normalizer_error, "CPU_BLOCK", columns * (stop - start))
        found = exact_log_normalizers(image[start:stop], text, tau_b=tau[start:stop], first=start)
        assert torch.allclose(found, expected[start:stop], rtol=1e-12)
    with_eps = exact_log_normalizers(image, text, tau_b=tau, first=0, eps=0.5)
    assert torch.allclose(with_eps, torch.log(0.5 + expected.exp()), rtol=1e-12)
    assert (with_eps - expected).abs().max() > 0.1
    cold = exact_log_normalizers(image, text, tau_b=torch.full((700,), 0.004, dtype=torch.float64), first=0)
    assert cold.isfinite().all()  # exp(h) alone overflows fp32 here, and nearly overflows float64


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """A few steps of fastclip_v3 on 40 pairs with batches of 16; the last 8 pairs do not fill a batch."""
    folder = tmp_path_factory.mktemp("run")
    write_shards(folder / "data", [20, 20])
    launch(
        "jobs.train", "--recipe", "jobs/recipes/desk.yaml", "objective.name=fastclip_v3", f"output={folder / 'run'}",
        f"data.sources={folder / 'data'}", "samples=64", "batch_size=16", "data.streams=2", "schedule.warmup_steps=0",
        "checkpoint.every=2", "checkpoint.keep_every=2",
    )  # fmt: skip
    return folder / "run"


def test_a_checkpoint_is_measured_over_its_dataset(finished_run):
    checkpoints = checkpoints_of(finished_run, on_damage=pytest.fail)
    assert [checkpoint.step for checkpoint in checkpoints] == [2, 4]
    run = run_of(checkpoints[-1])
    measured = measure(run, checkpoints[-1], world=World())
    assert (measured["pairs"], measured["left_over"], measured["rows"]) == (32, 8, 32)
    ids, values, _ = compare(run, checkpoints[-1], world=World(), limit=None)
    assert len(set(ids.tolist())) == 32
    exact, cold = values[:, :2], values[:, 2:4]
    # The measured state is that of the checkpoint.
    table = checkpoints[-1].read_rows("per_sample", 0, 40)[:, :2]
    seen = ~torch.isneginf(table[ids, 0])
    assert seen.any()
    assert torch.allclose(cold[seen, 0], table[ids, 0][seen], atol=1e-5)
    difference = cold.double() - exact.double()
    assert measured["cold"]["mse"] == pytest.approx(float(difference.square().mean()))
    assert measured["cold"]["bias"] == pytest.approx(float(difference.mean()))
    # With few anchors, the sums still include all pairs.
    ids, few, sizes = compare(run, checkpoints[-1], world=World(), limit=10)
    assert (len(ids), sizes["pairs"]) == (16, 32)
    assert torch.equal(few[:, :2], exact[:16])


def test_the_exact_values_use_the_eps_of_the_method(finished_run):
    """With an eps so large that g is negligible, every estimate and every exact value is log eps."""
    checkpoint = checkpoints_of(finished_run, on_damage=pytest.fail)[-1]
    run = run_of(checkpoint, changes={"objective": {"eps": 1e6}})
    measured = measure(run, checkpoint, world=World())
    assert measured["mean"] == pytest.approx(math.log(1e6), abs=0.1)
    assert measured["cold"]["mse"] < 0.01
    assert measured["in_use"]["mse"] < 0.01


def test_damaged_checkpoints_are_reported_and_siglip_is_rejected(finished_run, tmp_path):
    with pytest.raises(UserError, match="no good checkpoints"):
        checkpoints_of(tmp_path, on_damage=lambda message: None)
    checkpoint = checkpoints_of(finished_run, on_damage=pytest.fail)[-1]
    siglip = replace(run_of(checkpoint), objective=parse_objective({"name": "siglip"}))
    with pytest.raises(UserError, match="siglip has no normalizers"):
        measure(siglip, checkpoint, world=World())
    path = checkpoint.path / "objective.safetensors"
    before = path.read_bytes()
    messages: list[str] = []
    try:
        path.write_bytes(before[:-1])
        assert [good.step for good in checkpoints_of(finished_run, on_damage=messages.append)] == [2]
    finally:
        path.write_bytes(before)
    assert "objective.safetensors" in messages[0]


def test_a_run_that_cannot_be_written_is_refused_before_it_is_measured(finished_run, tmp_path):
    copy = shutil.copytree(finished_run, tmp_path / "run")
    (copy / "normalizers.jsonl").unlink(missing_ok=True)
    (copy / "normalizers.jsonl").mkdir()
    done = CliRunner().invoke(command, [str(copy)], standalone_mode=False)
    assert isinstance(done.exception, UserError)
    assert "normalizers.jsonl: it is a folder" in str(done.exception)


def test_the_command_writes_the_values_that_it_prints(finished_run):
    shown = launch("jobs.normalizers", str(finished_run), ranks=2).stdout
    records = [json.loads(line) for line in (finished_run / "normalizers.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [2, 4]
    alone = measure(run_of(c := checkpoints_of(finished_run, on_damage=pytest.fail)[-1]), c, world=World())
    assert records[-1]["cold"]["mse"] == pytest.approx(alone["cold"]["mse"], rel=1e-4)
    assert f"{alone['in_use']['mse']:.4f}" in shown
    assert "8 of the dataset" in shown


def test_settings_that_do_not_fit_the_checkpoint(finished_run):
    """Regression tests: another batch size counted other samples; towers of another size were called a bug."""
    checkpoint = checkpoints_of(finished_run, on_damage=pytest.fail)[-1]
    measured = measure(run_of(checkpoint, changes={"batch_size": 8}), checkpoint, world=World())
    assert (measured["samples"], measured["batch_size"]) == (64, 8)
    other = run_of(checkpoint, changes={"model": {"context_length": 8}})
    with pytest.raises(UserError, match=r"The weights of .* do not fit the towers of .*: leave model\.arch, "):
        measure(other, checkpoint, world=World())

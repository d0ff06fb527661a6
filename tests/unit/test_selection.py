"""Joint selection: its maths are those of a plain reference, and runs select the same pairs however they are run."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import Tensor

from jobs.plan import command as plan
from jobs.write_features import command
from pipeline.checkpoint.reader import Checkpoint
from pipeline.errors import UserError
from pipeline.objectives.selection import View, added_losses, gumbel_noise, pair_losses, select
from pipeline.training.pair_selection import Selection
from pipeline.training.recipe import load_recipe
from tests.launch import run
from tests.metrics import equal, metrics, weights
from tests.shards import write_shards
from tests.towers import TINY
from tests.training import SMALL, train_here
from tests.unit.objectives_reference import unit_features

SIZE = 14


def view(seed: int, *, bias: float | None = None, tau: float = 0.1) -> View:
    image, text = unit_features(SIZE, 6, seed=seed)
    return View(image, text, tau, bias)


def total_loss(view: View, rows: list[int]) -> Tensor:
    """The summed loss of these pairs as a batch, as open_clip computes it."""
    logits = view.image[rows] @ view.text[rows].T / view.tau + (view.bias or 0.0)
    if view.bias is not None:
        return -F.logsigmoid(logits * (2 * torch.eye(len(rows)) - 1)).sum()
    labels = torch.arange(len(rows))
    return (F.cross_entropy(logits, labels, reduction="sum") + F.cross_entropy(logits.T, labels, reduction="sum")) / 2


@pytest.mark.parametrize("bias", [None, -3.0])
@pytest.mark.parametrize("chosen", [[3], [9, 0, 4, 11]])
def test_what_a_pair_adds_is_the_difference_of_two_batches(
    bias: float | None, chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.objectives.pairwise.LEAST_ROWS", 3)
    monkeypatch.setattr("pipeline.objectives.pairwise.CPU_BLOCK", 1)
    model = view(1, bias=bias)
    found = added_losses(model, torch.tensor(chosen))
    for row in set(range(SIZE)) - set(chosen):
        expected = total_loss(model, [*chosen, row]) - total_loss(model, chosen)
        assert float(found[row]) == pytest.approx(float(expected), rel=1e-10)
    alone = pair_losses(model)
    if bias is None:
        assert float(alone.sum()) == pytest.approx(float(total_loss(model, list(range(SIZE)))), rel=1e-10)
    else:
        assert float(alone[2]) == pytest.approx(float(total_loss(model, [2])), rel=1e-10)


@pytest.mark.parametrize(("chunks", "sizes"), [(1, [5]), (2, [2, 3]), (5, [1] * 5), (16, [1] * 5)])
def test_pairs_are_drawn_as_by_a_plain_loop(chunks: int, sizes: list[int]) -> None:
    learner, reference = view(1), view(2, tau=0.05)
    noise = gumbel_noise(chunks, SIZE, seed=0, step=3).double()
    rows, alone = select(learner, reference, count=5, chunks=chunks, noise=noise)
    assert torch.equal(alone, pair_losses(learner) - pair_losses(reference))
    chosen: list[int] = []
    for size, draw in zip(sizes, noise, strict=False):
        keys = {}
        for row in set(range(SIZE)) - set(chosen):
            gain = alone[row]
            if chosen:
                gain = sum(
                    sign * (total_loss(model, [*chosen, row]) - total_loss(model, chosen))
                    for sign, model in ((1, learner), (-1, reference))
                )
            keys[row] = float(gain + draw[row])
        chosen += sorted(keys, key=lambda row: -keys[row])[:size]
    assert rows.tolist() == sorted(chosen)


def test_one_chunk_draws_in_proportion_to_the_exponential_of_the_learnability() -> None:
    learner, reference = view(1), view(2)
    counts = torch.zeros(SIZE)
    for step in range(4000):
        noise = gumbel_noise(1, SIZE, seed=0, step=step)
        counts[select(learner, reference, count=1, chunks=1, noise=noise)[0]] += 1
    expected = (pair_losses(learner) - pair_losses(reference)).softmax(0)
    assert float((counts / 4000 - expected).abs().max()) < 0.03  # four standard deviations


def test_the_best_batch_has_the_largest_probability_with_little_noise() -> None:
    """Without noise and one pair at a time, it is the greedy choice, which is near the best of all batches."""
    learner, reference = view(1), view(2)
    rows, _ = select(learner, reference, count=4, chunks=4, noise=torch.zeros(4, SIZE))
    values = sorted(
        float(total_loss(learner, list(batch)) - total_loss(reference, list(batch)))
        for batch in itertools.combinations(range(SIZE), 4)
    )
    chosen = float(total_loss(learner, rows.tolist()) - total_loss(reference, rows.tolist()))
    assert chosen > values[int(0.95 * len(values))]


def settings(base: Path, output: str, *more: str, stored: str = "of-shards") -> list[str]:
    return [f"output={base / output}", f"data.sources={base / 'shards'}", "samples=48",
            f"model.arch={base / 'small.json'}", "optimizer.lr=1e-2", "seed=1", "selection.ratio=0.5",
            f"selection.features={base / stored}", "selection.chunks=4", *more]  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards, other shards, a run whose features are the reference's, and a run that selects by them."""
    folder = tmp_path_factory.mktemp("selection")
    write_shards(folder / "shards", [20, 44])
    write_shards(folder / "other", [48], first=100)
    (folder / "small.json").write_text(json.dumps(TINY))
    train_here(f"output={folder / 'teacher'}", f"data.sources={folder / 'shards'}", "samples=64",
               f"model.arch={folder / 'small.json'}", "optimizer.lr=1e-2")  # fmt: skip
    for data in ("shards", "other"):
        given = [str(folder / data), "--model", str(folder / "teacher"), "--workers", "0", "--device", "cpu"]
        assert CliRunner().invoke(command, [*given, "--output", str(folder / f"of-{data}")]).exit_code == 0
    train_here(*settings(folder, "whole"))
    return folder


def values(base: Path, output: str, key: str = "loss") -> list[float]:
    return [record[key] for record in metrics(base / output, "train")]


def test_selected_pairs_are_those_of_high_learnability_and_what_is_left_is_counted(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[list[int], list[int]]] = []
    choose = Selection.choose

    def watched(self: Selection, batch: Any, *args: Any, **kwargs: Any) -> Any:
        found = choose(self, batch, *args, **kwargs)
        for row, sample_id in zip(found[1], found[0].sample_id.tolist(), strict=True):  # images follow their ids
            assert torch.equal(row, batch.image[batch.sample_id.tolist().index(sample_id)])
        seen.append((batch.sample_id.tolist(), found[0].sample_id.tolist()))
        return found

    monkeypatch.setattr(Selection, "choose", watched)
    train_here(*settings(base, "stopped", "checkpoint.every=3"))
    assert [(len(read), len(set(kept)), set(kept) <= set(read)) for read, kept in seen] == [(16, 8, True)] * 6
    assert sorted(i for read, _ in seen[:4] for i in read) == list(range(64))  # an epoch reads every sample once
    last = metrics(base / "stopped", "train")[-1]
    assert (last["samples"], last["samples_not_selected"], last["epoch"]) == (48, 48, 1.5)
    assert any("8 of 16 pairs read" in record.get("message", "") for record in metrics(base / "whole", "event"))

    for step in sorted((base / "stopped" / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(step)
    train_here(*settings(base, "stopped", "checkpoint.every=3"), resume="latest")
    assert [kept for _, kept in seen[6:]] == [kept for _, kept in seen[3:6]]
    assert equal(weights(base / "stopped"), weights(base / "whole"))


def test_off_is_the_plain_run_and_other_settings_work_together(base: Path) -> None:
    off = ("selection.ratio=null", "selection.features=null")
    train_here(*settings(base, "plain", *off))
    assert "samples_not_selected" not in metrics(base / "plain", "train")[-1]
    train_here(*settings(base, "plain-16-chunks", *off, "selection.chunks=16", "selection.image_size=8"))
    assert values(base, "plain-16-chunks") == values(base, "plain")
    combined = ("engine.micro_batch=4", "model.text_batching=packed", "objective.distill=0.5", "selection.image_size=8",
                f"data.teacher_features={base / 'of-shards'}",
                "schedule.stages=[{until: 0.5, image_size: 8}]")  # fmt: skip
    train_here(*settings(base, "combined", *combined))
    assert len(values(base, "combined", "distillation_loss")) == 6
    train_here(*settings(base, "micro", "engine.micro_batch=4"))
    assert values(base, "micro") == pytest.approx(values(base, "whole"), rel=1e-4)
    more = ("batch_size=8", "schedule.warmup_steps=1", "data.streams=4", "samples=null", "epochs=2")
    assert load_recipe(None, settings(base, "x", *more)).samples == 64


def test_a_smaller_image_changes_the_scores_and_leaves_the_weights_as_they_are(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "pipeline.training.pair_selection.gumbel_noise", lambda chunks, size, **_: torch.zeros(chunks, size)
    )
    train_here(*settings(base, "small", "selection.image_size=8", "optimizer.lr=1e-12", "selection.chunks=1"))
    train_here(*settings(base, "large", "optimizer.lr=1e-12", "selection.chunks=1"))
    assert values(base, "small", "learnability") != values(base, "large", "learnability")
    for selected, read in zip(
        values(base, "large", "selected_learnability"), values(base, "large", "learnability"), strict=True
    ):
        assert selected > read  # without noise, and in one chunk, the most learnable ones
    for name, value in weights(base / "small").items():
        if name != "logit_scale":  # the objective's, with a rate of its own
            assert torch.allclose(value, weights(base / "large")[name], atol=1e-9), name


def test_a_sigmoid_learner_needs_a_reference_with_a_bias(base: Path) -> None:
    with pytest.raises(UserError, match="reference needs a bias"):
        train_here(*settings(base, "refused", "objective.name=siglip"))
    with pytest.raises(UserError, match="reference needs a bias"):  # regression test: it was taken for a softmax loss
        train_here(*settings(base, "refused", "objective.name=siglip", "objective.bias_init=0"))
    sigmoid = [f"output={base / 'sigmoid'}", f"data.sources={base / 'shards'}", "samples=8",
               f"model.arch={base / 'small.json'}", "objective.name=siglip"]  # fmt: skip
    train_here(*sigmoid)
    train_here(*sigmoid, f"output={base / 'zero'}", "objective.bias_init=0", "objective.tau_lr=0")
    assert float(weights(base / "zero")["logit_bias"]) == 0.0, "regression test: a bias of 0 was not stored"
    assert "logit_bias" not in weights(base / "plain")
    given = [str(base / "shards"), "--model", str(base / "sigmoid"), "--workers", "0", "--device", "cpu"]
    assert CliRunner().invoke(command, [*given, "--output", str(base / "of-sigmoid")]).exit_code == 0
    train_here(*settings(base, "sigmoid-run", "objective.name=siglip", stored="of-sigmoid"))
    assert len(values(base, "sigmoid-run", "selected_learnability")) == 6


@pytest.mark.parametrize(("changed", "message"), [
    (["selection.ratio=1"], "selection.ratio"),
    (["selection.ratio=0"], "selection.ratio"),
    (["selection.ratio=0.55"], r"would read 17.77778 pairs .* data.streams = 4 divides. Use selection.ratio=0.5, "),
    (["selection.ratio=0.01"], r"Use selection.ratio=0.333, which reads 12"),
    (["selection.ratio=0.9"], r"fewer than the global batch of 80 that a step reads. .* smaller selection.ratio"),
    (["selection.features=null"], "needs a ratio between 0 and 1 and the folder"),
    (["selection.ratio=0.2"], r"reads? 10 pairs in a step: .* Use selection.ratio=0.333, which reads 12"),
    (["selection.image_size=10"], "not a multiple of this tower's patches of 8 px: use 8"),
    (["selection.image_size=8", "engine.deepspeed=zero3_bf16"], "ZeRO stage 3"),
    (["model.lock_image=true", "model.image_features_cache=x", "data.crop.scale=[1,1]", "data.crop.ratio=[1,1]"],
     "Leave one of them out"),
])  # fmt: skip
def test_settings_that_do_not_fit_are_refused(base: Path, changed: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        train_here(*settings(base, "refused", *changed))
    assert not (base / "refused").exists()


@pytest.mark.parametrize(
    ("batch", "streams", "ratio"),
    [(8, 4, 0.01), (8, 4, 0.2), (8, 4, 0.55), (8, 4, 0.61), (8, 4, 0.83), (16384, 8, 0.94), (32768, 32, 0.89)],
)
def test_the_ratio_that_a_message_suggests_is_accepted(base: Path, batch: int, streams: int, ratio: float) -> None:
    given = [*settings(base, "x"), f"batch_size={batch}", f"data.streams={streams}", "schedule.warmup_steps=1",
             f"samples={batch}"]  # fmt: skip
    with pytest.raises(UserError) as caught:
        load_recipe(None, [*given, f"selection.ratio={ratio}"])
    ratio, read = re.search(r"Use selection\.ratio=([0-9.]+), which reads (\d+)", str(caught.value)).groups()  # type: ignore[union-attr]
    assert load_recipe(None, [*given, f"selection.ratio={ratio}"]).read_batch == int(read)


def test_another_ratio_needs_a_new_batch_size_and_the_count_goes_on(base: Path) -> None:
    train_here(*settings(base, "half", "checkpoint.every=3"))
    (checkpoint,) = (base / "half" / "checkpoints").glob("step-00000003")
    new = [*settings(base, "more"), "selection.ratio=0.75"]
    with pytest.raises(
        UserError,
        match=r"batch_size = 8 of 16 pairs read \(selection\.ratio = 0\.5\), and this run has 8 of 32 pairs read "
        r"\(selection\.ratio = 0\.75\)\..*--new-batch-size",
    ):
        train_here(*new, resume=str(checkpoint))
    train_here(*new, resume=str(checkpoint), new_batch_size=True)
    counted = [(record["samples"], record["samples_not_selected"]) for record in metrics(base / "more", "train")]
    assert counted == [(32, 48), (40, 72), (48, 96)]  # 24, and 24 in each step
    train_here(*settings(base, "none"), "selection.ratio=null", "selection.features=null",
               resume=str(base / "more" / "checkpoints" / "step-00000006"), new_batch_size=True)  # fmt: skip

    meta = json.loads((checkpoint / "checkpoint.json").read_text())
    assert meta["samples_not_selected"] == Checkpoint(checkpoint, meta).samples_not_selected == 24
    del meta["samples_not_selected"]  # as an earlier version wrote it
    assert Checkpoint(checkpoint, meta).samples_not_selected == 24


def test_features_of_other_data_are_refused_under_the_settings_name(base: Path) -> None:
    with pytest.raises(UserError, match=r"selection\.features=.* are of other data than this run"):
        train_here(*settings(base, "refused", stored="of-other"))
    with pytest.raises(UserError, match=r"selection\.features=.*no features of `neuclip features`"):
        train_here(*settings(base, "refused", stored="nowhere"))


def test_the_plan_counts_what_is_read_and_scored(base: Path) -> None:
    def planned(*more: str) -> str:
        given = [*settings(base, "planned", *more), "batch_size=8", "data.streams=4", "schedule.warmup_steps=1"]
        result = CliRunner().invoke(plan, ["--ranks", "1", *given])
        assert result.exit_code == 0, result.output
        return result.output

    assert f"selection.features={base / 'nowhere'} is not there yet" in planned(
        f"selection.features={base / 'nowhere'}"
    )
    with pytest.raises(UserError, match=r"selection\.features=.* are of other data than this run"):
        plan.main(["--ranks", "1", *settings(base, "planned", stored="of-other"), "batch_size=8", "data.streams=4",
                   "schedule.warmup_steps=1"], standalone_mode=False)  # fmt: skip
    off = planned("selection.ratio=null", "selection.features=null")
    assert "48 pairs (0.75 times the data)" in off
    assert "48 pairs selected from 96 (1.50 times the data)" in planned()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_any_number_of_ranks_selects_what_one_does(base: Path, ranks: int) -> None:
    run("jobs.train", *SMALL, *settings(base, f"on-{ranks}"), ranks=ranks)
    for key in ("loss", "learnability", "selected_learnability"):
        assert values(base, f"on-{ranks}", key) == pytest.approx(values(base, "whole", key), rel=1e-4, abs=1e-5)

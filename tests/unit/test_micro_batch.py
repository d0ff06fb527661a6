"""`engine.micro_batch=auto` takes the largest micro-batch that fits, and computes what that number would."""

import shutil

import pytest
import torch

from pipeline.errors import UserError
from pipeline.model.towers import Towers
from pipeline.training import loop
from pipeline.training.build import choose_micro_batch
from pipeline.training.recipe import check_run, load_recipe
from tests.dist.micro_batch_ranks import ROWS, limited
from tests.launch import run
from tests.metrics import equal, metrics, weights
from tests.training import SMALL, prepare, settings_in, train_here

SETTINGS = ("samples=48", "checkpoint.every=3", "model.patch_dropout=0.5", "ema.decay=0.9")


def said(output):
    events = [event["message"] for event in metrics(output, "event")]
    return [message.removeprefix("engine.micro_batch=auto: ") for message in events if "micro_batch=auto" in message]


def state_in(run):
    """The files of its last checkpoint that hold tensors."""
    return {file.name: file.read_bytes() for file in (run / "checkpoints/step-00000006").glob("*.safetensors")}


def untouched(state, *args, **kwargs):
    """`choose_micro_batch`, which must change nothing of the run."""
    module = state.engine.module
    before = torch.get_rng_state(), {name: value.clone() for name, value in module.state_dict().items()}
    text = choose_micro_batch(state, *args, **kwargs)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert equal(module.state_dict(), before[1])
    assert all(p.grad is None for p in module.parameters())
    return text


def test_auto_computes_what_the_number_does_and_resumes_with_it(tmp_path, monkeypatch):
    base = prepare(tmp_path)
    auto = settings_in(base, "auto", *SETTINGS, "engine.micro_batch=auto")
    train_here(*settings_in(base, "number", *SETTINGS, "engine.micro_batch=2"))
    with monkeypatch.context() as patch:
        patch.setattr(Towers, "forward", limited(2))
        patch.setattr(loop, "choose_micro_batch", untouched)
        ROWS.clear()
        train_here(*auto)
    assert ROWS[:4] == [8, 4, 2, 2], "the engine's towers, and those of the gradient check"
    assert state_in(base / "auto") == state_in(base / "number")
    shutil.rmtree(base / "auto" / "checkpoints" / "step-00000006")
    train_here(*auto, resume="latest")
    assert state_in(base / "auto") == state_in(base / "number")
    assert said(base / "auto") == [
        "2 of a rank's 8 samples at a time; more do not fit into memory.",
        "2 of a rank's 8 samples at a time, as before.",
    ]
    train_here(*settings_in(base, "cpu", *SETTINGS, "samples=8", "engine.micro_batch=auto"))
    assert said(base / "cpu") == ["8 of a rank's 8 samples at a time."]
    monkeypatch.setattr(Towers, "forward", limited(0))
    with pytest.raises(UserError, match="not even one sample of a rank fits"):
        train_here(*settings_in(base, "none", *SETTINGS, "engine.micro_batch=auto"))


def test_all_ranks_take_the_number_of_the_one_with_the_least_memory(tmp_path):
    base = prepare(tmp_path)
    for name, micro_batch in (("auto", "auto"), ("number", "2")):
        settings = settings_in(base, name, *SMALL, *SETTINGS, f"engine.micro_batch={micro_batch}")
        run("tests.dist.micro_batch_ranks", *settings, ranks=2)
    assert said(base / "auto") == ["2 of a rank's 4 samples at a time; more do not fit into memory."]
    assert equal(weights(base / "auto"), weights(base / "number"))


def test_auto_is_refused_where_ranks_compute_together():
    def check(*more, ranks):
        given = ["output=y", "samples=64", "data.sources=x", "schedule.warmup_steps=1", "engine.micro_batch=auto"]
        check_run(load_recipe(None, [*given, "batch_size=16", *more]), world_size=ranks)

    for more, ranks in (("engine.deepspeed=zero3_fp32", 1), ("engine.deepspeed=zero2_bf16", 2)):
        with pytest.raises(UserError, match=r"auto tries on each rank alone .*give a number"):
            check(more, ranks=ranks)
    check("engine.deepspeed=zero2_bf16", ranks=1)
    check(ranks=2)

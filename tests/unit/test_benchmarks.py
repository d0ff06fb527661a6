"""The benchmarks of steps: their contenders and texts, and the GPU's, which runs in a tiny form on a CPU."""

import functools
import json
import logging
import os
import shlex
import sys
import time
from contextlib import ExitStack, suppress

import pytest
import torch

from jobs.bench import gpu, train
from jobs.bench.harness import summary
from jobs.bench.train import COMPILED, THEIRS
from pipeline.distributed.world import World
from pipeline.model.towers import ModelConfig, build_towers
from tests.launch import lives, run, wait_for


def test_open_clip_is_compiled_on_gpus_and_where_it_is_asked_for():
    for device, words, expected in (
        ("cpu", "", [THEIRS, "ours, openclip", "ours, neuclip"]),
        ("cpu", "--torchcompile", [THEIRS, COMPILED, "ours, openclip", "ours, neuclip"]),
        ("cuda", "--objectives siglip", [THEIRS, COMPILED, "ours, siglip"]),
        ("cuda", "--no-torchcompile --variant 'a=1 b=2'",
         [THEIRS, "ours, openclip", "ours, neuclip", "ours, openclip, a=1, b=2"]),
        ("cuda", "--ranks 2 --objectives openclip --variant 'objective.name=neuclip objective.rho=3'",
         ["ours, openclip", "ours, neuclip, objective.rho=3"]),
    ):  # fmt: skip
        args, world = train.options().parse_args(shlex.split(words)), World(device=torch.device(device))
        with ExitStack() as stack:  # they are named before they are built
            assert list(train.contenders(args, None, world=world, stack=stack)) == expected


def test_texts_have_the_lengths_of_web_captions_or_the_full_one():
    tokenize = build_towers(ModelConfig(arch="ViT-B-32"), seed=0, device="meta")[1].tokenize
    for name, (low, high) in {"cc12m": (25, 31), "full": (77, 77)}.items():
        generator = torch.Generator().manual_seed(0)
        first, second = (tokenize(train.captions(name, 1024, generator)) for _ in range(2))
        assert low <= (first.argmax(1) + 1).float().mean() <= high, name
        assert not torch.equal(first, second)


def test_open_clips_trainer_waits_for_nothing(monkeypatch):
    """Its log would read the loss in the first and the last of a round's steps; a user's does in one of a hundred."""
    args = train.options().parse_args(["--arch", "scenes-vit-micro", "--batch", "4"])
    run, _ = train.open_clip_train(args, train.make_data(args), device=torch.device("cpu"))
    item, readers = torch.Tensor.item, set()
    monkeypatch.setattr(torch.Tensor, "item", lambda x: readers.add(sys._getframe(1).f_globals["__name__"]) or item(x))
    run(2)
    assert "open_clip_train.train" not in readers


def test_failures_and_what_there_was_no_time_for_are_recorded(tmp_path, monkeypatch):
    def ignores_its_limit():
        with suppress(gpu.OutOfTime):
            time.sleep(60)
        time.sleep(60)

    def warns():
        logging.getLogger("pipeline.engine").warning("trained %s", "uncompiled")
        return {"rate": 2.0}

    monkeypatch.setattr(gpu, "AGAIN_SECONDS", 0.2)
    output = tmp_path / "gpu.json"
    results = gpu.Results(output, tiny=True, seconds=30.0)
    assert results.measure("a", "good", warns, seconds=5) == {"rate": 2.0}
    assert results.measure("a", "bad", lambda: 1 // 0, seconds=5) is None
    assert results.measure("a", "long", ignores_its_limit, seconds=1) is None
    results.seconds = 0.0
    assert results.measure("b", "late", lambda: {"rate": 3.0}, seconds=5) is None
    written = json.loads(output.read_text())
    status = {name: one["status"] for part in written["parts"].values() for name, one in part.items()}
    assert status == {
        "good": "done", "bad": "failed: ZeroDivisionError: integer division or modulo by zero",
        "long": "failed: OutOfTime: not done after 1 s", "late": "left out: no time was left",
    }  # fmt: skip
    assert written["parts"]["a"]["good"]["result"] == {"rate": 2.0}
    assert [one.get("warnings") for one in written["parts"]["a"].values()] == [["trained uncompiled"], None, None]
    assert results.failed == ["a, bad", "a, long"]
    assert written["machine"]["versions"]["torch"]


def test_after_a_limit_the_rest_is_measured_in_a_new_process(tmp_path, monkeypatch):
    """Regression test: stopped in torch.compile, torch 2.11 failed in all that came later in the process."""
    results, commands = gpu.Results(tmp_path / "gpu.json", tiny=True, seconds=30.0), []

    def replaced(_, words, environment):
        commands.append(words[3:])
        sys.exit()

    monkeypatch.setattr(os, "execve", replaced)
    long = functools.partial(results.measure, "b32", "long", lambda: time.sleep(60), seconds=1)
    with pytest.raises(SystemExit):
        gpu.take(results, {"b16": lambda: None, "b32": long, "run": lambda: None, "tests": lambda: None})
    (words,) = commands
    assert 20 < float(words.pop(4)) < 29
    assert shlex.join(words) == f"--output {results.path} --add --seconds --only run tests --tiny"
    gpu.take(results, {"tests": long})  # nothing is left
    assert len(commands) == 1


def test_a_command_leaves_no_process_behind_and_is_no_rank(monkeypatch):
    """Processes would hold memory of the GPU; variables of a launcher would let a run wait for other ranks."""
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    sleep = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)']).pid"
    code = f"import os, subprocess, sys; print({sleep}, 'RANK' in os.environ, 'WORLD_SIZE' in os.environ)"
    pid, *ranks = gpu.program("-c", code, tiny=True)[0].split()
    assert ranks == ["False", "False"]
    wait_for(lambda: not lives(int(pid)), "the child ends", seconds=10)
    with pytest.raises(RuntimeError, match="exit code 3\nwhy"):
        gpu.program("-c", "print('why'); raise SystemExit(3)", tiny=True)


def test_what_cannot_be_measured_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "file"
    file.touch()
    for words, message in (
        (["--tiny", "--output", str(file)], r"cannot be written \(File exists\): give --output another name"),
        (["--output", f"{file}.json"], "sees no GPU on this machine, so nothing was measured"),
    ):
        with pytest.raises(SystemExit, match=message):
            gpu.main(words)
    assert os.listdir(tmp_path) == ["file"]


def test_figures_are_those_of_the_second_half():
    step = {"kind": "train", "loss": 1.0, "lr": 1.0, "time_npn": 0.1}
    steps = [{**step, "samples_per_second": rate} for rate in (1, 2, 30, 40, 50)]
    counts = {"steps_logged": 5.0, "evaluations": 1.0}
    expected = {**counts, "loss": 1.0, "samples_per_second": 40.0, "time_npn": 0.1}
    assert gpu.figures([{"kind": "event"}, *steps, {"kind": "evaluation"}]) == expected
    assert gpu.figures([]) == dict.fromkeys(counts, 0.0)


def test_a_trace_is_summed_up_by_kind_of_kernel_with_its_gaps():
    kernels = [
        (0, 10, "kernel", "nvjet_hsh_128x256_64x4_tst"),
        (12, 10, "kernel", "sm90_xmma_wgrad_implicit_gemm_indexed"),
        (20, 2, "kernel", "void at::native::vectorized_layer_norm_kernel<float>"),  # on another stream
        (72, 8, "gpu_memcpy", "Memcpy HtoD (Pinned -> Device)"),
        (80, 10, "kernel", "void pytorch_flash::flash_bwd_kernel"),
        (90, 10, "kernel", "triton_poi_fused__scaled_dot_product_flash_attention_backward_cat_convolution_3"),
    ]
    events = [{"ts": ts, "dur": dur, "cat": cat, "name": name} for ts, dur, cat, name in kernels]
    host = {"ts": 0, "dur": 500, "cat": "cpu_op", "name": "aten::mm"}
    found = summary([*reversed(events), host, {"ph": "M", "name": "process_name"}], steps=2)
    assert (found["ms"], found["kernels"]) == (0.05, 3)
    assert found["idle_ms"] == pytest.approx(0.026)
    times = {kind: one["ms"] for kind, one in found["by_kind"].items()}
    expected = {"attention": 0.005, "compiled": 0.005, "convolutions": 0.005, "layer norms": 0.001, "products": 0.005}
    assert times == pytest.approx({**expected, "transfers": 0.004})
    assert found["longest_gaps"][0] == {"us": 50, "after": kernels[1][3], "before": kernels[3][3]}


@pytest.mark.daily
@pytest.mark.slow
def test_the_parts_run_in_their_tiny_form(tmp_path):
    """`b32` is `b16` with another model, and `tests` one more command."""
    output = tmp_path / "gpu.json"
    run("jobs.bench.gpu", "--tiny", "--only", "b16", "run", "network", "--output", str(output))
    parts = json.loads(output.read_text())["parts"]
    assert {one["status"] for part in parts.values() for one in part.values()} == {"done"}
    assert list(parts) == ["b16", "run", "network"]
    assert list(parts["b16"]["steps"]["result"]["rows"])[:2] == ["open_clip_train", "ours, openclip"]
    start, resumed = (parts["run"][name]["result"] for name in ("start", "resume"))
    assert [start["steps_logged"], start["evaluations"] > 0, resumed["steps_logged"]] == [4, True, 2]
    rows = parts["network"]["steps"]["result"]["rows"]
    assert [name.rpartition("=")[2] for name in rows] == ["ours, openclip", "replicated", "prototypes"]
    assert next(iter(rows.values()))["/ openclip"] == 1

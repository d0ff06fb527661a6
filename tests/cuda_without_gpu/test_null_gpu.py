"""Runs with the defaults of GPUs, on a GPU whose kernels do nothing: all code but the kernels' own is the real one."""

import shutil
import subprocess

import pytest

from pipeline.run_files import METRICS_NAME, read_records
from tests.cuda_without_gpu.null_gpu import null_gpu
from tests.launch import ROOT, command, environment
from tests.shards import sample, write_shards
from tests.training import SMALL, prepare, settings_in

pytestmark = [
    pytest.mark.slow,
    pytest.mark.daily,
    pytest.mark.skipif(not (shutil.which("gcc") and shutil.which("nm")), reason="needs gcc and nm"),
]
# By name: settings, and how often the towers are compiled again.
RUNS = {
    "network": ("objective.name=neuclip objective.prototypes=8 objective.npn_compile=true data.workers=1", 0),
    # At ZeRO stage 0 under autocast; passes with and without a graph have a program each.
    "savings": ("optimizer.name=muon engine.micro_batch=4 model.patch_dropout=0.5 model.grad_checkpointing=true", 1),
}


@pytest.fixture(scope="module")
def gpu(tmp_path_factory):
    own = {"PYTHONPATH": str(ROOT), "TORCH_LOGS": "recompiles"}
    return environment() | own | null_gpu(tmp_path_factory.mktemp("gpu"))


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_a_gpu_compiles_its_towers_once(name, gpu, tmp_path):
    """Its texts are packed: each batch has another number of tokens, and few have a long text. It is resumed, too."""
    settings, again = RUNS[name]
    gpus = ("engine.device=cuda", "engine.deepspeed=auto", "engine.probe=false", "model.compile=true")
    prepare(tmp_path)
    write_shards(tmp_path / "shards", [40], replace={7: {**sample(7), "txt": b"a caption of more words than others"}})
    words = settings_in(tmp_path, "run", *SMALL, *gpus, *settings.split())
    for steps in (3, 5) if again == 0 else (5,):
        call = command("jobs.cli", "train", *words, f"samples={8 * steps}", "--resume", "latest")
        done = subprocess.run(call, cwd=ROOT, env=gpu, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "WARNING" not in done.stderr, done.stderr[-3000:]
        assert done.stderr.count("Recompiling function forward") == again, done.stderr[-3000:]
    records = read_records(tmp_path / "run" / METRICS_NAME)
    assert [r["step"] for r in records if r["kind"] == "train"] == [1, 2, 3, 4, 5]

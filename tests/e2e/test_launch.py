"""Starting runs on a cluster: two nodes with deepspeed, Slurm with preemption, the container file."""

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import ROOT, environment, free_port, wait_for
from tests.metrics import metrics
from tests.training import prepare

CLUSTER = ROOT / "jobs" / "cluster"
SBATCH = CLUSTER / "train.sbatch"
STEPS, BATCH = 8, 8

# Simulates Slurm on one machine: two tasks on one node; it records their process ids so that the test can signal them.
SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
export SLURM_NTASKS=2
PIDS=()
for i in 0 1; do
    SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & PIDS+=($!)
done
echo "${PIDS[@]}" > "$FAKE/pids.tmp"; mv "$FAKE/pids.tmp" "$FAKE/pids"
CODE=0
for pid in "${PIDS[@]}"; do wait "$pid"; c=$?; ((c > CODE)) && CODE=$c; done
exit $CODE
"""
SCONTROL = """#!/bin/bash
if [[ $1 == requeue ]]; then echo "$2" >> "$FAKE/requeued"; else echo 127.0.0.1; fi
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launch")
    prepare(folder, [20, 30, 15])
    recipe = {
        "output": str(folder / "run"), "samples": STEPS * BATCH, "batch_size": BATCH, "schedule": {"warmup_steps": 2},
        "model": {"arch": str(folder / "tiny-towers.json")}, "objective": {"name": "openclip"},
        "data": {"sources": str(folder / "shards"), "streams": 4, "shuffle_buffer": 10, "workers": 0},
        "engine": {"deepspeed": "zero1_fp32", "device": "cpu"}, "telemetry": {"every": 1, "tensorboard": False},
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return folder


@pytest.fixture
def slurm(tmp_path):
    """Return an environment in which `srun` and `scontrol` are the fakes above."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        path = tmp_path / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    path = f"{tmp_path}:{os.environ['PATH']}"
    job = {"SLURM_JOB_ID": str(_job_id()), "SLURM_JOB_NODELIST": "node-a"}
    return {**environment(), **job, "PATH": path, "FAKE": str(tmp_path), "PYTHON": sys.executable}


def _job_id():
    """Return a job id whose port (by the template's rule, 20000 + id) is free."""
    for number in range(os.getpid() % 10_000, 20_000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 20_000 + number)) != 0:
                return number
    raise AssertionError("every port is taken")


def steps(run):
    return [record["step"] for record in metrics(run, "train")]


@pytest.mark.slow
def test_two_nodes_with_deepspeed(base, tmp_path):
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("node-a slots=1\nnode-b slots=1\n")
    launcher = str(Path(sys.executable).parent / "deepspeed")
    common = ["--master_addr", "127.0.0.1", "--master_port", str(free_port()), "--module", "jobs.train"]
    settings = ["--recipe", str(base / "recipe.yaml"), f"output={tmp_path / 'run'}"]
    nodes = [
        subprocess.Popen(
            [launcher, "--hostfile", str(hostfile), "--no_ssh", "--node_rank", str(node), *common, *settings],
            cwd=ROOT,
            env={**environment(), "DS_ACCELERATOR": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in (0, 1)
    ]
    try:
        outputs = [node.communicate(timeout=300)[0] for node in nodes]
    finally:
        for node in nodes:
            node.terminate()
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(text[-3000:] for text in outputs)
    assert steps(tmp_path / "run") == list(range(1, STEPS + 1))
    meta = json.loads((tmp_path / "run" / "checkpoints" / f"step-{STEPS:08d}" / "checkpoint.json").read_text())
    assert meta["world_size"] == 2


@pytest.mark.slow
def test_slurm_requeues_after_a_signal_and_a_checkpoint(base, slurm, tmp_path):
    run = tmp_path / "run"
    long = f"samples={4000 * BATCH}"
    job = ["bash", str(SBATCH), str(base / "recipe.yaml"), f"output={run}", "telemetry.progress=auto"]
    first = subprocess.Popen([*job, long], cwd=ROOT, env=slurm, stdout=subprocess.PIPE, text=True)
    metrics = run / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and '"step": 2,' in metrics.read_text(), "2 steps", process=first, seconds=200)
    for pid in (tmp_path / "pids").read_text().split():
        os.kill(int(pid), signal.SIGUSR1)
    output = first.communicate(timeout=120)[0]
    assert first.returncode == 75, output
    assert (tmp_path / "requeued").read_text().split() == [slurm["SLURM_JOB_ID"]]
    assert (run / "checkpoints" / f"step-{steps(run)[-1]:08d}").is_dir(), "--resume latest continues from there"


@pytest.mark.parametrize(("code", "checkpoint", "requeued"), [(75, False, True), (1, False, False), (1, True, True),
                                                               (2, True, False), (0, True, False)])  # fmt: skip
def test_which_exit_codes_are_requeued(code, checkpoint, requeued, base, slurm, tmp_path):
    """Tests only the template's decision: srun is replaced by a script with a given exit code."""
    write = f"mkdir -p {tmp_path}/run/checkpoints; echo step-00000005 > {tmp_path}/run/checkpoints/latest"
    (tmp_path / "srun").write_text(f"#!/bin/bash\n{write if checkpoint else ':'}\nexit {code}\n")
    done = subprocess.run(["bash", str(SBATCH), str(base / "recipe.yaml"), f"output={tmp_path / 'run'}"], env=slurm,
                          capture_output=True, text=True, timeout=30)  # fmt: skip
    assert done.returncode == code
    assert (tmp_path / "requeued").exists() == requeued, done.stdout


def test_the_template_is_valid_and_supports_dry_runs(base):
    subprocess.run(["bash", "-n", str(SBATCH)], check=True)
    settings = ["output=/shared/a b", "optimizer.lr=1e-3"]
    for bind, bound in ((None, []), ("/shared", ["--bind", "/shared"])):
        inside = {"DRY_RUN": "1", "CONTAINER": "/shared/neuclip.sif"} | ({"BIND": bind} if bind else {})
        done = subprocess.run(["bash", str(SBATCH), "r.yaml", *settings], capture_output=True, text=True, check=True,
                              env={**environment(), **inside})  # fmt: skip
        assert done.stdout.split() == [
            "apptainer", "exec", "--nv", *bound, "/shared/neuclip.sif",
            "python", "-m", "jobs.train", "--recipe", "r.yaml", "--resume", "latest",
            "output=/shared/a\\", "b", "optimizer.lr=1e-3",
        ]  # fmt: skip
    without = subprocess.run(["bash", str(SBATCH), "r.yaml"], capture_output=True, text=True, env=environment())
    assert without.returncode != 0
    assert "output=DIR" in without.stderr
    missing = subprocess.run(["bash", str(SBATCH), "r.yaml", *settings], capture_output=True, text=True,
                             env={**environment(), "DRY_RUN": "1"})  # fmt: skip
    assert (missing.returncode, missing.stderr) == (2, "There is no recipe r.yaml.\n")


def test_the_container_file_copies_existing_and_all_required_files():
    text = (CLUSTER / "Dockerfile").read_text()
    copied = {name for line in re.findall(r"^COPY (.*) \S+$", text, flags=re.MULTILINE) for name in line.split()}
    assert all((ROOT / name).exists() for name in copied)
    assert {"pipeline", "data_prep", "jobs", "ds_configs", "neuclip.py", "pyproject.toml", "constraints.txt"} <= copied
    assert text.count("--constraint constraints.txt") == text.count("pip install")


def test_deepspeed_can_read_the_example_hostfile():
    from deepspeed.launcher.runner import fetch_hostfile

    assert dict(fetch_hostfile(str(CLUSTER / "train-hostfile"))) == {"node-a": 8, "node-b": 8}

"""Which device and which cores a rank takes, what it computes in, and ranks that do not fit together."""

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from jobs import doctor
from jobs.demo import RECIPE, in_faster_precision
from pipeline.config import dump
from pipeline.cores import cores_of_rank, cpu_quota
from pipeline.data.data_config import DataConfig, default_workers
from pipeline.distributed import devices, start
from pipeline.distributed.devices import choose_device, keep_fp32, true_fp32
from pipeline.distributed.start import RankDevice, contradiction, exchange_devices
from pipeline.distributed.world import World, free_port
from pipeline.engine.engine_config import EngineConfig, in_fp32
from pipeline.errors import UserError
from pipeline.evaluation.run import session
from pipeline.evaluation.run.session import EvaluationConfig, connected_world
from pipeline.run_files import RUN_CONFIG_NAME
from pipeline.training.recipe import load_recipe
from tests.launch import ROOT
from tests.metrics import metrics
from tests.training import prepare, settings_in, train_here

GPU = RankDevice(rank=0, host="node1", backend="nccl", device="H100", gpu="GPU-a", cores=[0, 1])
CPU = replace(GPU, rank=1, host="node2", backend="gloo", device="CPU", gpu="")
SLOW = "Matrix products in bf16 take 12 times as long as in fp32 on this CPU."


def test_processes_of_an_evaluation_share_cores_as_ranks_do(monkeypatch):
    """Regression test: they divided by the number of processes what a scheduler had divided already."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(session, "cpu_quota", lambda: None)
    elsewhere, mine = ("another node", list(range(8))), (socket.gethostname(), list(range(8, 16)))
    for others, cores in (([elsewhere, mine], 8), ([(mine[0], list(range(8))), elsewhere], 4)):
        monkeypatch.setattr(World, "gather_objects", lambda _, own, others=others: [own, *others])
        found = connected_world(SimpleNamespace(process_index=0, num_processes=3, device=torch.device("cpu")))
        assert EvaluationConfig().loader_workers(found.cores) == found.cores == cores
        assert EvaluationConfig(workers=3).loader_workers(found.cores) == 3


def pretend_gpus(monkeypatch, count):
    """Make torch see this many GPUs. Returns the list of the current devices that will be set."""
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


def test_a_rank_takes_its_own_gpu_and_is_refused_without_one(monkeypatch):
    # The last: srun --gpus-per-task=1 shows every task its own GPU as number 0.
    for count, local_rank, expected in ((8, 3, 3), (1, 0, 0), (1, 3, 0)):
        current = pretend_gpus(monkeypatch, count)
        assert choose_device("auto", local_rank=local_rank) == torch.device("cuda", expected)
        assert current == [expected]
    pretend_gpus(monkeypatch, 0)
    assert choose_device("auto", local_rank=2).type == "cpu"
    with pytest.raises(UserError, match="no CUDA device here"):
        choose_device("cuda", local_rank=0)


def test_a_gpu_that_cannot_be_used_is_named(monkeypatch):
    """Regression test: CUDA's error ended this rank as a bug, and the others waited ten minutes for it."""

    def busy(*_):
        raise torch.AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nSearch for ...")

    pretend_gpus(monkeypatch, 8)
    monkeypatch.setattr(torch.cuda, "set_device", busy)
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    refused = r"GPU 3 of node7, where torch sees 8, cannot be used: CUDA error: .* unavailable\. .*nvidia-smi"
    with pytest.raises(UserError, match=refused):
        choose_device("auto", local_rank=3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", busy)
    findings = list(doctor.check_gpus())
    assert [(f.subject, f.status) for f in findings] == [(f"GPU {index}", "broken") for index in range(8)]
    assert "busy or unavailable" in findings[0].found


def test_contradictions_name_the_odd_ranks():
    others = [replace(GPU, rank=rank, gpu=f"GPU-{rank}") for rank in (0, 2, 3)]
    text = contradiction([*others, CPU])
    assert "The odd ones: rank 1 on node2 (CPU, gloo)" in text
    assert "The other 3 are like rank 0 on node1 (H100, nccl)" in text
    shared = contradiction([GPU, replace(GPU, rank=1)])
    assert "Ranks 0 and 1 on node1 have the same GPU (H100, GPU-a)" in shared
    containers = contradiction([GPU, replace(GPU, rank=1, host="container2")])
    assert "Ranks 0 and 1 on node1 and container2 have the same GPU (H100, GPU-a)" in containers
    assert contradiction([CPU, replace(CPU, rank=0)]) == ""


def meet_all(ranks, *, size, limit=20.0):
    """What `exchange_devices` returned or raised on each rank, in threads that share a store."""
    store = dist.HashStore()

    def result(rank):
        try:
            return exchange_devices(store, rank, ranks=size, limit=timedelta(seconds=limit))
        except UserError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(result, ranks))


def test_a_rank_without_a_device_says_why_to_all(monkeypatch):
    """Regression test: it ended alone, and the others waited for it, for 46 minutes if it was rank 0."""
    broken = replace(CPU, problem="node2 has /dev/nvidia0, but torch sees no usable GPU there.")
    errors = meet_all([GPU, broken], size=2)
    assert [str(error) for error in errors] == [broken.problem] * 2
    also = contradiction([GPU, broken, replace(broken, rank=2, host="node3", problem="node3 has ...")])
    assert also == f"{broken.problem} The same on node3."

    def no_device(name, **_):
        raise UserError("node2 has no GPU")

    def joined(*_, problem, **__):
        raise UserError(f"in the store: {problem}")

    monkeypatch.setattr(start, "choose_device", no_device)
    monkeypatch.setattr(start, "_join", joined)
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="in the store: node2 has no GPU"), start.start_world():
        pass


def test_ranks_learn_their_share_of_cores():
    shared = [replace(CPU, rank=r, cores=list(range(64))) for r in range(4)]  # torchrun
    assert meet_all([*shared[:3], replace(shared[3], host="node9")], size=4) == [21, 21, 21, 64]


def test_missing_ranks_are_named(monkeypatch, capsys):
    monkeypatch.setattr(start, "REPORT_AFTER", timedelta(seconds=0.2))
    (error,) = meet_all([GPU], size=3, limit=1.0)
    assert "1 of 3 ranks have come" in str(error)
    assert "(node1 with 1); missing: 1, 2." in str(error)
    assert "Waiting for the other ranks. 1 of 3 ranks have come after 0 s" in capsys.readouterr().err
    errors, began = meet_all([GPU, CPU], size=3, limit=60.0), time.monotonic()
    assert all("The odd ones: rank 1 on node2" in str(e) for e in errors), "although a rank is missing"
    assert time.monotonic() - began < 30


def test_missing_ranks_are_named_where_rank_0_keeps_the_store(monkeypatch):
    """As under srun and deepspeed: rank 0 must not wait for the others before it can tell which one is missing."""
    monkeypatch.setattr(start, "START_LIMIT", timedelta(seconds=2))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)

    def problem(rank):
        with pytest.raises(UserError) as error:
            start._join(rank, 3, torch.device("cpu"), timedelta(minutes=1))
        return str(error.value)

    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(problem, (0, 1)):
            assert "2 of 3 ranks have come after 2 s" in found
            assert "missing: 2." in found


def test_the_process_group_is_bound_to_the_rank_s_gpu(monkeypatch):
    made: dict[str, Any] = {}
    monkeypatch.setattr(start, "_store", lambda *_: dist.HashStore())
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **given: made.update(given, backend=backend))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="H100", uuid="GPU-a"))
    monkeypatch.setattr(start, "exchange_devices", lambda *_, **__: 8)
    gpu = torch.device("cuda", 0)
    for device, size, backend, bound in ((gpu, 2, "nccl", gpu), (gpu, 1, "nccl", None), ("cpu", 2, "gloo", None)):
        start._join(0, size, torch.device(device), timedelta(minutes=1))
        assert (made["backend"], made["device_id"]) == (backend, bound)

    def fail(*_, **__):
        raise dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:100, unhandled system error")

    monkeypatch.setattr(dist, "init_process_group", fail)
    with pytest.raises(start.LostRank, match=r"nccl cannot connect rank 0 on .* with the others: NCCL error in: .*"):
        start._join(0, 2, gpu, timedelta(minutes=1))


def test_cores_are_divided_among_those_who_share_them():
    for own, others, quota, expected in (
        (range(8), [range(8, 16)], None, 8),
        (range(64), [range(64)] * 7, None, 8),
        (range(64), [range(64)] * 7, 16, 2),
        (range(4), [range(4)] * 7, None, 1),
        (range(12), [range(8, 20)], None, 10),
    ):
        assert cores_of_rank(own, others=others, quota=quota) == expected


def test_quotas_of_containers_are_read(tmp_path):
    for number, (files, expected) in enumerate((
        ({}, None),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "250000 100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),
    )):  # fmt: skip
        for name, text in files.items():
            (path := tmp_path / str(number) / name).parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        assert cpu_quota(tmp_path / str(number)) == expected


def test_workers_leave_a_core_to_the_trainer():
    for cores, workers in ((2, 1), (1, 1), (8, 7), (16, 12), (24, 12)):
        assert default_workers(cores) == workers
    assert DataConfig(sources="x", workers="auto").workers is None
    for name in ("cc3m", "cc12m", "dfn14m", "dfn192m", "dfn1b", "laion315m"):
        assert "workers: auto" in (ROOT / f"jobs/recipes/{name}.yaml").read_text(), name


@pytest.fixture(params=[12.0, 1.7])
def slowdown(request, monkeypatch):
    monkeypatch.setattr(devices, "cpu_bf16_slowdown", lambda: request.param)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return float(request.param)


def test_the_doctor_notes_a_cpu_that_is_slow_in_bf16(slowdown):
    found = [finding for finding in doctor.check_gpus() if finding.subject == "bf16"]
    assert [(f.status, f.found, f.remedy) for f in found] == (
        [("note", SLOW[:-1], "use engine.deepspeed=zero0_fp32")] if slowdown > 3 else []
    )


def test_a_run_in_bf16_warns_there(slowdown, tmp_path):
    prepare(tmp_path, [16])
    for name in ("zero1_bf16", "zero1_fp32"):
        train_here(*settings_in(tmp_path, name, f"engine.deepspeed={name}", "samples=8", "data.streams=1"))
        records = [record for record in metrics(tmp_path / name, "event") if "in bf16" in record["message"]]
        warnings = [record["message"] for record in records if record["level"] == "warning"]
        expected = [f"{SLOW} Training in fp32 is faster here: engine.deepspeed=zero1_fp32."]
        assert warnings == (expected if slowdown > 3 and name == "zero1_bf16" else [])


def test_the_advice_names_a_file_that_exists():
    assert in_fp32(EngineConfig(deepspeed="zero2_bf16")) == "zero2_fp32"
    assert in_fp32(EngineConfig(deepspeed="/home/me/own_bf16.json")) == "zero1_fp32"


def demo(*overrides, output):
    return in_faster_precision(load_recipe(RECIPE, [f"output={output}", *overrides]), overrides)


def test_the_demo_trains_in_fp32_there_unless_its_precision_is_given(slowdown, tmp_path, capsys):
    assert demo(output=tmp_path).engine.deepspeed == ("zero1_fp32" if slowdown > 3 else "zero1_bf16")
    assert capsys.readouterr().out.startswith(SLOW) == (slowdown > 3)
    assert demo("engine.deepspeed=zero2_bf16", output=tmp_path).engine.deepspeed == "zero2_bf16"
    for before in ("zero1_bf16", "zero1_fp32"):  # of a demo that is continued
        (tmp_path / RUN_CONFIG_NAME).write_text(dump(load_recipe(RECIPE, [f"engine.deepspeed={before}"])))
        assert demo(output=tmp_path).engine.deepspeed == before


def test_convolutions_on_a_gpu_do_not_use_tf32(monkeypatch):
    """Regression test: fp32 training and scores had TF32 in the patches' convolution."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    keep_fp32(torch.device("cpu"))
    assert torch.backends.cudnn.allow_tf32
    keep_fp32(torch.device("cuda"))
    assert not torch.backends.cudnn.allow_tf32
    with true_fp32(torch.device("cpu")):
        assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cudnn.allow_tf32

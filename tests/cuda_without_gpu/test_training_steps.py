"""A whole training step at every ZeRO stage: when the host waits for the device, what is launched and communicated."""

import functools
import json

import pytest

from tests.cuda_without_gpu.training_steps import FILES, QUEUED, Record
from tests.launch import run

READ = "training/step:read"
"""Reads what was copied to the host before the backward pass was queued."""
ON_THE_HOST = ("model/trimming:trimmed_width", "objectives/base:steps", READ, "zero/utils:")
"""Readings of tensors that are in host memory on a GPU machine, too; the last one in stage 3's first steps only."""
NORM = "runtime/utils:is_invalid_grad_norm"
# Every place at which the host waits for the device in a step, in their order. A new one needs a reason; docs/costs.md
# explains these. What stands before QUEUED delays the next batch.
WAITS = {
    "zero0_fp32": [QUEUED, "engine/deepspeed_engine:step"],
    "zero0_bf16": [QUEUED, "engine/deepspeed_engine:step"],
    "zero1_bf16": [QUEUED, NORM],
    "zero2_bf16": [
        "zero/stage_1_and_2:independent_gradient_partition_epilogue", QUEUED, "zero/stage_1_and_2:has_overflow", NORM,
    ],
}  # fmt: skip
DEFAULTS = ("zero0_bf16", "zero1_bf16")
"""What runs use on one GPU and on several: the host waits once per step, when all work up to the update is queued."""
# All places of stage 3, for gathered weights and reduced gradients: how often, depends on ranks and micro-batches.
WAITS_OF_STAGE_3 = {
    "zero/partitioned_param_coordinator:_fetch_sub_module_impl", "zero/stage3:independent_gradient_partition_epilogue",
    "zero/stage3:__reduce_and_partition_ipg_grads", "zero/partition_parameters:_allgather_params_coalesced",
    "zero/partition_parameters:wait", NORM, QUEUED,
}  # fmt: skip
# By ranks and file: operators of the optimizer phase; then, of a step with one micro-batch and of one with two
# (GradCache): operators, waits for the device, collectives, and the megabytes that a rank gives to them.
BUDGET = {
    (1, "zero0_fp32"): (42, (296, 1, 0, 0.0), (571, 1, 0, 0.0)),
    (1, "zero0_bf16"): (42, (371, 1, 0, 0.0), (795, 1, 0, 0.0)),
    (1, "zero1_bf16"): (57, (337, 1, 0, 0.0), (667, 1, 0, 0.0)),
    (1, "zero2_bf16"): (631, (1031, 3, 4, 3.24), (1435, 4, 5, 6.48)),
    (1, "zero3_bf16"): (149, (517, 5, 9, 3.25), (907, 17, 10, 6.49)),
    (4, "zero0_fp32"): (81, (335, 1, 6, 3.25), (610, 1, 6, 3.25)),
    (4, "zero0_bf16"): (81, (410, 1, 6, 3.25), (834, 1, 6, 3.25)),
    (4, "zero1_bf16"): (61, (341, 1, 7, 4.87), (671, 1, 7, 4.87)),
    (4, "zero2_bf16"): (376, (742, 3, 10, 4.87), (1112, 4, 11, 8.11)),
    (4, "zero3_bf16"): (149, (516, 4, 50, 4.87), (905, 11, 56, 16.02)),
}
FEATURES = [("objective", "_allgather_base_", "float32"), ("objective", "allreduce_", "float32")]
COLLECTIVES = {
    "zero0_fp32": [("optimizer", "allreduce_", "float32")],
    "zero0_bf16": [("optimizer", "allreduce_", "float32")],
    "zero1_bf16": [("optimizer", "_allgather_base_", "bfloat16"), ("optimizer", "allreduce_", "float32")],
    "zero2_bf16": [
        ("backward", "allreduce_", "float32"), ("optimizer", "_allgather_base_", "bfloat16"),
        ("optimizer", "allreduce_", "float32"), ("optimizer", "allreduce_", "uint8"),
    ],
    "zero3_bf16": [
        ("backward", "_reduce_scatter_base_", "float32"), ("forward", "_allgather_base_", "bfloat16"),
        ("forward", "broadcast_", "int64"), ("optimizer", "_allgather_base_", "bfloat16"),
        ("optimizer", "allreduce_", "float64"),
    ],
}  # fmt: skip
"""Phase, kind and precision of all collectives on four ranks; the features' own are the same everywhere."""


@functools.cache
def records(ranks):
    done = run("tests.cuda_without_gpu.training_steps", str(ranks), timeout=300)
    line = next(line for line in done.stdout.splitlines() if line.startswith("RECORDS "))
    return {name: Record(**found) for name, found in json.loads(line.removeprefix("RECORDS ")).items()}


def waits(record):
    """Where the host waits for the device, and when the backward pass is queued."""
    places = [event.removeprefix("wait ") for event in record.events if event == QUEUED or event.startswith("wait ")]
    return [place for place in places if not place.startswith(ON_THE_HOST)]


@pytest.mark.parametrize(("ranks", "file"), BUDGET)
def test_a_step_stays_within_its_budget_and_waits_only_where_it_must(ranks, file):
    """If a change needs more, it needs a reason. If it needs less, lower the budget, so that the gain is kept.

    Whether the loss is finite and whether a rank stops needs no wait of its own: their copy is older.
    """
    optimizer, *steps = BUDGET[ranks, file]
    for name, (operators, waited, calls, megabytes) in zip((file, f"{file} GradCache"), steps, strict=True):
        record = records(ranks)[name]
        places = waits(record)
        if file == "zero3_bf16":
            assert {NORM, QUEUED} < set(places) <= WAITS_OF_STAGE_3, name
        else:
            assert set(places) == set(WAITS[file]), name
        if file in WAITS and (name == file or file in DEFAULTS):
            assert places == WAITS[file], name
        assert file not in DEFAULTS or record.events[-1] == f"wait {READ}", name
        assert sum(place != QUEUED for place in places) == waited, f"{name}: {places}"
        total, moved = sum(record.kernels.values()), sum(bytes_ for *_, bytes_ in record.collectives) / 1e6
        assert 0.95 * operators < total <= 1.02 * operators, f"{name}: {total} operators, {record.kernels}"
        assert 0.95 * optimizer < record.kernels["optimizer"] <= optimizer, f"{name}: {record.kernels}"
        assert len(record.collectives) == calls, f"{name}: {record.collectives}"
        assert 0.98 * megabytes <= moved <= megabytes, f"{name}: {moved} MB"


def test_gradients_are_reduced_in_fp32_and_by_default_once_per_step():
    assert {file for _, file in BUDGET} == set(FILES)
    for file in ("zero1_bf16", "zero0_bf16"):
        for name in (file, f"{file} GradCache"):
            reductions = [r for r in records(4)[name].collectives if r[0] == "optimizer" and "reduce" in r[1]]
            assert reductions[0][2] == "float32", name
            assert sum(size > 10**5 for *_, size in reductions) == 1, reductions
    # Stage 2 reduces every micro-batch: `engine.micro_batch` is refused there.
    for name, count in (("zero2_bf16", 1), ("zero2_bf16 GradCache", 2)):
        parts = [r for r in records(4)[name].collectives if r[0] == "backward" and r[3] > 10**5]
        assert [dtype for _, _, dtype, _ in parts] == ["float32"] * count, parts


@pytest.mark.parametrize("file", COLLECTIVES)
def test_collectives_have_the_expected_precision(file):
    for name in (file, f"{file} GradCache"):
        found = {(phase, kind, dtype) for phase, kind, dtype, _ in records(4)[name].collectives}
        gathered = {("backward", "_allgather_base_", "bfloat16")} if name == "zero3_bf16 GradCache" else set()
        assert found == {*FEATURES, *COLLECTIVES[file], *gathered}, name

"""What a run that was killed has lost, compared with an undisturbed one. `jobs.bench.kills` kills and resumes it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from pipeline.run_files import META_NAME, METRICS_NAME, finished_checkpoints, read_meta, read_records

Result = dict[str, dict[str, Any]]
TOLERANCE = 1e-4
"""Largest relative difference of a loss between layouts: sums are rounded in another order."""
NEAR_ZERO = 0.01
"""Losses below this are compared as if they were this large: SogCLR's crosses zero, its terms of about 1 do not."""


def outcome(run: Path) -> dict[str, Any]:
    """What a finished run has trained: its epochs, losses, and the hashes of its last checkpoint's files."""
    records = read_records(run / METRICS_NAME)
    events = [record["data"] for record in records if record["kind"] == "event" and "data" in record]
    meta = read_meta(finished_checkpoints(run)[-1])
    return {
        "epochs": {report["epoch"]: report for report in events},  # an epoch's end may have been trained twice
        "losses": {record["step"]: repr(record["loss"]) for record in records if record["kind"] == "train"},
        "scores": {
            record["step"]: {name: value for name, value in record.items() if name not in ("kind", "step", "time")}
            for record in records
            if record["kind"] == "evaluation"
        },
        "rollbacks": [record["rollbacks"] for record in records if record["kind"] == "train"][-1],
        "data": meta["data"],
        "files": {name: entry["sha256"] for name, entry in meta["files"].items() if name != META_NAME},
        "path": finished_checkpoints(run)[-1],
    }


def largest_difference(one: Path, other: Path) -> float:
    """The largest absolute difference of two checkpoints' weights."""
    from safetensors.torch import load_file

    left, right = (load_file(path / "open_clip_model.safetensors") for path in (one, other))
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def relative_difference(loss: float, expected: float) -> float:
    """|loss - expected| / |expected|, near zero / NEAR_ZERO; infinite if only one of them is a number."""
    if math.isnan(loss) or math.isnan(expected):
        return 0.0 if math.isnan(loss) and math.isnan(expected) else math.inf
    return abs(loss - expected) / max(abs(expected), NEAR_ZERO)


def compare(run: Path, reference: dict[str, Any]) -> dict[str, Any]:
    """How a killed run differs from the undisturbed one."""
    ended = outcome(run)
    losses = [(float(ended["losses"].get(step, "inf")), float(loss)) for step, loss in reference["losses"].items()]
    return {
        "epochs": len(reference["epochs"]),
        "same_samples_in_the_same_order": ended["epochs"] == reference["epochs"] and ended["data"] == reference["data"],
        "same_steps": ended["losses"].keys() == reference["losses"].keys(),
        "evaluations": len(reference["scores"]),
        "same_evaluations": ended["scores"].keys() == reference["scores"].keys(),
        "rollbacks": reference["rollbacks"],
        "same_rollbacks": ended["rollbacks"] == reference["rollbacks"],
        "largest_relative_difference_of_a_loss": max(relative_difference(*pair) for pair in losses),
        "largest_difference_of_a_weight": largest_difference(ended["path"], reference["path"]),
        "same_bits": all(ended[key] == reference[key] for key in ("files", "losses", "scores", "rollbacks")),
    }


def is_intact(result: Result) -> bool:
    """Whether nothing was lost in any case, and every case was evaluated and rolled back (the fork skips too few)."""
    same = ("same_samples_in_the_same_order", "same_steps", "same_evaluations", "same_rollbacks")
    cases = {name: case for name, case in result.items() if name != "run"}
    return all(
        all(case[key] for key in same)
        and case["evaluations"] > 0
        and (case["rollbacks"] > 0 or name == "new-batch-size")
        and (case["same_bits"] or name not in ("same-layout", "new-batch-size"))
        and case["largest_relative_difference_of_a_loss"] <= TOLERANCE
        for name, case in cases.items()
    )

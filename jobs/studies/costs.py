"""What the training of a run cost: CPU seconds and FLOPs, by stage, without evaluation and checkpoints."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.metrics.mfu import training_flops
from pipeline.training.recipe import RunConfig
from pipeline.training.stages import stages_of


def cost_of(run: RunConfig, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """CPU seconds of rank 0's training steps, and FLOPs of the towers over all ranks (forward and backward).

    CPU time is the median over a stage's records times its steps: records that contain an evaluation, a checkpoint or
    the warm-up of a stage do not count, and a run that was interrupted costs what an uninterrupted one does.

    Args:
        run: the configuration of the whole run.
        rows: its training records, in order.
    """
    seconds = flops = 0.0
    for stage in stages_of(run):
        own = [row for row in rows if stage.first < row["step"] <= stage.end]
        warm = own[1:] or own
        steps = stage.end - stage.first
        if not warm or "cpu_ms" not in warm[0]:  # a record of an earlier version
            return {}
        seconds += steps * statistics.median(row["cpu_ms"] for row in warm) / 1e3
        tokens = statistics.fmean(row["text_tokens"] for row in own)
        flops += steps * run.batch_size * training_flops(stage.run.model, text_tokens=tokens)
    return {"cpu_seconds": seconds, "training_flops": flops}

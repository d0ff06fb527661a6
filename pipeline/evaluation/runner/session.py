"""What an evaluation runs with: its settings, its processes and its device."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from pydantic import Field

from pipeline.config import section
from pipeline.distributed.world import ranks_here
from pipeline.errors import UserError, is_out_of_memory
from pipeline.evaluation.datasets.task_data import TaskError
from pipeline.evaluation.datasets.webdataset import BlankClass
from pipeline.evaluation.runner.compute import Compute
from pipeline.evaluation.runner.processes import Processes

T = TypeVar("T")


@section
class EvaluationConfig:
    """How to evaluate. Only `micro_batch` and `blank_class` can change a score, and results record them.

    batch_size: images per loader item. micro_batch: images or texts computed together, padded to this size.
    workers: processes that decode images, per process of the evaluation (None: one per core, 16 at most).
    threads: CPU threads (None: torch's number). blank_class: what a blank line of classnames.txt is. examples: captions
    whose retrieved images are saved. recompute: also what is there already with the same inputs.
    """

    batch_size: int = Field(default=64, ge=1)
    micro_batch: int = Field(default=64, ge=1)
    workers: int | None = Field(default=None, ge=0)
    threads: int | None = Field(default=None, ge=1)
    blank_class: BlankClass = "keep"
    examples: int = Field(default=8, ge=0)
    recompute: bool = False

    def loader_workers(self, processes: int) -> int:
        """How many loader workers one of the evaluation's `processes` processes starts."""
        if self.workers is not None:
            return self.workers
        cores = len(os.sched_getaffinity(0))
        if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "SLURM_CPUS_PER_TASK" in os.environ:
            own = min(cores, int(os.environ["SLURM_CPUS_PER_TASK"]))  # srun has shared them out
        else:
            own = cores // ranks_here(processes)
        return min(16, max(1, own))


@dataclass(frozen=True)
class Session:
    config: EvaluationConfig
    world: Processes
    compute: Compute

    def together(self, action: Callable[[], T]) -> T:
        """Do `action` on every process; when it fails on one, all of them leave with that error, and nobody waits.

        Raises: TaskError with the lowest failing process' message.
        """
        value, error = attempt(action)
        message = next((text for text in self.world.gather_objects(error) if text is not None), None)
        if message is not None:
            raise TaskError(message)
        return value  # type: ignore[return-value]

    def on_main(self, action: Callable[[], T]) -> T:
        """Do `action` on the first process only; all get its value. Raises: TaskError on all of them when it fails."""
        value, error = attempt(action) if self.world.rank == 0 else (None, None)
        value, error = self.world.gather_objects((value, error))[0]
        if error is not None:
            raise TaskError(error)
        return value


def attempt(action: Callable[[], T]) -> tuple[T | None, str | None]:
    """The value of `action`, or what went wrong: one task's fault must not end the others."""
    try:
        return action(), None
    except UserError as error:
        return None, str(error)
    except Exception as error:
        if is_out_of_memory(error):
            return None, f"{error} Lower micro_batch, or for a watcher `together`."
        return None, f"Unexpected {type(error).__name__}: {error}. This is likely a fault of the program."

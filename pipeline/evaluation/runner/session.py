"""What an evaluation runs with: its settings, its processes and its device."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import Field

from pipeline.config import section
from pipeline.distributed.world import ranks_here
from pipeline.errors import UserError, is_out_of_memory
from pipeline.evaluation.datasets.task_data import TaskError, plain
from pipeline.evaluation.datasets.webdataset import BlankClass
from pipeline.evaluation.runner.compute import Compute
from pipeline.evaluation.runner.processes import Processes
from pipeline.evaluation.runner.results import code_version

T = TypeVar("T")


@section
class EvaluationConfig:
    """How to evaluate. `micro_batch`, `blank_class` and `precision` can change a score, and results record them."""

    batch_size: int = Field(default=64, ge=1)
    """Images per loader item."""
    micro_batch: int = Field(default=64, ge=1)
    """Images or texts that are computed together, padded to this size."""
    workers: int | None = Field(default=None, ge=0)
    """Processes that decode images, per process of the evaluation (None: one per core, 16 at most)."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads (None: torch's number)."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """What the encoders compute in. `bf16` is faster where the device has it, and scores differ in the last digits."""
    blank_class: BlankClass = "keep"
    """What a blank line of classnames.txt is: a class without a name, or (`drop`) none, as in some published work."""
    examples: int = Field(default=8, ge=0)
    """Captions, and images, whose retrieved images, and captions, are saved for reports."""
    cache: str | None = None
    """Folder that keeps decoded images (150 kB each at 224 pixels), so that later evaluations need not decode."""
    recompute: bool = False
    """Compute again what is there already with the same inputs."""
    relock: bool = False
    """Accept data other than in `suite.lock.json`, and lock that."""

    def settings(self) -> dict[str, Any]:
        """What all results of one summary have in common: every setting that can change a score, and the code."""
        return {
            "blank_class": self.blank_class,
            "micro_batch": self.micro_batch,
            "precision": self.precision,
            "code": code_version(),
        }

    def loader_workers(self, processes: int) -> int:
        """How many loader workers one of the evaluation's `processes` processes starts."""
        if self.workers is not None:
            return self.workers
        cores = len(os.sched_getaffinity(0))
        if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "SLURM_CPUS_PER_TASK" in os.environ:
            own = min(cores, int(os.environ["SLURM_CPUS_PER_TASK"]))  # srun has already divided them
        else:
            own = cores // ranks_here(processes)
        return min(16, max(1, own))


@dataclass(frozen=True)
class Session:
    """The settings, the processes and the device of one evaluation."""

    config: EvaluationConfig
    world: Processes
    compute: Compute

    def together(self, action: Callable[[], T]) -> T:
        """Run `action` on every process; if it fails on one, all of them raise that error, so that none waits forever.

        Raises:
            TaskError: The message of the lowest failing process.
        """
        value, error = attempt(action)
        message = next((text for text in self.world.gather_objects(error) if text is not None), None)
        if message is not None:
            raise TaskError(message)
        return value  # type: ignore[return-value]

    def on_main(self, action: Callable[[], T]) -> T:
        """Run `action` on the first process only and return its value on all of them.

        Raises:
            TaskError: The action failed; raised on every process.
        """
        value, error = attempt(action) if self.world.rank == 0 else (None, None)
        value, error = self.world.gather_objects((value, error))[0]
        if error is not None:
            raise TaskError(error)
        return value


def attempt(action: Callable[[], T]) -> tuple[T | None, str | None]:
    """The value of `action`, or its error message: a failed task must not stop the others."""
    try:
        return action(), None
    except UserError as error:
        return None, plain(error, longest=1200)
    except OSError as error:
        where = plain(error.filename, longest=200) if error.filename else "A file"
        return None, f"{where} cannot be read or written: {error.strerror or plain(error)}."
    except Exception as error:
        if is_out_of_memory(error):
            return None, f"{plain(error)} Lower micro_batch, or for a watcher `together`."
        return None, f"Unexpected {type(error).__name__}: {plain(error)}. This is probably a bug in neuclip."

"""The training loop: load, step, record, validate, save, evaluate. It knows no objective and no dataset by name."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Self

from torch import Tensor

from pipeline.checkpoint.reader import Checkpoint
from pipeline.checkpoint.writer import CheckpointWriter
from pipeline.data.loading.loader import Batch
from pipeline.data.loading.worker_processes import NoBatch
from pipeline.distributed.signals import EXIT_PREEMPTED, StopSignals
from pipeline.distributed.timing import Meter, Phases, present_objects_kept
from pipeline.distributed.world import World
from pipeline.engine.optim import lr_scale as scheduled_scale
from pipeline.errors import EXIT_USER_ERROR, UserError
from pipeline.metrics.logger import Telemetry
from pipeline.metrics.mfu import Utilization
from pipeline.metrics.sinks import clock
from pipeline.model.architectures import Architecture
from pipeline.objectives.pairwise import batch_keys
from pipeline.run_files import new_run_id
from pipeline.training.gradient_check import GradientCheck
from pipeline.training.inputs import PrefetchedBatches, StepFeatures
from pipeline.training.observer import StepProfiler
from pipeline.training.periodic_tests import PeriodicTests
from pipeline.training.recipe import RunConfig
from pipeline.training.run_state import EXIT_NOT_SAVED, RunEnds, RunState
from pipeline.training.saving import Saver
from pipeline.training.step import StepResult, TrainStep


@dataclass(kw_only=True)
class Trainer:
    """The parts of a stage of a run on one rank, made by `setup`, and the loop over its steps.

    A context manager, which closes the parts at its end.
    """

    state: RunState
    architecture: Architecture
    end: int
    """The step at which this stage of the run ends; without stages, the run."""
    batches: PrefetchedBatches
    normalized: Callable[[Tensor], Tensor]
    """uint8 images on the device -> images as the engine takes them."""
    take_step: TrainStep
    telemetry: Telemetry
    meter: Meter
    utilization: Utilization
    writer: CheckpointWriter
    gradient_check: GradientCheck | None
    profiler: StepProfiler | None
    tests: PeriodicTests
    saver: Saver
    hooks: Sequence[Callable[[Batch, StepResult], None]]
    """Called in this order after every step that counts, on every rank. Any of them may raise `RunEnds`."""
    features: StepFeatures = field(init=False)
    missed: Collection[str] = ()
    """The tests that were due at the checkpoint that was restored, but were prevented."""
    signals: StopSignals = field(default_factory=StopSignals)
    """Shared by the trainers of a run."""
    parts: ExitStack = field(default_factory=ExitStack)
    """What is closed at the end."""
    run: RunConfig = field(init=False)
    world: World = field(init=False)
    phases: Phases = field(init=False)

    def __post_init__(self) -> None:
        self.run, self.world = self.state.run, self.state.world
        self.phases = self.take_step.phases

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):  # a second Ctrl-C
            self.writer.give_up()
        self.parts.close()

    def fit(self) -> RunEnds:
        """Train until the end of the stage (the last one: the sample budget), a signal or a roll-back.

        Raises:
            UserError: The data or stored features cannot be read, on any rank, or too many samples are corrupt; a
                checkpoint was written before. Or the run has diverged.
        """
        state, received = self.state, self.signals.received
        starts = self.world.gather_objects((new_run_id(), bool(received)))
        start, stop = starts[0][0], any(stop for _, stop in starts)  # a signal between the stages
        self.saver.step = self.writer.saved_step = state.step
        self.signals.begin(self._announce_stop, share=partial(self.world.count, f"stop/{start}"))
        state.loader.stopped = self.signals.on_any_rank
        with present_objects_kept():
            try:
                if not stop and self.tests.make_up(self.missed):
                    self.saver.save()
                self._end_early(stop=stop)
                self.meter.start()
                first, began = state.step, time.monotonic()
                while state.step < self.end:
                    batch, problem = self._next_batch()
                    result = self.train_step(batch, stop=bool(received), problem=problem)
                    state.advance(batch, result)
                    for hook in (self._roll_back, *self.hooks):
                        hook(batch, result)
                    self._end_early(stop=result.stop)
                    if (number := state.step - first) <= 2:
                        self._report_pace(time.monotonic() - began, number=number)
                        began = time.monotonic()
                end = RunEnds(start="latest" if state.step < self.run.total_steps else None)
            except RunEnds as early:
                end = early.with_traceback(None)  # which keeps this trainer in memory
                if end.save and state.step > self.saver.step:
                    self.saver.save()
            if not self.saver.finish(stopped=self.signals.on_any_rank, again=not isinstance(end.start, Checkpoint)):
                end = RunEnds(self.writer.problem, code=EXIT_NOT_SAVED)
            elif end.start is not None and any(self.world.gather_objects(bool(received))):
                end = self._stopped()
        self.signals.announce = None  # this trainer's memory is freed
        if end.code != EXIT_NOT_SAVED:  # the saver has said more
            self._report_end(end)
        return end

    def train_step(
        self,
        batch: Batch,
        *,
        stop: bool = False,
        problem: NoBatch | UserError | None = None,
        lr_scale: float | None = None,
    ) -> StepResult:
        """Take one step, but do not advance `step`. Collective.

        Args:
            batch: This rank's part of the global batch.
            stop: Whether this rank has received a signal to stop.
            problem: Why this rank has no batch and `batch` is a stand-in; no rank takes the step then.
            lr_scale: Share of the learning rates, by default that of the schedule.

        Raises:
            RunEnds: A rank has no batch, or no stored features for it. The step has changed nothing.
        """
        step, unread = self.state.step, problem is not None
        if lr_scale is None:
            lr_scale = scheduled_scale(self.run.schedule, step=step, total_steps=self.run.total_steps)
        inputs = self.batches.inputs(batch)
        if not (unread or stop):
            self.batches.fetch_ahead(step)
        try:
            stored, teachers = self.features.of(batch, stand_in=unread)
        except UserError as error:
            problem = error
            stored, teachers = self.features.of(batch, stand_in=True)
        keys = None
        if self.take_step.objective.config.mask_equal:
            pixels = inputs.image if stored is None else None  # with stored features, no pixels are read
            keys = batch_keys(batch.text, inputs.sample_ids, pixels)
        result = self.take_step(
            (self.normalized(inputs.image) if stored is None else stored, inputs.texts),
            sample_ids=inputs.sample_ids,
            step=step,
            lr_scale=lr_scale,
            stop=stop,
            missing=problem is not None,
            teacher=teachers,
            keys=keys,
        )
        if result.missing:
            raise self._without_batch(problem, unread=unread)
        if not result.applied:
            self._report_skipped(batch, result)
        self.meter.steps += 1
        self.phases.mark("records")
        return result

    def _next_batch(self) -> tuple[Batch, NoBatch | UserError | None]:
        """The next batch; or a stand-in, and why there is none."""
        self.phases.mark("data", step=self.state.step)
        try:
            batch = self.batches.next()
        except (NoBatch, UserError) as error:
            if isinstance(error, UserError) and self.state.step == self.saver.step:
                raise  # nothing is to be saved
            return self.state.loader.stand_in(), error
        if self.profiler is not None:
            self.profiler.start()
        return batch, None

    def _without_batch(self, problem: NoBatch | UserError | None, *, unread: bool) -> RunEnds:
        """Why some ranks had no batch, which is logged. Collective."""
        problems = self.world.gather_objects((str(problem or ""), unread))
        text, unread = next((entry for entry in problems if entry[0]), ("", False))  # a NoBatch has no text
        why = "A rank had no batch when the signal came"
        if text:
            why = "The next batch cannot be read" if unread else "Stored features are missing"
        self.telemetry.event(f"{why}: the run stops without that step.")
        return RunEnds(text, code=EXIT_USER_ERROR, save=True) if text else self._stopped(save=True)

    def _roll_back(self, batch: Batch, result: StepResult) -> None:
        """Raise `RunEnds` if too many steps in a row were skipped: the run goes on from an earlier checkpoint."""
        if self.state.skipped.check(self.run, step=self.state.step - 1):
            self.batches.wait()
            raise RunEnds(start=self.saver.roll_back())

    def _end_early(self, *, stop: bool) -> None:
        """Raise `RunEnds` if the validation loss ends the run, or a signal before its last step."""
        if self.state.ended_early:
            raise RunEnds(self.state.validation.describe_end())
        if stop and self.state.step < self.run.total_steps:
            raise self._stopped()

    def _stopped(self, *, save: bool = False) -> RunEnds:
        text = f"Stopped after step {self.state.step} by a signal; continue with --resume latest."
        return RunEnds(text, code=EXIT_PREEMPTED, save=save)

    def _announce_stop(self, number: int) -> None:
        """Say at once, in a thread, what the first signal does: the step may take minutes."""
        if self.world.is_main and self.run.telemetry.progress != "quiet":
            lost = self.state.step - self.writer.saved_step
            with suppress(OSError, ValueError):
                print(
                    "Stopping after this step and a checkpoint; Ctrl-C again ends now and loses "
                    f"{lost:,} step{'s' * (lost != 1)}.",
                    file=sys.stderr,
                    flush=True,
                )

    def _report_pace(self, seconds: float, *, number: int) -> None:
        """Say what the first step of this start took, and after the second what the others will: the first one has the
        start of the loading workers, the gradient probe and compiling in it."""
        text = f"The first step took {seconds:.1f} s."
        if number == 2:
            left = clock((self.run.total_steps - self.state.step) * seconds)
            text = f"The second step took {seconds:.1f} s: at that pace, the run takes {left} more."
        self.telemetry.event(text)

    def _report_skipped(self, batch: Batch, result: StepResult) -> None:
        ids = [i for rank in self.world.gather_objects(batch.sample_id.tolist()) for i in rank]
        what = (
            "The engine skipped the step (gradient overflow)" if result.finite else "Loss or its gradient is not finite"
        )
        self.telemetry.event(f"{what} at step {self.state.step}: step skipped.", step=self.state.step, sample_ids=ids)

    def _report_end(self, end: RunEnds) -> None:
        """Log why the run ends, or raise that."""
        saved, reason = self.saver.step, str(end)
        if end.code == EXIT_USER_ERROR:
            if saved:
                reason += f" The run is saved up to step {saved}: when that is mended, continue with --resume latest."
            raise UserError(reason)
        if (count := self.state.skipped.in_a_row) and self.state.step == self.run.total_steps:
            self.telemetry.warning(
                f"The last {count} steps were skipped: the weights are those of step {self.state.step - count}, and "
                "the run may have diverged. Which samples these were is in metrics.jsonl."
            )
        if reason:
            self.telemetry.event(reason)

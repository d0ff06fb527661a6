"""The training loop: load, step, record, save, evaluate. It is independent of the objective and the dataset."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.checkpoint.reader import Checkpoint
from pipeline.checkpoint.writer import CheckpointWriter
from pipeline.data.loading.loader import Batch
from pipeline.data.loading.worker_processes import NoBatch
from pipeline.distributed.heartbeat import Heartbeat
from pipeline.distributed.signals import EXIT_PREEMPTED, StopSignals
from pipeline.distributed.timing import Meter, Phases, collect_garbage, present_objects_kept
from pipeline.distributed.world import World
from pipeline.engine.optim import lr_scale as scheduled_scale
from pipeline.errors import UserError
from pipeline.metrics.logger import Telemetry
from pipeline.metrics.mfu import Utilization
from pipeline.metrics.sinks import NOTICE, clock
from pipeline.objectives.distill import Teacher
from pipeline.objectives.equal_pairs import batch_keys
from pipeline.run_files import new_run_id
from pipeline.training.gradient_check import TOLERANCE, GradientCheck
from pipeline.training.observer import Observer
from pipeline.training.periodic_tests import PeriodicTests
from pipeline.training.recipe import RunConfig
from pipeline.training.recovery import roll_back, save_again
from pipeline.training.run_state import RunState
from pipeline.training.step import PrefetchedBatches, StepResult, TrainStep
from pipeline.training.step_features import StepFeatures

EXIT_DONE, EXIT_NOT_SAVED = 0, 74
"""74 (EX_IOERR): the last checkpoint could not be written; make room, and start again with --resume latest."""
RETRY_MINUTES = 10.0
"""How long the last checkpoint is tried again if it cannot be written. Not after a signal, when the machine goes."""


@dataclass(kw_only=True)
class Trainer:
    """The training loop of one rank, made by `setup`."""

    state: RunState
    end: int
    """The step at which this stage of the run ends; without stages, the run."""
    batches: PrefetchedBatches
    normalized: Callable[[Tensor], Tensor]
    """uint8 images on the device -> images as the engine takes them."""
    take_step: TrainStep
    telemetry: Telemetry
    observer: Observer
    meter: Meter
    utilization: Utilization
    writer: CheckpointWriter
    gradient_check: GradientCheck | None
    """Checks the first step that is applied; None: no check."""
    tests: PeriodicTests
    features: StepFeatures | None = None
    """Stored features, of teachers or of a locked image tower."""
    missed: Collection[str] = ()
    """The tests that were due at the checkpoint that was restored, but were prevented."""
    rollback: Checkpoint | None = None
    """Where the run continues after `fit` if too many steps were skipped; its data position is that of now."""
    problem: str = ""
    """What ends the run with a UserError after a checkpoint."""
    saved_step: int = 0
    """The step of the last checkpoint that was begun."""
    signals: StopSignals = field(default_factory=StopSignals)
    """Shared by the trainers of a run."""
    run: RunConfig = field(init=False)
    world: World = field(init=False)
    phases: Phases = field(init=False)

    def __post_init__(self) -> None:
        self.run, self.world = self.state.run, self.state.world
        self.phases = self.take_step.phases

    @property
    def goes_on(self) -> bool:
        """After `fit`: another trainer continues the run, in the next stage or after a rollback."""
        return self.rollback is not None or self.state.step == self.end < self.run.total_steps

    def fit(self) -> int:
        """Train until the end of the stage (the last one: the sample budget), a signal or a rollback.

        Returns:
            The exit code; EXIT_DONE also for a rollback, after which `rollback` is set.

        Raises:
            UserError: The data or stored features cannot be read, on any rank, or too many samples are corrupt; a
                checkpoint was written before.
        """
        engine, signals = self.run.engine, self.signals.received
        starts = self.world.gather_objects((new_run_id(), bool(signals)))
        start, stop = starts[0][0], any(stop for _, stop in starts)  # between the stages
        self.saved_step = self.writer.saved_step = self.state.step
        heartbeat = Heartbeat(
            Path(self.run.output),
            world=self.world,
            phases=self.phases,
            timeout_seconds=60 * engine.timeout_minutes,
            lost_after=engine.lost_rank_seconds,
            start=start,
        )
        self.signals.begin(self._announce_stop, share=partial(self.world.count, f"stop/{start}"))
        self.state.loader.stopped = self.signals.on_any_rank
        with heartbeat, present_objects_kept():
            if not stop and self.tests.make_up(self.missed):
                self._save(now=True)
            self.meter.start()
            first, began = self.state.step, time.monotonic()
            while self.state.step < self.end and not (stop or self.tests.ended_run or self.rollback):
                stop = self._train_on(signals)
                if self.state.step in (first + 1, first + 2):
                    self._report_pace(time.monotonic() - began, is_first=self.state.step == first + 1)
                    began = time.monotonic()
            saved = self._finish(stop=stop, signals=signals)
            stop = self._any(stop or bool(signals))
        self.signals.announce = None  # this trainer's memory is freed
        self.tests.report_end()
        if not saved:
            return EXIT_NOT_SAVED
        if self.problem:
            left = (
                f" The run is saved up to step {self.saved_step}: when that is mended, continue with --resume latest."
            )
            raise UserError(self.problem + (left if self.saved_step else ""))
        if (count := self.state.skipped.in_a_row) and self.state.step == self.run.total_steps:
            self.telemetry.warning(
                f"The last {count} steps were skipped: the weights are those of step {self.state.step - count}, and "
                "the run may have diverged. Which samples these were is in metrics.jsonl."
            )
        if self.tests.ended_run and self.tests.validation is not None:
            self.telemetry.event(self.tests.validation.describe_end())
            return EXIT_DONE
        if stop and self.state.step < self.run.total_steps:
            self.telemetry.event(f"Stopped after step {self.state.step} by a signal; continue with --resume latest.")
            return EXIT_PREEMPTED
        return EXIT_DONE

    def _train_on(self, signals: list[int]) -> bool:
        """Take the next step, and do what follows it. Returns whether the run stops because of a signal."""
        before = self.state.position
        batch, missing = self._load()
        result = self.train_step(batch, stop=bool(signals), missing=missing)
        if result.missing:
            self.state.position = before
            problems = [found for found in self.world.gather_objects((self.problem, missing)) if found[0]]
            why = "A rank had no batch when the signal came"
            if problems:
                self.problem, unread = problems[0]
                why = "The next batch cannot be read" if unread else "Stored features are missing"
            self.telemetry.event(f"{why}: the run stops without that step.")
            return self._end_early()
        self.state.skipped.note(applied=result.applied)
        if self.state.skipped.check(self.run, step=self.state.step):
            self.batches.settle()
            self.rollback = roll_back(self.state, writer=self.writer, report=self.telemetry.event)
            return result.stop
        self.state.step += 1
        self._record(batch, result)
        if self.problem:
            return self._end_early()
        best = self.tests.validate(stop=result.stop)
        # At the end of a stage, no further step asks the other ranks.
        stop = result.stop or (self.state.step == self.end and self._any(bool(signals)))
        self._save(now=stop or best or self.tests.ended_run)
        self.tests.evaluate(stop=stop)
        return stop

    def _report_pace(self, seconds: float, *, is_first: bool) -> None:
        """Say what the first step of this start took, and after the second what the others will: the first one has
        the start of the loading workers, the gradient probe and compiling in it."""
        left = clock((self.run.total_steps - self.state.step) * seconds)
        second = f"The second step took {seconds:.1f} s: at that pace, the run takes {left} more."
        self.telemetry.event(f"The first step took {seconds:.1f} s." if is_first else second, level=NOTICE)

    def _end_early(self) -> bool:
        """Save what was trained, and return that the run stops."""
        if self.state.step > self.saved_step:
            self._save(now=True)
        return True

    def _any(self, value: bool) -> bool:
        """Whether a value is true on any rank. Collective."""
        return any(self.world.gather_objects(value))

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

    def _load(self) -> tuple[Batch, bool]:
        """The next batch, and False; or a stand-in and True, if there is none: the run is to stop, or has a problem."""
        self.phases.mark("data", step=self.state.step)
        try:
            batch = self.batches.next()
        except (NoBatch, UserError) as error:
            self.problem = str(error)  # none with NoBatch
            if self.problem and self.state.step == self.saved_step:
                raise  # nothing is to be saved
            return self.state.loader.stand_in(), True
        self.state.position = batch.position
        if self.observer.profiler is not None:
            self.observer.profiler.before(self.state.step)
        return batch, False

    def train_step(
        self, batch: Batch, *, stop: bool = False, missing: bool = False, lr_scale: float | None = None
    ) -> StepResult:
        """Take one step and count it, but do not advance `step`. Collective.

        Args:
            batch: This rank's part of the global batch.
            stop: Whether this rank has received a signal to stop.
            missing: The batch is a stand-in: no rank takes the step.
            lr_scale: Share of the learning rates, by default that of the schedule.
        """
        state, step = self.state, self.state.step
        if lr_scale is None:
            lr_scale = scheduled_scale(self.run.schedule, step=step, total_steps=self.run.total_steps)
        inputs = self.batches.inputs(batch)
        images, texts = inputs.image, inputs.texts
        if not (missing or stop):
            self.batches.fetch_ahead(step)
        stored, teachers, missing = self._stored(batch, missing=missing)
        image = self.normalized(images) if stored is None else stored
        keys = None
        if self.take_step.objective.config.mask_equal:
            pixels = images if stored is None else None  # with stored features, no pixels are read
            keys = batch_keys(batch.text, inputs.sample_ids, pixels)
        result = self.take_step(
            (image, texts),
            sample_ids=inputs.sample_ids,
            step=step,
            lr_scale=lr_scale,
            stop=stop,
            missing=missing,
            teacher=teachers,
            keys=keys,
        )
        if result.missing:
            return result
        if result.applied and state.ema is not None:
            state.ema.update()
        if result.applied and self.gradient_check is not None:
            distance = self.gradient_check.finish(clipping=self.run.engine.gradient_clipping)
            self.gradient_check = self.take_step.on_gradients = None
            self.telemetry.event(
                f"Gradient probe: engine and plain autograd differ by {distance:.1e} "
                f"({TOLERANCE[state.engine.bf16]:g} allowed)."
            )
        if not result.applied:
            self._report_skipped(batch, result)
        self.meter.steps += 1
        self.phases.mark("records")
        if batch.position.batch == state.loader.steps_per_epoch:
            self._report_epoch(batch)
        return result

    def _stored(self, batch: Batch, *, missing: bool) -> tuple[Tensor | None, Sequence[Teacher], bool]:
        """Stored features of a batch, and `missing`; zeros and True where those of a sample are missing."""
        if self.features is None:
            return None, (), missing
        if not missing:
            try:
                return *self.features.of(batch), False
            except UserError as error:
                self.problem = str(error)
        return *self.features.of(batch, stand_in=True), True

    def _record(self, batch: Batch, result: StepResult) -> None:
        """Pictures, distributions and metrics that are due after this step."""
        self.utilization.count(text_tokens=result.text_tokens)
        self.observer.after(batch, result)
        if self.state.step == 1:
            self.observer.note_captions(batch)
        if result.stop or self.state.step == self.end or self.state.step % self.run.telemetry.every == 0:
            try:
                scalars = self.observer.scalars(batch, result, meter=self.meter, utilization=self.utilization)
                self.telemetry.train(step=self.state.step, scalars=scalars)
            except UserError as error:  # too many corrupt samples, on every rank
                self.problem = str(error)
            collect_garbage()

    def _save(self, *, now: bool) -> None:
        """Start writing a checkpoint if one is due: not while steps are skipped, unless the run ends."""
        step = self.state.step
        if now or step == self.end or (step % self.run.checkpoint.every == 0 and not self.state.skipped.in_a_row):
            self.phases.mark("checkpoint")
            snapshot = self.state.snapshot()
            if ruined := self.world.gather_objects(snapshot.not_finite)[0]:
                message = f"{ruined} is not finite after step {step}: the run has diverged. No checkpoint is written."
                if step == self.end:
                    raise UserError(
                        f"{message} Resume from an earlier one or start again, with a smaller optimizer.lr."
                    )
                self.telemetry.warning(message)
                return
            self.writer.save(snapshot)
            self.saved_step = step

    def _finish(self, *, stop: bool, signals: list[int]) -> bool:
        """Wait for the last checkpoint on every rank, and retry if it failed. Returns whether it is on disk."""
        self.phases.mark("last checkpoint")
        self.writer.finish()
        if not self._agreed(self.writer.problem) or self.rollback:  # every rank waits here until rank 0 has written
            return True
        return save_again(
            self.state.snapshot,
            writer=self.writer,
            agreed=self._agreed,
            minutes=0.0 if stop else RETRY_MINUTES,
            stopped=lambda: bool(signals),
            report=self.telemetry.event,
            fallback=self.run.checkpoint.fallback,
        )

    def _agreed(self, value: Any) -> Any:
        """Rank 0's value. Collective."""
        self.phases.mark("last checkpoint")
        return self.world.gather_objects(value)[0]

    def _report_skipped(self, batch: Batch, result: StepResult) -> None:
        ids = [i for rank in self.world.gather_objects(batch.sample_id.tolist()) for i in rank]
        what = (
            "The engine skipped the step (gradient overflow)" if result.finite else "Loss or its gradient is not finite"
        )
        self.telemetry.event(f"{what} at step {self.state.step}: step skipped.", step=self.state.step, sample_ids=ids)

    def _report_epoch(self, batch: Batch) -> None:
        """Log the samples that were seen and skipped in the epoch that ends with this batch."""
        try:
            report = self.state.loader.report(batch.position)
        except UserError as error:  # too many corrupt samples, on every rank
            self.problem = str(error)
            return
        self.telemetry.event(
            f"Epoch {report.epoch} done: {report.samples:,} samples in {report.batch:,} batches, {report.dropped:,} "
            f"left over, {report.replaced:,} corrupt and replaced, order {report.order_hash}.",
            data=asdict(report),
        )

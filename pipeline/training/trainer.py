"""The training loop: load, step, record, save, evaluate. It is independent of the objective and the dataset."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from pipeline.checkpoint.reader import agreed_checkpoint
from pipeline.checkpoint.writer import CheckpointWriter
from pipeline.data.loading.decode import normalize
from pipeline.data.loading.loader import Batch, Loader
from pipeline.distributed.heartbeat import Heartbeat
from pipeline.distributed.signals import EXIT_PREEMPTED, stop_signals
from pipeline.distributed.timing import Meter, Phases
from pipeline.distributed.world import World
from pipeline.engine.engine_protocol import Engine
from pipeline.engine.lr_schedule import lr_scale
from pipeline.errors import UserError
from pipeline.metrics.logger import Telemetry
from pipeline.metrics.mfu import Utilization
from pipeline.model.architectures import Architecture
from pipeline.model.trimming import TextTrimming
from pipeline.objectives import Objective
from pipeline.training.gradient_check import TOLERANCE, GradientCheck
from pipeline.training.image_features import ImageFeatures
from pipeline.training.last_checkpoint import save_again
from pipeline.training.observer import Observer
from pipeline.training.periodic_tests import PeriodicTests
from pipeline.training.prefetch import PrefetchedBatches
from pipeline.training.recipe import RunConfig
from pipeline.training.run_state import RunState
from pipeline.training.step import StepResult, TrainStep

T = TypeVar("T")
EXIT_DONE, EXIT_NOT_SAVED = 0, 74
"""74 (EX_IOERR): the last checkpoint could not be written; make room, and start again with --resume latest."""


@dataclass(kw_only=True)
class Trainer:
    """The training loop of one rank, made by `setup`."""

    state: RunState
    end: int
    """The step at which this stage of the run ends; without stages, the run."""
    batches: PrefetchedBatches
    take_step: TrainStep
    architecture: Architecture
    telemetry: Telemetry
    observer: Observer
    meter: Meter
    utilization: Utilization
    writer: CheckpointWriter
    gradient_check: GradientCheck | None
    """Checks the first step that is applied; None: no check."""
    tests: PeriodicTests
    trimming: TextTrimming | None
    """None: the towers read whole texts, padding included."""
    on_rollback: Callable[[int], None]
    """Called on rank 0 with the step to which the run has rolled back."""
    resumed_at: int | None = None
    """The first step of this stage, if the weights are those of a checkpoint; None: a new run."""
    image_features: ImageFeatures | None = None
    """Stored outputs of a locked image tower; None: the tower runs in every step."""

    @property
    def run(self) -> RunConfig:
        return self.state.run

    @property
    def world(self) -> World:
        return self.state.world

    @property
    def loader(self) -> Loader:
        return self.state.loader

    @property
    def engine(self) -> Engine:
        return self.state.engine

    @property
    def objective(self) -> Objective:
        return self.state.objective

    @property
    def phases(self) -> Phases:
        return self.take_step.phases

    @property
    def step(self) -> int:
        """Updates taken."""
        return self.state.step

    def fit(self) -> int:
        """Train until the end of the stage (the last one: the sample budget) or a signal. Returns the exit code."""
        limit = 60 * self.run.engine.timeout_minutes
        stop, batch = False, None
        with (
            stop_signals() as signals,
            Heartbeat(Path(self.run.output), world=self.world, phases=self.phases, timeout_seconds=limit),
        ):
            if self.resumed_at is not None:
                self.tests.finish_evaluation(resized=0 < self.resumed_at == self.step)
            self.meter.start()
            while self.step < self.end and not stop and not self.tests.ended_run:
                batch = self._load()
                result = self.train_step(batch, stop=bool(signals))
                if self._must_roll_back():
                    self._roll_back()
                    continue
                self.state.step += 1
                stop = result.stop
                self._record(batch, result)
                best = self.tests.validate(stop=stop)
                self._save(batch, now=stop or best or self.tests.ended_run)
                self.tests.evaluate(stop=stop)
            saved = self._finish(batch, stop=stop)
        self.tests.report_end()
        if not saved:
            return EXIT_NOT_SAVED
        if self.tests.ended_run and self.tests.validation is not None:
            self.telemetry.event(self.tests.validation.describe_end())
            return EXIT_DONE
        if self.step < self.end or (stop and self.step < self.run.total_steps):
            self.telemetry.event(f"Stopped after step {self.step} by a signal; continue with --resume latest.")
            return EXIT_PREEMPTED
        return EXIT_DONE

    def _load(self) -> Batch:
        self.phases.mark("data", step=self.step)
        batch = self.batches.next()
        self.observer.before(self.step)
        return batch

    def train_step(self, batch: Batch, *, stop: bool = False, lr_scale: float | None = None) -> StepResult:
        """Take one step and count it, but do not advance `step`. Collective.

        Args:
            batch: This rank's part of the global batch.
            stop: Whether this rank has received a signal to stop.
            lr_scale: Share of the learning rates, by default that of the schedule.
        """
        device, image = self.world.device, self.normalized(self.batches.image(batch))
        computed_images = len(image) / len(batch.text)
        if self.image_features is not None:
            with self.phases("forward"):
                image = self.image_features.outputs(batch, image)
        texts = self.trimming.shorten(batch.text) if self.trimming else batch.text
        text, ids = texts.to(device, non_blocking=True), batch.sample_id.to(device, non_blocking=True)
        result = self.take_step(
            (image, text),
            sample_ids=ids,
            step=self.step,
            lr_scale=self._lr_scale(self.step) if lr_scale is None else lr_scale,
            stop=stop,
            text_lengths=self.trimming.lengths(texts) if self.trimming else None,
        )
        if self.image_features is not None:
            self.image_features.save()
        self.utilization.count(text_tokens=result.text_tokens, images=computed_images)
        self.state.skipped.note(applied=result.applied)
        if result.applied:
            if self.state.ema is not None:
                self.state.ema.update()
            self._check_gradient()
        else:
            self._report_skipped(batch, result)
        self.meter.count()
        self.phases.mark("records")
        if batch.position.batch == self.loader.steps_per_epoch:
            self._report_epoch(batch)
        return result

    def normalized(self, image: Tensor) -> Tensor:
        """uint8 images on the device, as the engine takes them."""
        return normalize(
            image,
            mean=self.architecture.mean,
            std=self.architecture.std,
            dtype=self.engine.dtype,
            memory_format=self.engine.module.image_format,
        )

    def _record(self, batch: Batch, result: StepResult) -> None:
        """Pictures, distributions and metrics that are due after this step."""
        self.observer.after(
            self.step,
            result=result,
            image=batch.image,
            text=batch.shown_text,
            state_distributions=self.objective.distributions,
        )
        if self._is_last(result.stop) or self.step % self.run.telemetry.every == 0:
            self.telemetry.train(step=self.step, scalars=self._scalars(batch, result))

    def _save(self, batch: Batch, *, now: bool) -> None:
        """Start writing a checkpoint if one is due."""
        if self._is_last(now) or self.step % self.run.checkpoint.every == 0:
            self.phases.mark("checkpoint")
            self.writer.save(self.state.snapshot(batch))

    def _finish(self, batch: Batch | None, *, stop: bool) -> bool:
        """Wait for the last checkpoint on every rank, and retry if it failed. Returns whether it is on disk."""
        self.phases.mark("last checkpoint")
        self.writer.finish()
        if batch is None or not self._agreed(self.writer.problem):  # every rank waits here until rank 0 has written
            return True
        return save_again(
            lambda: self.state.snapshot(batch),
            writer=self.writer,
            agreed=self._agreed,
            minutes=0.0 if stop else self.run.checkpoint.retry_minutes,
            report=self.telemetry.event,
            fallback=self.run.checkpoint.fallback,
        )

    def _agreed(self, value: T) -> T:
        """Rank 0's value. Collective."""
        self.phases.mark("last checkpoint")
        agreed: T = self.world.gather_objects(value)[0]
        return agreed

    def _is_last(self, stop: bool) -> bool:
        return stop or self.step == self.end

    def _lr_scale(self, step: int) -> float:
        return lr_scale(self.run.schedule, step=step, total_steps=self.run.total_steps)

    def _check_gradient(self) -> None:
        if self.gradient_check is not None:
            distance = self.gradient_check.finish(clipping=self.run.engine.gradient_clipping)
            self.gradient_check = None
            self.telemetry.event(
                f"Gradient probe: engine and plain autograd differ by {distance:.1e} "
                f"({TOLERANCE[self.engine.bf16]:g} allowed)."
            )

    def _report_skipped(self, batch: Batch, result: StepResult) -> None:
        ids = [i for rank in self.world.gather_objects(batch.sample_id.tolist()) for i in rank]
        what = (
            "The engine skipped the step (gradient overflow)" if result.finite else "Loss or its gradient is not finite"
        )
        self.telemetry.event(f"{what} at step {self.step}: step skipped.", step=self.step, sample_ids=ids)

    def _must_roll_back(self) -> bool:
        return self.state.skipped.check(
            step=self.step, max_skipped_steps=self.run.max_skipped_steps, max_rollbacks=self.run.max_rollbacks
        )

    def _roll_back(self) -> None:
        """Return to the newest good checkpoint from before the skipped steps; the data continues after them."""
        skipped, here = self.state.skipped, self.step + 1
        count = skipped.in_a_row
        self.writer.wait()  # the checkpoint may be the one that is being written
        folder = Path(self.run.output)
        checkpoint = agreed_checkpoint(
            folder, "latest", world=self.world, on_event=self.telemetry.event, not_after=here - count
        )
        if checkpoint is None:
            raise UserError(
                f"{count} steps in a row were skipped, and there is no checkpoint from before step {here - count}, the "
                "first of them, to roll back to. Start again with a smaller optimizer.lr."
            )
        self.state.restore_training(checkpoint)
        skipped.in_a_row = 0
        skipped.rollbacks += 1
        self.world.barrier()  # all ranks have read it
        if self.world.is_main:
            self.writer.abandon_after(self.step)
            self.on_rollback(self.step)
        self.telemetry.rewind(self.step)
        self.telemetry.event(
            f"Rolled back to {checkpoint.path.name} after {count} skipped steps in a row; the data continues after "
            f"them (rollback {skipped.rollbacks} of {self.run.max_rollbacks}).",
            step=here,
            rollbacks=skipped.rollbacks,
            checkpoint=checkpoint.path.name,
        )

    def _scalars(self, batch: Batch, result: StepResult) -> dict[str, float]:
        """This step's metrics, read from the device in one go."""
        metrics = dict(result.output.metrics)
        values = torch.stack([value.float() for value in metrics.values()]).tolist()
        norm = self.engine.gradient_norm()
        position = batch.position
        scale = self._lr_scale(self.step - 1)
        rates = self.meter.read()
        return {
            "samples": self.step * self.run.batch_size,
            "epoch": position.epoch + position.batch / self.loader.steps_per_epoch,
            "loss": float(result.output.loss),
            **dict(zip(metrics, values, strict=True)),
            "lr": self.run.optimizer.lr * scale,
            **self.objective.learning_rates(lr_scale=scale),
            **({} if norm is None else {"gradient_norm": norm}),
            **self.state.skipped.scalars(),
            **self.objective.counters(),
            "text_tokens": result.text_tokens,
            "corrupt_samples": self.loader.replaced(position),
            **rates,
            **self.utilization.scalars(rates["samples_per_second"]),
        }

    def _report_epoch(self, batch: Batch) -> None:
        """Log the samples that were seen and skipped in the epoch that ends with this batch."""
        report = self.loader.report(batch.position)
        self.telemetry.event(
            f"Epoch {report.epoch} done: {report.samples:,} samples in {report.batch:,} batches, {report.dropped:,} "
            f"left over, {report.replaced:,} corrupt and replaced, order {report.order_hash}.",
            data=asdict(report),
        )

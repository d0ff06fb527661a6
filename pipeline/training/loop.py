"""The training loop: load, step, record, validate, save, evaluate. It knows no objective and no dataset by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

from torch import Tensor

from pipeline.checkpoint.reader import Checkpoint
from pipeline.checkpoint.writer import CheckpointWriter
from pipeline.data.loading.loader import Batch, NoBatch
from pipeline.distributed.signals import EXIT_PREEMPTED, StopSignals
from pipeline.distributed.timing import Meter, Phases, present_objects_kept
from pipeline.distributed.world import World
from pipeline.errors import EXIT_USER_ERROR, UserError
from pipeline.metrics.logger import Telemetry
from pipeline.metrics.mfu import Utilization
from pipeline.model.towers import build_towers, without_weights
from pipeline.objectives.distill import Teacher
from pipeline.objectives.pairwise import batch_keys
from pipeline.run_files import new_run_id
from pipeline.training.build import build_state, choose_micro_batch
from pipeline.training.gradient_check import GradientCheck
from pipeline.training.hooks import Observer, Saver
from pipeline.training.inputs import PrefetchedBatches, StepFeatures, text_layout
from pipeline.training.periodic_tests import PeriodicTests
from pipeline.training.recipe import Stage
from pipeline.training.run_state import EXIT_NOT_SAVED, RunEnds
from pipeline.training.step import StepResult, TrainStep, micro_batches
from pipeline.training.step import lr_scale as scheduled_scale

Hook = Callable[[Batch, StepResult], None]
"""Called after every step that counts, on every rank. It may raise `RunEnds`."""


class Trainer:
    """The parts of a stage of a run (without stages, of the whole run) on one rank, and the loop over its steps.

    A context manager, which closes the parts, and the telemetry, at its end. `resumed` is the checkpoint that will be
    restored.

    Raises:
        UserError: A part cannot be built.
    """

    features: StepFeatures | None = None
    """The stored features that the run trains with, which are opened when its weights are known."""
    missed: Collection[str] = ()
    """The tests that were due at the checkpoint that was restored, but were prevented."""

    def __init__(self, stage: Stage, *, world: World, telemetry: Telemetry, resumed: Checkpoint | None) -> None:
        self.run, self.world, self.telemetry = stage.run, world, telemetry
        self.signals = StopSignals()
        """Shared by the trainers of a run."""
        run, on_event = stage.run, telemetry.event
        with ExitStack() as parts:
            parts.callback(telemetry.close)
            self.phases = world.phases or Phases(world.device)
            self.state = state = build_state(stage, world=world, parts=parts)
            trains, plain = (resumed.step if resumed else 0) < stage.end, None
            if run.engine.probe and trains:  # in fp32 and with open_clip's own attention
                model = replace(without_weights(run.model), grad_checkpointing=True, packed_attention=False)
                plain, _ = build_towers(model, seed=run.seed)
            if run.engine.micro_batch == "auto" and trains:
                on_event(choose_micro_batch(state, plain=plain, resumed=resumed))
            local = run.batch_size // world.size
            chunks = micro_batches(local, state.micro_batch or run.engine.rows(local))
            self.take_step = TrainStep(state.engine, state.objective, world=world, seed=run.seed, chunks=chunks)
            self.gradient_check = None
            if plain is not None:
                clipping = run.engine.gradient_clipping
                self.gradient_check = GradientCheck(self.take_step, plain, clipping=clipping, report=on_event)
            self.meter = Meter(run.batch_size, self.phases)
            texts = text_layout(state.engine, run.model, chunks, device=world.device)
            self.batches = PrefetchedBatches(
                state.loader, texts=texts, steps=stage.end, meter=self.meter, device=world.device
            )
            self.writer = CheckpointWriter(
                Path(run.output),
                config=run.checkpoint,
                world=world,
                architecture=state.architecture,
                on_event=on_event,
                resumed_from=resumed.path if resumed else None,
                mirror_minutes=run.engine.timeout_minutes * 2 / 3,  # after all of it, rank 0 counts as stalled
            )
            parts.callback(self.writer.finish)
            self.utilization = Utilization(
                run.model,
                device=world.device,
                ranks=world.size,
                bf16=state.engine.bf16,
                peak_tflops=run.telemetry.peak_tflops,
                images=run.data.image_features is None,
            )
            self.tests = PeriodicTests(state, telemetry)
            self.saver = Saver(state, self.writer, telemetry)
            self.observer = Observer(state, telemetry, self.meter, self.utilization)
            checks: list[Hook] = [] if self.gradient_check is None else [self.gradient_check]
            tests = self.tests
            self.hooks: list[Hook] = [state.average, *checks, self.observer, tests.validate, self.saver, tests.evaluate]
            self.parts = parts.pop_all()

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
                self.observer.start()
                while state.step < state.end:
                    batch, problem = self._next_batch()
                    result = self.train_step(batch, stop=bool(received), problem=problem)
                    state.advance(batch, result)
                    for hook in (self._roll_back, *self.hooks):
                        hook(batch, result)
                    self._end_early(stop=result.stop)
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
        stored: Tensor | None = None
        teacher: Teacher | None = None
        keys = None
        if self.features is not None:
            try:
                stored, teacher = self.features.of(batch, stand_in=unread)
            except UserError as error:
                problem = error
                stored, teacher = self.features.of(batch, stand_in=True)
        if self.take_step.objective.config.mask_equal:
            pixels = inputs.image if stored is None else None  # with stored features, no pixels are read
            keys = batch_keys(batch.text, inputs.sample_ids, pixels)
        result = self.take_step(
            (self.state.normalized(inputs.image) if stored is None else stored, inputs.texts),
            sample_ids=inputs.sample_ids,
            step=step,
            lr_scale=lr_scale,
            stop=stop,
            missing=problem is not None,
            teacher=teacher,
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
            return self.batches.next(), None
        except (NoBatch, UserError) as error:
            if isinstance(error, UserError) and self.state.step == self.saver.step:
                raise  # nothing is to be saved
            return self.state.loader.stand_in(), error

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
                reason += f" The run is saved up to step {saved}: when that is fixed, continue with --resume latest."
            raise UserError(reason)
        if (count := self.state.skipped.in_a_row) and self.state.step == self.run.total_steps:
            self.telemetry.warning(
                f"The last {count} steps were skipped: the weights are those of step {self.state.step - count}, and "
                "the run may have diverged. Which samples these were is in metrics.jsonl."
            )
        if reason:
            self.telemetry.event(reason)

"""What follows a step: the observer logs it, and the saver writes a checkpoint, or finds one to roll back to.

The rules of skipping and rolling back are in docs/cluster.md. Weights, moments, objective and step count are restored,
the position in the data is not, so that the number of updates stays as planned. The update that ruins the weights is
finite itself, and so may be the losses of the next few steps: a checkpoint therefore counts as good only when
FINITE_STEPS steps after it were applied.

The last checkpoint is written again until it is on disk: without it, the training since the one before is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from pipeline.checkpoint.reader import Checkpoint, agreed_checkpoint
from pipeline.checkpoint.writer import CheckpointWriter
from pipeline.data.loading.loader import Batch
from pipeline.data.shards.check_shards import caption_notes
from pipeline.distributed.timing import Meter, collect_garbage
from pipeline.errors import EXIT_USER_ERROR, UserError
from pipeline.evaluation.watcher import forget_after
from pipeline.metrics.logger import Telemetry
from pipeline.metrics.mfu import Utilization
from pipeline.metrics.sinks import clock
from pipeline.run_files import name_of
from pipeline.training.run_state import RunEnds, RunState
from pipeline.training.step import StepResult

DISTRIBUTIONS_EVERY = 1000
"""Steps between distributions over the batch."""
PAUSE_SECONDS = 15.0
RETRY_MINUTES = 10.0
"""How long the last checkpoint is tried again if it cannot be written. Not after a signal, when the machine goes."""


@dataclass
class Observer:
    """Reports the metrics and distributions of a step, and the counts of an epoch. Collective."""

    state: RunState
    telemetry: Telemetry
    meter: Meter
    utilization: Utilization

    def start(self) -> None:
        """Call it before the first step."""
        self._steps, self._began = 0, time.monotonic()
        self.meter.start()

    def __call__(self, batch: Batch, result: StepResult) -> None:
        """Report what is due after this step."""
        self._report_pace()
        state, telemetry, step = self.state, self.telemetry, self.state.step
        self.utilization.count(text_tokens=result.text_tokens)
        if state.world.is_main and step % DISTRIBUTIONS_EVERY == 0:
            self._report_distributions(result)
        if step == 1:
            tokens = state.world.all_gather(batch.text.to(state.world.device)).cpu()
            masked, tokenize = state.run.objective.mask_equal, state.architecture.tokenize
            for note in caption_notes(tokens, tokenize=tokenize, of="the first batch's", masked=masked):
                telemetry.warning(note)
        try:
            if result.stop or step == state.end or step % state.run.telemetry.every == 0:
                telemetry.scalars("train", step=step, values=self._scalars(batch, result))
                collect_garbage()
            if batch.position.batch == state.loader.steps_per_epoch:
                report = state.loader.report(batch.position)
                telemetry.event(
                    f"Epoch {report.epoch} done: {report.samples:,} samples in {report.batch:,} batches, "
                    f"{report.dropped:,} left over, {report.replaced:,} corrupt and replaced, "
                    f"order {report.order_hash}.",
                    data=asdict(report),
                )
        except UserError as error:  # too many corrupt samples, on every rank
            raise RunEnds(str(error), code=EXIT_USER_ERROR, save=True) from error

    def _report_pace(self) -> None:
        """Say what the first step of this start took, and after the second what the others will: the first one has the
        start of the loading workers, the gradient probe and compiling in it."""
        self._steps += 1
        if self._steps <= 2:
            seconds, self._began = time.monotonic() - self._began, time.monotonic()
            text = f"The first step took {seconds:.1f} s."
            if self._steps == 2:
                left = clock((self.state.run.total_steps - self.state.step) * seconds)
                text = f"The second step took {seconds:.1f} s: at that pace, the run takes {left} more."
            self.telemetry.event(text)

    def _scalars(self, batch: Batch, result: StepResult) -> dict[str, float]:
        """The metrics of the step; the meter starts its next measurement."""
        state, run, position = self.state, self.state.run, batch.position
        metrics = dict(result.output.metrics)
        values = torch.stack([value.float() for value in metrics.values()]).tolist()
        norm = state.engine.gradient_norm()
        rates = self.meter.read()
        tokens = torch.tensor([result.text_tokens], dtype=torch.float64, device=state.world.device)
        return {
            "samples": state.step * run.batch_size,
            "epoch": position.epoch + position.batch / state.loader.steps_per_epoch,
            "loss": float(result.output.loss),
            **dict(zip(metrics, values, strict=True)),
            "lr": run.optimizer.lr * result.lr_scale,
            **state.objective.learning_rates(lr_scale=result.lr_scale),
            **({} if norm is None else {"gradient_norm": norm}),
            "skipped_steps": state.skipped.skipped,
            "rollbacks": state.skipped.rollbacks,
            **state.objective.counters(),
            "text_tokens": float(state.world.all_gather(tokens).mean()),
            "corrupt_samples": state.loader.report(position).replaced,
            **rates,
            **self.utilization.scalars(rates["samples_per_second"]),
        }

    def _report_distributions(self, result: StepResult) -> None:
        """Log the distributions over the batch, on rank 0."""
        output = result.output
        norms = {
            "gradient_of_image_feature": output.grad_image.norm(dim=1),
            "gradient_of_text_feature": output.grad_text.norm(dim=1),
        }
        histograms = {**output.distributions, **self.state.objective.distributions(), **norms}
        values = {name: value.float().cpu() for name, value in histograms.items()}
        self.telemetry.distributions(step=self.state.step, values=values)


@dataclass
class Saver:
    """Saves a run when a checkpoint is due. All methods are collective."""

    state: RunState
    writer: CheckpointWriter
    telemetry: Telemetry
    step: int = 0
    """The step of the last checkpoint that was begun."""

    def __call__(self, batch: Batch, result: StepResult) -> None:
        """Save if that is due: at the end, after the best validation, and regularly unless steps are being skipped."""
        state = self.state
        regular = state.step % state.run.checkpoint.every == 0 and not state.skipped.in_a_row
        ends = result.stop or state.step == state.end or state.ended_early
        if regular or ends or state.validation.best_step == state.step:
            self.save()

    def save(self) -> None:
        """Start writing a checkpoint."""
        state, step = self.state, self.state.step
        state.mark("checkpoint")
        snapshot = state.snapshot()
        if ruined := state.world.gather_objects(snapshot.not_finite)[0]:
            message = f"{ruined} is not finite after step {step}: the run has diverged. No checkpoint is written."
            if step == state.end:
                raise UserError(f"{message} Resume from an earlier one or start again, with a smaller optimizer.lr.")
            self.telemetry.warning(message)
            return
        self.writer.save(snapshot)
        self.step = step

    def finish(self, *, stopped: Callable[[], bool], again: bool) -> bool:
        """Wait for the last checkpoint on every rank. Returns whether it is on disk.

        If it could not be written, it is tried `again` until rank 0 knows of a signal (`stopped`).
        """
        self.state.mark("last checkpoint")
        self.writer.finish()
        deadline, over = time.monotonic() + 60 * RETRY_MINUTES, False
        while True:
            self.state.mark("last checkpoint")
            # Every rank waits here until rank 0 has written.
            problem, over = self.state.world.gather_objects((self.writer.problem, over))[0]
            if not (problem and again):
                return True
            if over:
                break
            self.writer.save(self.state.snapshot())
            self.writer.wait()
            over = stopped() or time.monotonic() >= deadline
            if self.writer.problem and not over:
                time.sleep(PAUSE_SECONDS)
        self.telemetry.event(
            f"The last checkpoint, {name_of(self.state.step)}, is NOT on disk ({problem}): the training since the one "
            "before is lost. Free some space, and continue with --resume latest."
        )
        return False

    def roll_back(self) -> Checkpoint:
        """A good checkpoint from before the skipped steps, whose data continues after them; later ones are removed.

        The run continues from it as a run that is resumed: its step may be one of an earlier stage. Call it after a
        step that was skipped.

        Raises:
            UserError: There is no checkpoint from before the skipped steps.
        """
        state, event = self.state, self.telemetry.event
        run, world, skipped, here = state.run, state.world, state.skipped, state.step
        count = skipped.in_a_row
        self.writer.wait()  # the checkpoint may be the one that is being written

        def newest(not_after: int) -> Checkpoint | None:
            with suppress(UserError):  # all of them are damaged
                return agreed_checkpoint(Path(run.output), "latest", world=world, on_event=event, not_after=not_after)
            return None

        checkpoint = skipped.choose(newest, step=here)
        if checkpoint is None:
            raise UserError(
                f"{count} steps in a row were skipped, and there is no checkpoint from before step {here - count}, the "
                "first of them, to roll back to. Start again with a smaller optimizer.lr."
            )
        skipped.in_a_row, skipped.rollbacks, skipped.rolled_back_to = 0, skipped.rollbacks + 1, checkpoint.step
        if world.is_main:
            self.writer.abandon_after(checkpoint.step)
            forget_after(Path(run.output), checkpoint.step)
        event(
            f"Rolled back to {checkpoint.path.name} after {count} skipped steps in a row; the data continues after "
            f"them (rollback {skipped.rollbacks} of {run.max_rollbacks}).",
            step=here,
            rollbacks=skipped.rollbacks,
            checkpoint=checkpoint.path.name,
        )
        now = {"data": state.loader.state_dict(state.position), "faults": asdict(skipped)}
        return replace(checkpoint, meta={**checkpoint.meta, **now})

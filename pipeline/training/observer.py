"""What is logged of a step: metrics, and on rank 0 distributions over the batch."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

import torch

from pipeline.data.loading.loader import Batch
from pipeline.data.shards.check_shards import caption_notes
from pipeline.distributed.timing import Meter, collect_garbage
from pipeline.errors import EXIT_USER_ERROR, UserError
from pipeline.metrics.logger import Telemetry
from pipeline.metrics.mfu import Utilization
from pipeline.metrics.sinks import clock
from pipeline.training.run_state import RunEnds, RunState
from pipeline.training.step import StepResult

DISTRIBUTIONS_EVERY = 1000
"""Steps between distributions over the batch."""


@dataclass
class Observer:
    """Reports the metrics and distributions of a step, and the counts of an epoch. Collective."""

    state: RunState
    telemetry: Telemetry
    meter: Meter
    utilization: Utilization
    end: int
    """The step at which the stage ends."""

    def start(self) -> None:
        """Call it before the first step."""
        self._steps, self._began = 0, time.monotonic()
        self.meter.start()

    def __call__(self, batch: Batch, result: StepResult) -> None:
        """Report what is due after this step."""
        self._report_pace()
        step, every = self.state.step, self.state.run.telemetry.every
        self.utilization.count(text_tokens=result.text_tokens)
        if self.state.world.is_main and step % DISTRIBUTIONS_EVERY == 0:
            self._report_distributions(result)
        if step == 1:
            self._warn_of_captions(batch)
        try:
            if result.stop or step == self.end or step % every == 0:
                self.telemetry.train(step=step, scalars=self._scalars(batch, result))
                collect_garbage()
            if batch.position.batch == self.state.loader.steps_per_epoch:
                self._report_epoch(batch)
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

    def _report_epoch(self, batch: Batch) -> None:
        """Log the samples that were seen and skipped in the epoch that ends with this batch."""
        report = self.state.loader.report(batch.position)
        self.telemetry.event(
            f"Epoch {report.epoch} done: {report.samples:,} samples in {report.batch:,} batches, {report.dropped:,} "
            f"left over, {report.replaced:,} corrupt and replaced, order {report.order_hash}.",
            data=asdict(report),
        )

    def _warn_of_captions(self, batch: Batch) -> None:
        """Warn of captions of the first global batch that are cut, or equal."""
        tokens = self.state.world.all_gather(batch.text.to(self.state.world.device)).cpu()
        masked, tokenize = self.state.run.objective.mask_equal, self.state.architecture.tokenize
        for note in caption_notes(tokens, tokenize=tokenize, of="the first batch's", masked=masked):
            self.telemetry.warning(note)

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

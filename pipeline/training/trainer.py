"""The training loop: one rank's parts, and what happens to each batch. It names no objective and no dataset."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoint.writer import Checkpoint, CheckpointWriter, Snapshot, abandon_after, find_checkpoint
from pipeline.config import to_tree
from pipeline.data.loading.decode import normalize
from pipeline.data.loading.loader import Batch, Loader
from pipeline.distributed.heartbeat import Heartbeat
from pipeline.distributed.timing import Meter
from pipeline.distributed.world import World
from pipeline.engine.deepspeed_engine import DeepSpeedEngine
from pipeline.engine.optim import lr_scale
from pipeline.errors import UserError
from pipeline.evaluation.watch.watcher import forget_after
from pipeline.metrics.logger import Telemetry
from pipeline.metrics.mfu import Utilization
from pipeline.model.architectures import Architecture
from pipeline.model.trimming import TextTrimming
from pipeline.objectives import Objective
from pipeline.training.gradient_check import TOLERANCE, GradientProbe
from pipeline.training.observer import Observer
from pipeline.training.periodic_eval import InTraining
from pipeline.training.prefetch import BatchesAhead
from pipeline.training.recipe import RunConfig
from pipeline.training.skipped_steps import Faults
from pipeline.training.step import StepResult, TrainStep
from pipeline.versions import versions

EXIT_DONE, EXIT_PREEMPTED = 0, 75
"""75 (EX_TEMPFAIL): asked to stop by a signal, checkpoint written, start again with --resume latest."""


@dataclass
class Trainer:
    """All parts of one rank of a run, and where the run stands: `step` updates have been taken."""

    run: RunConfig
    world: World
    loader: Loader
    architecture: Architecture
    engine: DeepSpeedEngine
    objective: Objective
    take_step: TrainStep
    telemetry: Telemetry
    observer: Observer
    utilization: Utilization
    writer: CheckpointWriter
    probe: GradientProbe | None = None
    in_training: InTraining | None = None
    trimming: TextTrimming | None = None
    faults: Faults = field(default_factory=Faults)
    step: int = 0

    def fit(self) -> int:
        """Train to the end of the budget, or until a signal asks to stop. Returns the exit code."""
        meter = Meter(self.run.batch_size, self.take_step.phases)
        asked_to_stop = False
        limit = 60 * self.run.engine.timeout_minutes
        with (
            stop_signals() as signals,
            Heartbeat(Path(self.run.output), world=self.world, timeout_seconds=limit) as heartbeat,
        ):
            self.take_step.phases.on_enter = heartbeat.mark
            batches = BatchesAhead(self.loader, meter=meter, device=self.world.device)

            def look_ahead() -> None:
                if self.step + 1 < self.run.total_steps:
                    heartbeat.mark("data")
                    batches.prepare()

            self.take_step.before_update = look_ahead
            while self.step < self.run.total_steps and not asked_to_stop:
                heartbeat.mark("data", step=self.step)
                batch = batches.next()
                self.observer.before(self.step)
                scale = lr_scale(self.run.schedule, step=self.step, total_steps=self.run.total_steps)
                result = self._take(batch, scale, stop=bool(signals))
                meter.count()
                heartbeat.mark("records")
                if batch.position.batch == self.loader.steps_per_epoch:
                    self._tell_epoch(batch)
                if self._must_go_back():
                    self._go_back()
                    continue
                self.step += 1
                asked_to_stop = result.stop
                self.observer.after(self.step, result=result, image=batch.image, text=batch.text,
                                    lasting=self.objective.distributions)  # fmt: skip
                done = self.step == self.run.total_steps
                ends = done or asked_to_stop
                if ends or self.step % self.run.telemetry.every == 0:
                    self.telemetry.train(step=self.step, scalars=self._scalars(result, batch, scale, meter))
                if ends or self.step % self.run.checkpoint.every == 0:
                    heartbeat.mark("checkpoint")
                    self.save(batch)
                due = done or (self.step % self.run.evaluation.every == 0 and not asked_to_stop)
                if self.in_training and due:  # who asks to stop gives minutes
                    heartbeat.mark("evaluation")
                    scores = self.in_training(dict(self.engine.state.weights()), step=self.step)
                    self.telemetry.evaluation(step=self.step, scores=scores)
            heartbeat.mark("last checkpoint")
            self.writer.wait()
            self.world.barrier()  # nobody leaves, and is missed by a launcher, while rank 0 publishes
        if self.step < self.run.total_steps:
            self.telemetry.event(f"Stopped after step {self.step} as asked; continue with --resume latest.")
            return EXIT_PREEMPTED
        return EXIT_DONE

    def save(self, batch: Batch) -> None:
        """Write a checkpoint of the state after `batch`; collective."""
        state, main = self.engine.state, self.world.is_main  # all ranks gather, one keeps
        moments = {(name, key): value for name, key, value in state.moments() if main}
        scale, bias = self.objective.logit_parameters()
        snapshot = Snapshot(
            step=self.step,
            weights={name: value for name, value in state.weights() if main},
            moments=moments,
            counter=state.counter(),
            objective={name: value.detach().cpu().clone() for name, value in self.objective.state_dict().items()},
            rows=self.objective.row_blocks(),
            logit=(scale, bias),
            facts={
                "samples": self.step * self.run.batch_size,
                "data": self.loader.state_dict(batch.position),
                "faults": self.faults.state_dict(),
                "config": to_tree(self.run),
                "world_size": self.world.size,
                "versions": versions(),
            },
        )
        self.writer.save(snapshot)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint of any ZeRO stage and number of ranks."""
        self.loader.load_state_dict(checkpoint.meta["data"])
        self.faults.load_state_dict(checkpoint.meta.get("faults", Faults().state_dict()))
        self._restore_training(checkpoint)

    def _restore_training(self, checkpoint: Checkpoint) -> None:
        self.engine.state.load(
            weights=checkpoint.weights(), moments=checkpoint.moments(), counter=checkpoint.meta["counter"]
        )
        self.objective.load_state_dict(checkpoint.objective())
        self.objective.load_row_state_dict(checkpoint.read_rows)
        self.step = checkpoint.step

    def _take(self, batch: Batch, scale: float, *, stop: bool = False) -> StepResult:
        device, architecture = self.world.device, self.architecture
        image = normalize(batch.image.to(device, non_blocking=True), mean=architecture.mean, std=architecture.std)
        text, ids = batch.text.to(device, non_blocking=True), batch.sample_id.to(device, non_blocking=True)
        lengths = self.trimming.lengths(batch.text) if self.trimming else None
        result = self.take_step((image, text), sample_ids=ids, step=self.step, lr_scale=scale, stop=stop,
                                text_lengths=lengths)  # fmt: skip
        self.utilization.count(text_tokens=result.text_tokens)
        self.faults.note(applied=result.applied)
        if result.applied:
            self._check_probe()
        else:
            self._tell_skipped(batch, result)
        return result

    def _check_probe(self) -> None:
        if self.probe is not None:
            distance = self.probe.check(clipping=self.run.engine.gradient_clipping)
            self.probe = None
            self.telemetry.event(
                f"Gradient probe: engine and plain autograd differ by {distance:.1e} "
                f"({TOLERANCE[self.engine.bf16]:g} allowed)."
            )

    def _tell_skipped(self, batch: Batch, result: StepResult) -> None:
        ids = [i for rank in self.world.gather_objects(batch.sample_id.tolist()) for i in rank]
        what = (
            "The engine skipped the step (gradient overflow)" if result.finite else "Loss or its gradient is not finite"
        )
        self.telemetry.event(f"{what} at step {self.step}: step skipped.", step=self.step, sample_ids=ids)

    def _must_go_back(self) -> bool:
        return self.faults.check(
            step=self.step, max_skipped_steps=self.run.max_skipped_steps, max_rollbacks=self.run.max_rollbacks
        )

    def _go_back(self) -> None:
        """To the newest good checkpoint from before the steps that could not be applied; the data goes on."""
        here, bad = self.step + 1, self.faults.in_a_row
        self.writer.wait()  # its last checkpoint may be the one
        notes: list[str] = []
        folder = Path(self.run.output)
        checkpoint = agreed_checkpoint(folder, "latest", self.world, notes, not_after=here - bad)
        for note in notes:
            self.telemetry.event(note)
        if checkpoint is None:
            raise UserError(
                f"{bad} steps in a row could not be applied, and no checkpoint is older than step {here - bad}, the "
                "first of them: there is nothing to go back to. Start again with a smaller optimizer.lr."
            )
        self._restore_training(checkpoint)
        self.faults.in_a_row = 0
        self.faults.rollbacks += 1
        self.world.barrier()  # all have read it
        if self.world.is_main:
            abandon_after(folder, self.step)
            forget_after(folder, self.step)
        self.telemetry.rewind(self.step)
        self.telemetry.event(
            f"Rolled back to {checkpoint.path.name} after {bad} steps that could not be applied; the data goes on "
            f"behind them (roll-back {self.faults.rollbacks} of {self.run.max_rollbacks}).",
            step=here, rollbacks=self.faults.rollbacks, checkpoint=checkpoint.path.name,
        )  # fmt: skip

    def _scalars(self, result: StepResult, batch: Batch, scale: float, meter: Meter) -> dict[str, float]:
        """This step's figures, read from the device in one go."""
        metrics = dict(result.output.metrics)
        values = torch.stack([value.float() for value in metrics.values()]).tolist()
        norm = self.engine.gradient_norm()
        position = batch.position
        rates = meter.read()
        return {
            "samples": self.step * self.run.batch_size,
            "epoch": position.epoch + position.batch / self.loader.steps_per_epoch,
            "loss": float(result.output.loss),
            **dict(zip(metrics, values, strict=True)),
            "lr": self.run.optimizer.lr * scale,
            **self.objective.learning_rates(lr_scale=scale),
            **({} if norm is None else {"gradient_norm": norm}),
            **self.faults.scalars(),
            **self.objective.counters(),
            "text_tokens": result.text_tokens,
            "corrupt_samples": self.loader.replaced(position),
            **rates,
            **self.utilization.scalars(rates["samples_per_second"]),
        }

    def _tell_epoch(self, batch: Batch) -> None:
        """The accounts of a finished epoch: what was seen, and what was left out."""
        report = self.loader.report(batch.position)
        self.telemetry.event(
            f"Epoch {report.epoch} done: {report.samples:,} samples in {report.batch:,} batches, {report.dropped:,} "
            f"left over, {report.replaced:,} corrupt and replaced, order {report.order_hash}.",
            data=asdict(report),
        )


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """A list that is empty until SIGINT, SIGTERM or SIGUSR1 arrives; a second SIGINT interrupts at once."""
    received: list[int] = []

    def note(number: int, _: Any) -> None:
        if number == signal.SIGINT and received:
            raise KeyboardInterrupt
        received.append(number)

    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, note) for number in watched}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def agreed_checkpoint(
    folder: Path, resume: str | None, world: World, notes: list[str], *, not_after: int | None = None
) -> Checkpoint | None:
    """Rank 0 chooses and verifies; all ranks take the same. Raises: UserError on every rank."""
    found: Checkpoint | None = None
    problem = ""
    if world.is_main:
        try:
            if resume is not None:
                found = find_checkpoint(folder, resume, on_event=notes.append, not_after=not_after)
            elif any((folder / "checkpoints").glob("step-*")):
                problem = f"{folder} holds checkpoints: add --resume latest to continue, or choose another output."
        except UserError as error:
            problem = str(error)
    path, problem = world.gather_objects((str(found.path) if found else None, problem))[0]
    if problem:
        raise UserError(problem)
    if path is None:
        return None
    return found or Checkpoint(Path(path), json.loads((Path(path) / "checkpoint.json").read_text()))

"""Tests of the current weights while training: the loss on held-out pairs, and the evaluation of a suite."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.checkpoint.reader import Checkpoint
from pipeline.data.data_config import DataConfig
from pipeline.data.loading.loader import Batch
from pipeline.data.loading.stream_reader import SequentialReader
from pipeline.data.order.mixture import Segments, load_mixture
from pipeline.data.shards.tar_reader import CaptionField, CorruptSample, rgb_image
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.evaluation import evaluate
from pipeline.evaluation.datasets.suite import open_suite
from pipeline.evaluation.run.results import aggregate
from pipeline.evaluation.run.session import EvaluationConfig
from pipeline.evaluation.watcher import brief
from pipeline.metrics.logger import Telemetry
from pipeline.model.evaluation_model import EvaluationModel, copy_for_evaluation
from pipeline.pictures.pixels import colour_of
from pipeline.run_files import EMA_NAME, FOLDER_NAME, METRICS_NAME, name_of, read_records
from pipeline.training.recipe import InTrainingConfig, RunConfig, ValidationConfig
from pipeline.training.run_state import RunState, ValidationHistory
from pipeline.training.step import StepResult

ROWS = 1024
"""Rows of the similarity matrix that are computed at a time."""
BATCH_SIZE = 64
"""Pairs that a rank encodes at a time."""


def is_due(config: ValidationConfig | InTrainingConfig, run: RunConfig, *, step: int, ended: bool = False) -> bool:
    """Whether the weights after `step` steps are tested; those of the run's end, which `ended` may be, always are."""
    return ended or step == run.total_steps or step % config.every == 0


def missed_tests(run: RunConfig, checkpoint: Checkpoint, *, world: World) -> set[str]:
    """Which of `validation` and `evaluation` were due at a checkpoint, but prevented (signal, kill). Collective."""
    step, missed = checkpoint.step, set[str]()
    history = ValidationHistory(**checkpoint.meta["validation"])
    if run.validation.sources and history.step != step and is_due(run.validation, run, step=step):
        missed.add("validation")
    ended = history.ends_run(run.validation.patience)
    if run.evaluation.suite is not None and is_due(run.evaluation, run, step=step, ended=ended):
        records = read_records(Path(run.output, METRICS_NAME)) if world.is_main else []
        logged = any(record.get("kind") == "evaluation" and record.get("step") == step for record in records)
        if not world.gather_objects(logged)[0]:
            missed.add("evaluation")
    return missed


@dataclass
class PeriodicTests:
    """Validation and evaluation. They share a copy of the weights (or of their average), which exists only meanwhile.

    After a signal nothing is tested before the last step, because the job is killed within minutes.

    Raises:
        UserError: The suite, or the held-out pairs, are missing or incomplete.
    """

    state: RunState
    telemetry: Telemetry
    _model: EvaluationModel | None = None

    def __post_init__(self) -> None:
        run = self.state.run
        self._pairs = self._suite = None
        if run.validation.sources:
            self._pairs = HeldOutPairs(run.validation, run.data, self.state.world, self.telemetry.event)
            # Else the temperature with which the objective starts: a checkpoint is restored later.
            self._tau = run.validation.tau or math.exp(-self.state.objective.logit_parameters()[0])
        if run.evaluation.suite is not None:
            self._suite = open_suite(run.evaluation.suite)

    def validate(self, batch: Batch | None = None, result: StepResult | None = None) -> None:
        """Validate if that is due. Collective."""
        step, run = self.state.step, self.state.run
        if self._pairs is not None and is_due(run.validation, run, step=step) and not self._stopped(result):
            scores = self._pairs.scores(self._copy("validation"), tau=self._tau)
            self.state.validation.add(scores["loss"], step=step)
            self.telemetry.scalars("validation", step=step, values=scores)

    def evaluate(self, batch: Batch | None = None, result: StepResult | None = None) -> None:
        """Evaluate the suite if that is due. Collective; call it after `validate`, whose copy of the weights it frees.

        The results are stored as those of the step's checkpoint, so that `neuclip evaluate` reuses them if it evaluates
        the same weights. Whatever fails is logged, on all ranks alike, because training continues.
        """
        step, run, world = self.state.step, self.state.run, self.state.world
        due = is_due(run.evaluation, run, step=step, ended=self.state.ended_early) and not self._stopped(result)
        if self._suite is not None and due:
            model = self._copy("evaluation")
            config = EvaluationConfig(workers=run.evaluation.workers, allow_outside=run.evaluation.allow_outside)
            try:
                (evaluation,) = evaluate(
                    model,
                    suite=self._suite,
                    output=Path(run.output) / "evaluation" / name_of(step),
                    config=config,
                    processes=(replace(world, patient=True), world.device),
                )
                results, failures = evaluation.results, dict(evaluation.failures)
            except UserError as error:  # a full disk, a damaged lock
                results, failures = {}, dict.fromkeys(self._suite.keys, str(error))
            means = {name: mean.score for name, mean in aggregate(results).items() if mean.score is not None}
            scores = {task: result.score for task, result in results.items()}
            self.telemetry.scalars("evaluation", step=step, values={**scores, **means})
            if failures:
                self.telemetry.warning(
                    f"Evaluation at step {step}: {len(failures)} tasks failed. {brief(failures)}",
                    step=step,
                    failures=failures,
                )
        self._model = None

    def make_up(self, missed: Collection[str]) -> bool:
        """Do the `missed_tests` of the restored weights. Collective. Returns whether to write the checkpoint again: the
        history of validations has changed, or the next stage starts from it, of which a fork has no copy yet."""
        step = self.state.step
        for name, test in (("validation", self.validate), ("evaluation", self.evaluate)):
            if name in missed:
                self.telemetry.event(f"This run has no {name} after step {step}: doing it now.", step=step)
                test()
        self._model = None
        return "validation" in missed or (bool(missed) and step == self.state.end < self.state.run.total_steps)

    def _stopped(self, result: StepResult | None) -> bool:
        """Whether a signal has ended the run before its last step."""
        return result is not None and result.stop and self.state.step < self.state.run.total_steps

    def _copy(self, phase: str) -> EvaluationModel:
        self.state.mark(phase)
        if self._model is None:
            state = self.state
            source = Path(state.run.output) / FOLDER_NAME / name_of(state.step)
            self._model = copy_for_evaluation(
                state.run.model,
                state.weights_to_evaluate(),
                device=state.world.device,
                source=str(source if state.ema is None else source / EMA_NAME),
                background=colour_of(state.run.data.background),
            )
        return self._model


class HeldOutPairs:
    """This rank's share of the validation pairs, read once and kept encoded in memory.

    The pairs are cut into batches of `BATCH_SIZE`, and every rank has consecutive batches, so that features and
    loss are bit-identical on any number of ranks. `data` is what is trained on; `report` gets a sentence on rank 0,
    with the first validation.

    Raises:
        UserError: There are fewer than two pairs, a manifest is missing, or shards are trained on.
    """

    def __init__(
        self,
        config: ValidationConfig,
        data: DataConfig,
        world: World,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.config, self.data, self.world, self.report = config, data, world, report
        self.dropped: Counter[str] = Counter()
        """Pairs of this rank that cannot be used, by reason; known after the first validation."""
        self.mixture = load_mixture(replace(data, sources=config.sources))
        held = self.mixture.manifest.n
        self.n = held if config.samples is None else min(held, config.samples)
        """Pairs over all ranks, unusable ones included."""
        if self.n < 2:
            raise UserError("validation.sources hold fewer than two pairs, which a contrastive loss needs.")
        if set(self.mixture.digests) & set(load_mixture(data).digests):
            raise UserError(
                "validation.sources has shards that are trained on (data.sources): their loss says nothing about "
                "unseen pairs. Set pairs aside, for example with `neuclip pairs` on a table of their own."
            )

    def scores(self, model: EvaluationModel, *, tau: float) -> dict[str, float]:
        """The `validation_scores` of a model. Collective. A `UserError` if fewer than two pairs can be used."""
        is_first = "_batches" not in vars(self)
        image, text = self.features(model)
        if is_first:
            dropped = sum(self.world.gather_objects(self.dropped), Counter[str]())
            reasons = "".join(f", {count:,} dropped: {reason}" for reason, count in dropped.most_common())
            if len(image) < 2:
                raise UserError(
                    f"validation.sources have {len(image)} usable pairs{reasons}. A contrastive loss needs two: name "
                    "other shards, or validation.sources=[] for no validation."
                )
            self.report(f"Validation: {len(image):,} held-out pairs at temperature {tau:.4g}{reasons}.")
        return validation_scores(image, text, tau=tau, world=self.world)

    @torch.no_grad()
    def features(self, model: EvaluationModel) -> tuple[Tensor, Tensor]:
        """Unit-norm fp32 features of all usable pairs on the CPU, [n, d] of images and of texts. Collective."""
        device, background = next(model.towers.parameters()).device, colour_of(self.data.background)
        empty = torch.empty(0, model.dim)
        rows = [(empty, empty)]
        with ThreadPoolExecutor(min(8, self.world.cores)) as pool:
            for pairs in self._batches:
                images = list(pool.map(lambda pair: model.preprocess(rgb_image(pair[0], background=background)), pairs))
                text = model.tokenize([caption for _, caption in pairs])
                image = model.encode_image(torch.stack(images).to(device))
                rows.append((image.float().cpu(), model.encode_text(text.to(device)).float().cpu()))
                self.world.progress()
        sides = torch.stack([torch.cat(side) for side in zip(*rows, strict=True)], dim=1)
        # The ranks may have different numbers of rows.
        self.world.wait_for_all()
        counts: list[int] = self.world.gather_objects(len(sides))
        padded = F.pad(sides, (0, 0, 0, 0, 0, max(counts) - len(sides))).to(self.world.device)
        parts = self.world.all_gather(padded).cpu().split(max(counts))
        image, text = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]).unbind(1)
        return image.contiguous(), text.contiguous()

    @cached_property
    def _batches(self) -> list[list[tuple[bytes, str]]]:
        """This rank's usable pairs, by batch."""
        size, segments = BATCH_SIZE, self._chosen()
        captions = tuple(CaptionField.parse(source.caption or self.data.caption) for source in self.config.sources)
        count = -(-self.n // size)
        first, last = (count * r // self.world.size for r in (self.world.rank, self.world.rank + 1))
        reader = SequentialReader(self.mixture, segments, self.data.retries, captions=captions)
        batches: list[list[tuple[bytes, str]]] = [[] for _ in range(first, last)]
        stop = min(last * size, self.n)
        records = reader.read(first * size)
        shards, _ = segments.locate(np.arange(first * size, stop))
        for position, (shard, record) in enumerate(zip(shards.tolist(), records, strict=False), first * size):
            try:
                if record.image is None:
                    raise CorruptSample(record.problem or "image is missing")
                caption = reader.caption(shard).read(record)
                rgb_image(record.image)
                self.world.progress()
                batches[position // size - first].append((record.image, caption))
            except CorruptSample as error:
                self.dropped[str(error)] += 1
        records.close()  # type: ignore[attr-defined]
        return [batch for batch in batches if batch]

    def _chosen(self) -> Segments:
        """The first pairs of every shard, in proportion to its size."""
        sizes = self.mixture.sizes
        ends = np.cumsum(sizes) * self.n // int(sizes.sum())
        counts = np.diff(ends, prepend=0)
        shard = np.flatnonzero(counts)
        return Segments(shard=shard, start=np.zeros_like(shard), position=(ends - counts)[shard], length=self.n)


def validation_scores(image: Tensor, text: Tensor, *, tau: float, world: World | None = None) -> dict[str, float]:
    """The loss of all pairs against each other, and the share whose own partner is the nearest. Collective.

    `image` and `text` are [n, d] unit-norm features, the same on all ranks; row i of both is one pair. The ranks take
    blocks of rows in turn.

    Returns:
        `loss`, the mean of both directions' cross-entropies (CLIP, arXiv:2103.00020, figure 3, with n for the batch);
        `image_to_text_r1`, `text_to_image_r1`; and `pairs`, which is n. Bit-identical on any number of ranks.
    """
    world = world or World()
    blocks, own = range(0, len(image), ROWS), []
    for start in blocks[world.rank :: world.size]:
        own.append([_block(*side, start, tau=tau) for side in ((image, text), (text, image))])
        world.progress()
    world.wait_for_all()
    gathered = world.gather_objects(own)
    parts = [gathered[number % world.size][number // world.size] for number in range(len(blocks))]
    losses, hits = ([sum(part[side][k] for part in parts) / len(image) for side in (0, 1)] for k in (0, 1))
    return {
        "loss": sum(losses) / 2,
        "image_to_text_r1": hits[0],
        "text_to_image_r1": hits[1],
        "pairs": float(len(image)),
    }


def _block(queries: Tensor, candidates: Tensor, start: int, *, tau: float) -> tuple[float, int]:
    """Summed cross-entropy and number of hits of the block of queries from `start` on."""
    logits = queries[start : start + ROWS] @ candidates.T / tau
    target = torch.arange(start, start + len(logits))
    loss = F.cross_entropy(logits.double(), target, reduction="sum")
    return float(loss), int((logits.argmax(1) == target).sum())

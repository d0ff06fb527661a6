"""What a step reads, on its way to the device: batches, of which a thread fetches the next one for a GPU from the begin
of a step on, and what is read by sample id beside them (a teacher's features, the outputs of a locked image tower)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.data.data_config import IMAGES, TEACHER
from pipeline.data.loading.loader import Batch
from pipeline.data.loading.position import differences
from pipeline.data.loading.stored_features import StoredFeatures, open_features
from pipeline.distributed.devices import to_device
from pipeline.distributed.timing import Meter
from pipeline.distributed.world import NEXT_BATCH
from pipeline.engine.engine_protocol import Engine
from pipeline.errors import UserError
from pipeline.model.attention import has_packed_kernel
from pipeline.model.finetuning import check_constant_image_tower
from pipeline.model.model_folder import image_tower_identity
from pipeline.model.towers import ModelConfig, text_batching
from pipeline.model.trimming import TextChunks
from pipeline.objectives.distill import Teacher
from pipeline.training.run_folder import OTHERWISE
from pipeline.training.run_state import RunState


@dataclass(frozen=True)
class Inputs:
    """What a step reads of a batch, on the device."""

    image: Tensor
    """uint8 [b, 3, H, W]."""
    texts: TextChunks
    sample_ids: Tensor
    """int64 [b]."""


def text_layout(
    engine: Engine, config: ModelConfig, chunks: Sequence[slice], *, device: torch.device
) -> Callable[[Tensor], TextChunks]:
    """What lays out tokens [b, L] of a rank's batch on the device, trimmed or packed as the `model` section says."""
    by_kernel = engine.bf16 and has_packed_kernel(engine.module.clip, device)
    trimming, packed = text_batching(engine.module.clip, config, by_kernel=by_kernel)

    def texts(tokens: Tensor) -> TextChunks:
        whole, lengths = trimming.cut(tokens) if trimming else (tokens, None)
        return TextChunks(whole, chunks, lengths=lengths, packed=packed, by_kernel=by_kernel, device=device)

    return texts


_Copy = tuple[Batch, Inputs, torch.cuda.Event]
"""A batch on its way to the GPU, and the event at its arrival."""


class PrefetchedBatches:
    """A loader's batches in their order. On a GPU, one is fetched ahead in a thread.

    The thread joins and pins the batch, lays out its texts and copies all of it on a stream of its own, while the
    training thread queues the step before: wherever that waits for the device, the next batch is being prepared. On a
    CPU, where operators need the cores, batches are fetched when they are due.

    An error while fetching ahead is raised by the call of `next` for that batch: the step before it, and its
    checkpoint, are not affected.

    Args:
        texts: Tokens [b, L] of the host -> the texts of the batch's micro-batches, on the device.
        steps: Steps of the run; nothing is fetched ahead of the last one.
    """

    def __init__(
        self,
        loader: Iterator[Batch],
        *,
        texts: Callable[[Tensor], TextChunks],
        steps: int,
        meter: Meter,
        device: torch.device,
    ) -> None:
        self._loader, self._steps, self._meter, self._device = loader, steps, meter, device
        self._texts = texts
        self._ahead: Future[_Copy] | None = None
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copy: _Copy | None = None

    def next(self) -> Batch:
        """Return the next batch, prefetched or fetched now. Errors of the loader are raised here."""
        if self._ahead is None:
            with self._meter.waiting():
                return next(self._loader)
        ahead, self._ahead = self._ahead, None
        with self._meter.waiting(hidden_by=self._device):
            self._copy = ahead.result()
        return self._copy[0]

    def fetch_ahead(self, step: int) -> None:
        """Start to fetch the batch that follows step number `step` (from 0), and to copy it."""
        if self._copies is not None and self._ahead is None and step + 1 < self._steps:
            self._ahead = Future()
            threading.Thread(target=self._fetch, args=(self._ahead, self._copies), name=NEXT_BATCH, daemon=True).start()

    def wait(self) -> None:
        """Wait until the loader is not in use; the batch that was fetched ahead is still the next one."""
        if self._ahead is not None:
            self._ahead.exception()

    def inputs(self, batch: Batch) -> Inputs:
        """A batch on the device; the work queued there from now on waits for it, not the host."""
        copy, self._copy = self._copy, None
        if copy is None or copy[0] is not batch:
            return self._moved(batch)
        _, inputs, done = copy
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(done)
        for values in (inputs.image, inputs.sample_ids, *inputs.texts.tensors()):
            values.record_stream(stream)  # its memory belongs to the other stream
        return inputs

    def _moved(self, batch: Batch) -> Inputs:
        """Copy a batch to the device, without waiting for it if the batch is in page-locked memory."""
        image, ids = (values.to(self._device, non_blocking=True) for values in (batch.image, batch.sample_id))
        return Inputs(image, self._texts(batch.text), ids)

    def _fetch(self, ahead: Future[_Copy], copies: torch.cuda.Stream) -> None:
        try:
            with torch.cuda.stream(copies):  # and its device, which a new thread would not use for pinned memory
                batch = next(self._loader)
                inputs = self._moved(batch)
                done = copies.record_event(torch.cuda.Event(blocking=True))
            ahead.set_result((batch, inputs, done))
        except Exception as error:
            ahead.set_exception(error)
        else:
            done.synchronize()  # the batch is kept here until then: workers may write its memory again


@dataclass(frozen=True)
class StepFeatures:
    """The stored features of a run, made by `open_step_features`."""

    device: torch.device
    images: StoredFeatures | None = None
    """Outputs of the image tower; None: the tower runs in every step."""
    teacher: StoredFeatures | None = None
    """Whose similarities the run learns from, too."""

    def of(self, batch: Batch, *, stand_in: bool = False) -> tuple[Tensor | None, Teacher | None]:
        """The image tower's outputs [b, d] of a batch, and a teacher's features; of a stand-in batch, zeros. A
        `UserError` if those of a sample are missing or damaged."""

        def values(stored: StoredFeatures) -> Tensor:
            if stand_in:
                return torch.zeros(stored.facts.sides, len(batch.text), stored.facts.dim, device=self.device)
            return to_device(stored.read(batch.sample_id), self.device).float()

        image = None if self.images is None else values(self.images)[0]
        if self.teacher is None:
            return image, None
        of_image, of_text = F.normalize(values(self.teacher), dim=2)
        return image, Teacher(of_image, of_text, self.teacher.facts.tau)


def open_step_features(state: RunState, *, report: Callable[[str], None]) -> StepFeatures | None:
    """Open the stored features of a run. Behind those of its image tower, the loader decodes no images. Collective.

    Call it when the weights are those of the run, after a checkpoint was restored. `report` receives sentences.

    Raises:
        UserError: They do not fit the run, or are not those with which it began.
    """
    run, loader, named = state.run, state.loader, state.run.data.stored_features
    if not named:
        return None
    opened = open_features(run.data, loader.mixture.digests, named=named)
    for setting, stored in opened.items():
        now = stored.facts.identity
        if changed := differences(state.features.get(setting, now), now):
            raise UserError(
                f"The run has used other features than {setting} names: {'; '.join(changed)}. "
                f"{OTHERWISE.format(run.output)}"
            )
        state.features[setting] = now
        report(f"{'Teacher' if setting == TEACHER else 'Image features'}: {stored.describe()}.")
    if (images := opened.get(IMAGES)) is not None:
        _check_tower(images, state)
        loader.use_features(images.file)
    return StepFeatures(state.world.device, images, opened.get(TEACHER))


def _check_tower(images: StoredFeatures, state: RunState) -> None:
    """Check that stored outputs are those of the run's image tower. Collective."""
    engine, theirs = state.engine, images.facts.tower or {}
    check_constant_image_tower(engine.module.clip.visual)  # type: ignore[arg-type]
    own = image_tower_identity(dict(engine.state.weights()), state.architecture, decoding=state.run.data.decoding)
    if other := [name for name, value in own.items() if theirs.get(name) != value]:
        raise UserError(
            f"{images.named} has the outputs of another image tower than this run locks (other {', other '.join(other)}"
            "). Run `neuclip features MODEL --images-only` with the weights of model.pretrained as MODEL and another "
            "--output, or set what differs as it is there (data.decoding=fast)."
        )

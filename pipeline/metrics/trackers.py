"""Experiment trackers of others as sinks: Weights & Biases and trackio, whose client libraries have the same interface.

Their own environment variables apply: WANDB_MODE=offline, WANDB_ENTITY, TRACKIO_DIR, TRACKIO_SPACE_ID and so on.
"""

from __future__ import annotations

import importlib
import importlib.util
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.errors import UserError, in_a_line
from pipeline.files import write_text
from pipeline.metrics.sinks import Distribution, QuietSink, SinkContext, register_sink


def check_trackers(names: Sequence[str]) -> None:
    """Check that the client libraries of trackers are installed, and that W&B has a login.

    Raises:
        UserError: One is not, or it has none.
    """
    for name in TRACKERS.intersection(names):
        if importlib.util.find_spec(name) is None:
            raise UserError(f"telemetry.trackers={name} needs the package {name}: pip install {name}.")
        if name == WeightsAndBiases.library:
            try:
                importlib.import_module(name).login()
            except Exception as error:  # as it likes
                raise UserError(
                    f"telemetry.trackers={name}: there is no login ({in_a_line(error)}). {WeightsAndBiases.hint}"
                ) from error


class TrackerSink(QuietSink):
    """A run in a tracker, named like the run's folder. A resumed run goes on in the same one.

    Steps that were repeated after a resume or a rollback are logged again.
    """

    library: str
    hint = ""
    """Advice in the message when the tracker cannot be opened."""

    def __init__(self, context: SinkContext) -> None:
        self._client = importlib.import_module(self.library)
        try:
            self._open(context)
        except Exception as error:  # a failed login, no network, ...
            raise UserError(
                f"telemetry.trackers={self.library}: the tracker cannot be opened ({type(error).__name__}: {error}). "
                f"Log in with its own command, or train without it: telemetry.trackers=[]. {self.hint}"
            ) from error

    def _open(self, context: SinkContext) -> None:
        raise NotImplementedError

    def scalars(self, kind: str, *, step: int, values: Mapping[str, float]) -> None:
        self._log(step, {f"{kind}/{name}": value for name, value in values.items()})

    def close(self) -> None:
        self._try(self._client.finish)

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        self._try(lambda: self._client.log({"step": step, **values}))

    def _try(self, call: Callable[[], Any]) -> None:
        """Call the client. Its errors become an OSError, which is reported once and does not end the run."""
        try:
            call()
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}") from error


@register_sink("wandb")
class WeightsAndBiases(TrackerSink):
    """Weights & Biases: metrics, histograms, pictures with captions; files are in RUN/wandb/."""

    library = "wandb"
    hint = "WANDB_MODE=offline writes to RUN/wandb/, which `wandb sync` uploads later."

    def _open(self, context: SinkContext) -> None:
        run = self._client.init(
            project=context.project,
            name=context.run.name,
            id=_run_id(context),
            resume="allow",
            dir=str(context.run),
            config=dict(context.settings),
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")  # a run that resumes or rolls back repeats steps

    def distributions(self, *, step: int, levels: Sequence[float], values: Mapping[str, Distribution]) -> None:
        histograms = {
            f"distribution/{name}": self._client.Histogram(np_histogram=np.histogram(found.values.numpy(), bins=64))
            for name, found in values.items()
        }
        self._log(step, histograms)

    def pictures(self, *, step: int, grid: np.ndarray, captions: Sequence[str]) -> None:
        text = "\n".join(f"{i}. {caption}" for i, caption in enumerate(captions, 1))
        self._log(step, {"batch/images": self._client.Image(grid, caption=text)})


@register_sink("trackio")
class Trackio(TrackerSink):
    """trackio, which keeps metrics on this machine (`trackio show`) or in a Hugging Face space: metrics only."""

    library = "trackio"

    def _open(self, context: SinkContext) -> None:
        self._client.init(
            project=context.project, name=context.run.name, resume="allow", config=dict(context.settings), embed=False
        )

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        self._try(lambda: self._client.log(dict(values), step=step))


TRACKERS = frozenset({WeightsAndBiases.library, Trackio.library})


def _run_id(context: SinkContext) -> str:
    """The run's id in the tracker, the same after a resume."""
    path = context.run / "tracker-id"
    if not path.is_file():
        write_text(path, uuid.uuid4().hex[:16] + "\n")
    return path.read_text(encoding="utf-8").strip()

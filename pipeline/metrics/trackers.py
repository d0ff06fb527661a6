"""Experiment trackers as sinks, through `accelerate.tracking`.

Their own environment variables apply: WANDB_MODE=offline, MLFLOW_TRACKING_URI, TRACKIO_DIR and so on.
"""

from __future__ import annotations

import importlib
import importlib.util
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from pipeline.config import flatten
from pipeline.errors import UserError, in_a_line
from pipeline.files import write_text
from pipeline.metrics.sinks import Sink, SinkContext, register_sink

PACKAGES = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "trackio", "wandb")
"""Names of accelerate's trackers that need a package of the same name."""
WANDB_ID, MLFLOW_ID = "tracker-id", "mlflow-id"
"""Files with the run's id in W&B and in MLflow, the same after a resume. MLflow chooses its ids itself."""


def check_trackers(names: Sequence[str]) -> None:
    """Check that the packages of trackers are installed, and that W&B has a login.

    Raises:
        UserError: One is not, or it has none.
    """
    for name in set(PACKAGES).intersection(names):
        if importlib.util.find_spec(name) is None:
            raise UserError(f"telemetry.trackers={name} needs the package {name}: pip install {name}.")
        if name == "wandb":
            try:
                importlib.import_module(name).login()
            except Exception as error:  # as it likes
                raise UserError(
                    f"telemetry.trackers={name}: there is no login ({in_a_line(error)}). {WeightsAndBiases.offline}"
                ) from error


class TrackerSink(Sink):
    """One of accelerate's trackers, for metrics. Steps that are repeated after a resume or a rollback are logged again.

    The run in the tracker is named like the run's folder, except in comet_ml and dvclive. In W&B, trackio and MLflow a
    resumed run goes on in the same one, and dvclive in the same folder; the others begin a new one.
    """

    advice = "Log in with its own command, or train without it: telemetry.trackers=[]."
    """What to do when the tracker cannot be opened."""

    name: str

    def __init__(self, context: SinkContext) -> None:
        from accelerate import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        try:
            PartialState()  # accelerate's trackers need it
            self._tracker: Any = LOGGER_TYPE_TO_CLASS[self.name](**self._options(context))
            self._tracker.start()
            self._opened(context)
        except Exception as error:  # a failed login, no network, ...
            raise UserError(
                f"The tracker {self.name} cannot be opened ({type(error).__name__}: {error}). {self.advice}"
            ) from error

    def _options(self, context: SinkContext) -> dict[str, Any]:
        """The arguments of accelerate's class."""
        name, folder, project = context.run.name, str(context.run), {"run_name": context.project}
        special: dict[str, dict[str, Any]] = {
            "aim": {"run_name": name, "logging_dir": folder, "experiment": context.project},
            "clearml": {"task_name": name},
            "dvclive": {"dir": f"{folder}/dvclive", "resume": True},  # else it empties ./dvclive
            "swanlab": {"experiment_name": name},
            "trackio": {"name": name, "resume": "allow", "embed": False, "config": dict(context.settings)},
        }
        return project | special.get(self.name, {})

    def _opened(self, context: SinkContext) -> None:
        if self.name not in ("tensorboard", "trackio"):  # the latter has them already
            self._tracker.store_init_configuration(flatten(dict(context.settings)))

    def scalars(self, kind: str, *, step: int, values: Mapping[str, float]) -> None:
        self._tracker.log({f"{kind}/{name}": value for name, value in values.items()}, step=step)

    def close(self) -> None:
        self._tracker.finish()


class TensorBoard(TrackerSink):
    """RUN/tensorboard/: curves and histograms. Records of steps that are repeated are removed."""

    advice = "Train without it: telemetry.tensorboard=false."

    def _options(self, context: SinkContext) -> dict[str, Any]:
        purged = context.first_step + 1 if context.first_step else None
        return {"run_name": "tensorboard", "logging_dir": str(context.run), "purge_step": purged}

    def distributions(self, *, step: int, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self._tracker.tracker.add_histogram(f"distribution/{name}", value, step)


class WeightsAndBiases(TrackerSink):
    """Weights & Biases: metrics and histograms; files are in RUN/wandb/."""

    offline = "WANDB_MODE=offline writes to RUN/wandb/, which `wandb sync` uploads later."
    advice = f"{TrackerSink.advice} {offline}"

    def _options(self, context: SinkContext) -> dict[str, Any]:
        path = context.run / WANDB_ID
        if not path.is_file():
            write_text(path, uuid.uuid4().hex[:16] + "\n")
        same = {"id": path.read_text(encoding="utf-8").strip(), "resume": "allow"}
        run = {"run_name": context.project, "name": context.run.name, "dir": str(context.run)}
        return {**run, **same, "config": dict(context.settings)}

    def _opened(self, context: SinkContext) -> None:
        self._tracker.tracker.define_metric("step")
        self._tracker.tracker.define_metric("*", step_metric="step")  # a run that resumes or rolls back repeats steps

    def scalars(self, kind: str, *, step: int, values: Mapping[str, float]) -> None:
        self._tracker.log({"step": step, **{f"{kind}/{name}": value for name, value in values.items()}})

    def distributions(self, *, step: int, values: Mapping[str, Tensor]) -> None:
        from wandb import Histogram

        counts = {name: np.histogram(value.numpy(), bins=64) for name, value in values.items()}
        histograms = {f"distribution/{name}": Histogram(np_histogram=count) for name, count in counts.items()}
        self._tracker.log({"step": step, **histograms})


class MLflow(TrackerSink):
    """MLflow: an experiment has the project's name."""

    def _options(self, context: SinkContext) -> dict[str, Any]:
        path = context.run / MLFLOW_ID
        run_id = path.read_text(encoding="utf-8").strip() if path.is_file() else None
        return {"experiment_name": context.project, "run_name": context.run.name, "run_id": run_id}

    def _opened(self, context: SinkContext) -> None:
        path = context.run / MLFLOW_ID
        if not path.is_file():  # MLflow refuses other values in a resumed run
            super()._opened(context)
            write_text(path, self._tracker.tracker.info.run_id + "\n")


KINDS = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}
for _name in ("tensorboard", *PACKAGES):
    register_sink(_name)(type(_name, (KINDS.get(_name, TrackerSink),), {"name": _name}))

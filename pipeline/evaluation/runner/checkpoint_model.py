"""Any checkpoint as a model to evaluate; weights that are not what was written are refused."""

from __future__ import annotations

from pathlib import Path

import torch

from pipeline.checkpoint.layout import META_NAME, read_meta, sha256
from pipeline.errors import UserError
from pipeline.model.architectures import CONFIG_NAME
from pipeline.model.evaluation_model import EvaluationModel, load_for_evaluation
from pipeline.model.model_folder import WEIGHTS_NAME


def load_checkpoint(spec: str, *, device: torch.device) -> EvaluationModel:
    """What `load_for_evaluation` loads, held against the digests that a checkpoint of ours carries.

    Raises: UserError when nothing can be loaded, the weights do not fit the architecture, or a file is damaged.
    """
    try:
        model = load_for_evaluation(spec, device=device)
    except UserError:
        raise
    except Exception as error:  # open_clip asserts, unpickles and indexes its way through a file of another model
        raise UserError(
            f"{spec} cannot be loaded ({type(error).__name__}: {' '.join(str(error).split())[:200]}): "
            "the weights are damaged, or those of another architecture."
        ) from error
    folder = Path(model.source)
    if (folder / META_NAME).is_file():
        meta = read_meta(folder)
        for name in (CONFIG_NAME, WEIGHTS_NAME):
            expected = meta.get("files", {}).get(name, {}).get("sha256")
            if expected is not None and sha256(folder / name) != expected:
                raise UserError(
                    f"{folder / name} is damaged: its SHA-256 is not the one in {META_NAME}. "
                    "Take another checkpoint, or copy this one again from where it is whole."
                )
    return model

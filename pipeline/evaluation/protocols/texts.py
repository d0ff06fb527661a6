"""Text features: captions, and zero-shot classifiers built from class names and templates.

Shape legend: T templates, C classes, M micro-batch, L tokens, d feature dimension.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.evaluation.compute import Compute, microbatches
from pipeline.evaluation.datasets.task_data import TaskError
from pipeline.model.evaluation_model import EvaluationModel

TEXTS_PER_UNIT = 1024
"""About how many prompts are encoded together; units of whole classes are what processes share among themselves."""


class TextSide:
    """The distinct texts of a task, in units that are distributed over the processes.

    `rows` holds for every text as given its row among the distinct ones.

    Args:
        texts: Class names, captions or cues, repetitions included.
        templates: With `{c}` for the text; None takes every text as it is.
        prompts: Of every text, instead of `templates`; the texts are then distinct.
    """

    def __init__(
        self,
        texts: Sequence[str],
        *,
        templates: Sequence[str] | None = None,
        prompts: Sequence[Sequence[str]] = (),
    ) -> None:
        unique = list(dict.fromkeys(texts))
        row = {text: number for number, text in enumerate(unique)}
        self.rows = torch.tensor([row[text] for text in texts])
        per_unit = max(1, TEXTS_PER_UNIT // max(map(len, prompts or (templates or "1",))))
        self.units = [unique[start : start + per_unit] for start in range(0, len(unique), per_unit)]
        self._templates, self._prompts = templates, dict(zip(texts, prompts, strict=False))
        facts = [texts, templates, prompts] if prompts else [texts, templates]
        self.digest = hashlib.sha256(json.dumps(facts, ensure_ascii=False).encode()).hexdigest()

    def encode(self, model: EvaluationModel, unit: int, *, compute: Compute, micro_batch: int) -> Tensor:
        """Encode one unit as [len(units[unit]), d] unit-norm fp32 features."""
        texts = self.units[unit]
        if self._prompts:
            own = [self._prompts[text] for text in texts]
            return mean_features(model, own, compute=compute, micro_batch=micro_batch)
        if self._templates is None:
            return encode_texts(model, texts, compute=compute, micro_batch=micro_batch)
        return class_vectors(model, texts, self._templates, compute=compute, micro_batch=micro_batch)

    def similarities(self, features: Tensor, texts: Tensor) -> Tensor:
        """[rows, d] features, [distinct texts, d] -> [rows, texts as given] cosines; equal texts have equal bits.

        Columns of one matrix product can differ in the last bit although their vectors are equal, so that a tie between
        repeated texts would be decided by noise. The product is therefore taken over distinct texts.
        """
        return (features @ texts.T)[:, self.rows.to(features.device)]


def ranks(scores: Tensor, target: Tensor) -> Tensor:
    """[rows, candidates], [rows] -> how many candidates come before the target; ties go to the lower index."""
    value = scores.gather(1, target[:, None])
    lower = torch.arange(scores.shape[1], device=scores.device)[None, :] < target[:, None]
    return (scores > value).sum(1) + ((scores == value) & lower).sum(1)


def encode_texts(model: EvaluationModel, texts: Sequence[str], *, compute: Compute, micro_batch: int) -> Tensor:
    """Encode texts as [len(texts), d] unit-norm fp32 features on the CPU."""
    pieces = ((model.tokenize(list(texts[at : at + micro_batch])),) for at in range(0, len(texts), micro_batch))

    def encode(valid: int, columns: tuple[Tensor, ...]) -> Tensor:
        with compute.encoding():
            return model.encode_text(columns[0].to(compute.device))[:valid].float().cpu()

    features = torch.cat(list(compute.map(encode, microbatches(pieces, micro_batch))))
    check_finite(features, what=lambda row: f"the text {texts[row]!r}")
    return features


def check_finite(features: Tensor, *, what: Callable[[int], str]) -> None:
    """Check that features are finite; others have no score.

    Raises:
        TaskError: A row holds a NaN or an infinity; the message names the first one.
    """
    broken = (~torch.isfinite(features).all(dim=1)).nonzero()
    if len(broken):
        raise TaskError(
            f"{len(broken)} features are not finite, the first is that of {what(int(broken[0]))}: "
            "the weights of this checkpoint are damaged or its training diverged."
        )


def class_vectors(
    model: EvaluationModel, classnames: Sequence[str], templates: Sequence[str], *, compute: Compute, micro_batch: int
) -> Tensor:
    """[C, d] classifier: every template filled in, encoded, L2-normalised, averaged over templates, renormalised."""
    prompts = [[template.replace("{c}", name) for template in templates] for name in classnames]
    return mean_features(model, prompts, compute=compute, micro_batch=micro_batch)


def mean_features(
    model: EvaluationModel, prompts: Sequence[Sequence[str]], *, compute: Compute, micro_batch: int
) -> Tensor:
    """[C, d] normalised means of the normalised features of each class's prompts, of which each may have any number."""
    flat = [text for own in prompts for text in own]
    features = encode_texts(model, flat, compute=compute, micro_batch=micro_batch)
    parts = features.split([len(own) for own in prompts])
    return F.normalize(torch.stack([part.mean(dim=0) for part in parts]), dim=-1)

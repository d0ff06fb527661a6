"""The recipe's `validation` section."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from pipeline.config import section
from pipeline.data.data_config import Source, as_sources


@section
class ValidationConfig:
    """Loss on held-out pairs while training: the symmetric contrastive loss (InfoNCE) of all validation pairs against
    each other at one fixed temperature, whatever the objective, so that it is comparable over steps and methods."""

    sources: Annotated[tuple[Source, ...], BeforeValidator(as_sources)] = ()
    """Held-out shards, given as in `data.sources`, without weights; none: no validation."""
    every: int = Field(default=500, ge=1)
    """Steps between validations; the weights of the last step are always validated."""
    samples: int | None = Field(default=4096, ge=2)
    """Pairs to use, the first ones of every shard in proportion to its size; None: all. Each is compared with all
    others, so losses are comparable only for equal numbers."""
    batch_size: int = Field(default=64, ge=1)
    """Pairs that a rank encodes at a time."""
    tau: float | None = Field(default=None, gt=0)
    """Temperature of the validation loss. None: the temperature that the objective starts with (for pretrained weights,
    theirs). It stays fixed during the run."""
    patience: int | None = Field(default=None, ge=1)
    """Stop the run early after so many validations in a row without a lower loss; None: never."""
    min_delta: float = Field(default=0.0, ge=0)
    """A loss counts as lower if it is lower than the best one by more than this."""
    keep_best: bool = True
    """Write a checkpoint whenever the validation loss is lower than ever, and keep the best one: `checkpoints/best` has
    its name."""

"""What a run loses by its captions: texts longer than the model's context, and equal texts in a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from torch import Tensor

from pipeline.data.data_config import DataConfig
from pipeline.data.shards.manifest_format import load_manifest
from pipeline.data.shards.storage import is_local, open_records
from pipeline.data.shards.tar_reader import CaptionField, CorruptSample, DamagedTar
from pipeline.errors import UserError

LEAST_SHARE = 0.01
"""Of the captions, from which on a note is made."""
SAMPLED = 1000


def caption_notes(tokens_bL: Tensor, *, tokenize: Callable[[list[str]], Tensor], of: str, masked: bool) -> list[str]:
    """What to know about captions, which are tokens of the model.

    Args:
        tokens_bL: As the model's tokenizer gives them.
        tokenize: The tokenizer.
        of: Whose captions these are, "the first batch's".
        masked: `objective.mask_equal`.
    """
    length, notes = tokens_bL.shape[1], []
    empty, long = tokenize(["", "word " * length])
    last = -1 if long[-1] != empty[-1] else -2  # some tokenizers pad with the token that ends a text
    full = (tokens_bL[:, last] != empty[-1]).double().mean().item()
    if full >= LEAST_SHARE:
        notes.append(
            f"{full:.0%} of {of} captions fill all {length} tokens of the context, and what longer ones have beyond "
            "it is not read. Shorten these, or choose a model with a longer context."
        )
    _, inverse, counts = tokens_bL.unique(dim=0, return_inverse=True, return_counts=True)
    repeated = (counts[inverse] > 1).double().mean().item()
    if repeated >= LEAST_SHARE and not masked:
        notes.append(
            f"{repeated:.0%} of {of} captions are there more than once, and equal texts are each other's negatives: "
            "objective.mask_equal=true leaves them out."
        )
    return notes


def first_captions(config: DataConfig, *, count: int) -> list[str]:
    """Up to `count` captions from the beginning of the sources on this machine, at most `SAMPLED`.

    What cannot be read is passed over: whatever reads the data reports it.
    """
    share = -(-min(count, SAMPLED) // len(config.sources))
    return [text for index in range(len(config.sources)) for text in islice(_captions(config, index), share)]


def _captions(config: DataConfig, index: int) -> Iterator[str]:
    source = config.sources[index]
    allowed = {"allow_commands": config.allow_commands, "allow_outside": config.allow_outside}
    try:
        manifest = load_manifest(source.manifest, **allowed)
        field = CaptionField.parse(source.caption or config.caption)
        for shard in manifest.shards:
            url = manifest.url(shard)
            if not is_local(url):
                return
            with open_records(url, caption_suffix=field.suffix) as records:
                for record in records:
                    try:
                        yield field.read(record)
                    except CorruptSample:
                        continue
    except (UserError, OSError, DamagedTar):
        return

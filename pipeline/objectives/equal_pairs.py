"""Pairs that are equal to each other, which are no negatives: their keys, and where they are in a block of the batch.

Two pairs of a batch are equal if they have the same key in some column of [B, k] int64 keys.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

BLOCK = 2**24
"""Numbers that are hashed at once; each needs 16 bytes."""


def row_hashes(rows: Tensor) -> Tensor:
    """A 64-bit hash of each row of whole numbers, [b, ...] -> int64 [b], the same on every device and rank.

    It is multilinear with random multipliers: different rows have equal hashes with a probability of about 2^-63.
    """
    flat = rows.flatten(1)
    multipliers = _multipliers(flat.shape[1], flat.device)
    blocks = flat.split(max(1, BLOCK // max(1, flat.shape[1])))
    return torch.cat([(block.to(torch.int64) * multipliers).sum(1) for block in blocks])


def batch_keys(text: Tensor, sample_ids: Tensor, pixels: Tensor | None) -> Tensor:
    """The keys of a rank's pairs, int64 [b, k], on the device of `sample_ids`.

    Args:
        text: Token ids, [b, L], whole: texts are equal if all their ids are.
        sample_ids: int64 [b]; a sample that is in the batch twice is equal to itself.
        pixels: uint8 images [b, 3, H, W] as the model sees them; images are equal if all their pixels are. None: they
            are not compared.
    """
    columns = [row_hashes(text), sample_ids, *([] if pixels is None else [row_hashes(pixels)])]
    return torch.stack([column.to(sample_ids.device, non_blocking=True) for column in columns], 1)


def equal_pairs(keys_Bk: Tensor, *, rows: slice) -> Tensor:
    """Which of all pairs are equal to those of `rows`, bool [rows, B]; no pair is to itself."""
    equal = keys_Bk.new_zeros((rows.stop - rows.start, len(keys_Bk)), dtype=torch.bool)
    for key_B in keys_Bk.T:
        equal |= key_B[rows, None] == key_B
    equal.diagonal(rows.start).fill_(False)
    return equal


@functools.lru_cache(maxsize=8)
def _multipliers(count: int, device: torch.device) -> Tensor:
    bounds = (-(2**63), 2**63 - 1)
    return torch.randint(*bounds, (count,), generator=torch.Generator().manual_seed(0)).bitwise_or(1).to(device)

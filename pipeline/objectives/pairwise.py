"""Pairwise maths shared by all objectives, as pure functions in row blocks and in the log domain, and their buffers.

Shape legend: B global batch, b rows of this rank, d feature dimension. Rows are this rank's own samples of one side,
columns are the whole global batch of the other side; `first` is the column of row 0's partner. The code runs once per
side. Memory is O(block x B): similarities are recomputed for the gradient rather than kept.

Pairs that are equal to each other are no negatives: two pairs of a batch are equal if they have the same key in some
column of [B, k] int64 keys.

exp(h) is never computed by itself: at tau = 0.01 it leaves the range of fp32. Similarities need true fp32 products
(`pipeline.distributed.devices`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipeline.distributed.devices import to_device


@dataclass
class Workspace:
    """Named buffers: on a CPU, page faults of newly allocated memory can cost more than the pass that fills it.

    On a GPU every call allocates: the caching allocator makes that cheap, and the towers can use the memory in between.
    """

    _buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = field(default_factory=dict)

    def take(self, name: str, shape: tuple[int, ...], *, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised tensor, which overwrites the one taken under the same name before."""
        if like.is_cuda:
            return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)
        key, size = (name, dtype or like.dtype, like.device), math.prod(shape)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[key] = torch.empty(size, dtype=key[1], device=key[2])
        return buffer[:size].view(shape)


CPU_BLOCK, GPU_BLOCK = 2**21, 2**24
"""Elements of one [block, B] temporary: on a CPU they fit its cache, on a GPU they need few launches."""
LEAST_ROWS = 256
"""Rows that a block has at least, for efficient matrix products."""


def row_blocks(rows: int, columns: int, *, device: torch.device) -> Iterator[slice]:
    """Slices that cover `rows`, of one length but for the last."""
    size = max(LEAST_ROWS, (GPU_BLOCK if device.type == "cuda" else CPU_BLOCK) // max(1, columns))
    for start in range(0, rows, size):
        yield slice(start, min(rows, start + size))


def similarities(own_bd: Tensor, others_Bd: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of own rows and their products with all others, [rows, B], in a buffer that the next block overwrites."""
    columns, space = others_Bd.shape[0], Workspace()
    for rows in row_blocks(own_bd.shape[0], columns, device=own_bd.device):
        own = own_bd[rows]
        yield rows, torch.mm(own, others_Bd.T, out=space.take("s", (own.shape[0], columns), like=own))


def shifted(rows: slice, by: int) -> slice:
    """The same slice, `by` rows further on."""
    return slice(rows.start + by, rows.stop + by)


def anchor_statistics(
    anchors_bd: Tensor,
    others_Bd: Tensor,
    *,
    positive_b: Tensor,
    tau_b: Tensor,
    first: int,
    keys_Bk: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The in-batch log-normalizer of each anchor, and its derivative by the temperature.

    With h_ij = (s_ij - s_ii) / tau_i, returns `log_g = log mean_{j != i} exp(h_ij)` and
    `mean_h = sum_{j != i} softmax(h_i)_j h_ij`, both [b], so that `d log_g_i / d tau_i = -mean_h_i / tau_i`.

    Args:
        anchors_bd: Features of this rank.
        others_Bd: The other side of the whole batch.
        positive_b: s_ii.
        tau_b: Temperature of each anchor.
        first: Column of the first anchor's partner.
        keys_Bk: Keys of equal pairs, whose terms are 0 in both means. For an anchor that has no other pairs, log_g is
            -inf and mean_h is 0.
    """
    log_g, mean_h, space = torch.empty_like(positive_b), torch.empty_like(positive_b), Workspace()
    for rows, z in similarities(anchors_bd / tau_b[:, None], others_Bd):
        own_pair = z.diagonal(first + rows.start)
        own_pair.fill_(-math.inf)
        equal = None if keys_Bk is None else equal_pairs(keys_Bk, rows=shifted(rows, first))
        if equal is not None:
            z.masked_fill_(equal, -math.inf)
        top = z.amax(1)
        if equal is not None:
            top.clamp_(min=torch.finfo(top.dtype).min / 2)  # z - top is -inf also where all of a row is
        weight = torch.exp(z.sub_(top[:, None]), out=space.take("weight", tuple(z.shape), like=z))
        own_pair.fill_(0.0)
        if equal is not None:
            z.masked_fill_(equal, 0.0)
        total = weight.sum(1)
        top -= positive_b[rows] / tau_b[rows]  # now the largest h
        log_g[rows] = top + total.log() - math.log(others_Bd.shape[0] - 1)
        mean_h[rows] = top + weight.mul_(z).sum(1) / total
    if keys_Bk is not None:
        mean_h.masked_fill_(log_g.isneginf(), 0.0)
    return log_g, mean_h


def softmax_gradient(
    own_bd: Tensor,
    others_Bd: Tensor,
    *,
    slope: tuple[Tensor, Tensor],
    shift: tuple[Tensor, Tensor],
    pull: Tensor,
    first: int,
    keys_Bk: Tensor | None = None,
) -> Tensor:
    """Feature gradient of every softmax objective, `sum_j dL/ds_ij others_j` for each own row i of one side, [b, d].

    A sample's feature occurs twice: as an anchor against all others and as a negative of every anchor of the other
    side. So the gradient needs the gathered scalars of the other ranks' anchors, but no gradient collective (FastCLIP,
    section 4).

    Args:
        own_bd: Features of this rank.
        others_Bd: The other side of the whole batch.
        slope: 1 / tau of all anchors of the own and of the other side, [B] each.
        shift: Likewise z_i such that anchor i adds exp(slope_i s_ij + z_i) to dL/ds_ij for j != i.
        pull: -dL/ds_ii of both sides together, [B].
        first: Column of row 0's partner.
        keys_Bk: Keys of equal pairs, whose dL/ds_ij are 0.
    """
    gradient, space = torch.empty_like(own_bd), Workspace()
    local = slice(first, first + own_bd.shape[0])
    own_slope, own_shift, own_pull = slope[0][local, None], shift[0][local, None], pull[local]
    for rows, s in similarities(own_bd, others_Bd):
        a = space.take("a", tuple(s.shape), like=s)
        torch.addcmul(own_shift[rows], s, own_slope[rows], out=a).exp_()
        a += torch.addcmul(shift[1], s, slope[1], out=s).exp_()
        if keys_Bk is not None:
            a.masked_fill_(equal_pairs(keys_Bk, rows=shifted(rows, first)), 0.0)
        a.diagonal(first + rows.start).copy_(-own_pull[rows])
        torch.mm(a, others_Bd, out=gradient[rows])
    return gradient


HASH_BLOCK = 2**24
"""Numbers that are hashed at once; each needs 16 bytes."""


def row_hashes(rows: Tensor) -> Tensor:
    """A 64-bit hash of each row of whole numbers, [b, ...] -> int64 [b], the same on every device and rank.

    It is multilinear with random multipliers: different rows have equal hashes with a probability of about 2^-63.
    """
    flat = rows.flatten(1)
    multipliers = _multipliers(flat.shape[1], flat.device)
    blocks = flat.split(max(1, HASH_BLOCK // max(1, flat.shape[1])))
    return torch.cat([(block.to(torch.int64) * multipliers).sum(1) for block in blocks])


def batch_keys(text: Tensor, sample_ids: Tensor, pixels: Tensor | None) -> Tensor:
    """The keys of a rank's pairs, int64 [b, k], on the device of `sample_ids`.

    Args:
        text: Token ids of the host, [b, L], whole: texts are equal if all their ids are.
        sample_ids: int64 [b]; a sample that is in the batch twice is equal to itself.
        pixels: uint8 images [b, 3, H, W] as the model sees them; images are equal if all their pixels are. None: they
            are not compared.
    """
    of_texts = to_device(row_hashes(text), sample_ids.device)
    return torch.stack([of_texts, sample_ids, *([] if pixels is None else [row_hashes(pixels)])], 1)


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

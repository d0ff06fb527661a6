"""Passes over memory: everything that an update of the prototypes costs beside its matrix products.

`Passes` chains kernels that PyTorch ships fused (softmax, weight normalisation and its backward, AdaGrad), in pieces
that fit a core's cache. `CompiledPasses` computes the same formulas, fused by torch.compile: fewer passes and kernels,
for some seconds of compilation and a compiler on the machine.

Two properties of Inductor 2.12 on a CPU shape the compiled programs. It merges consecutive loops over a matrix, which
keeps a row in a core's nearest cache, unless the program also computes on [R] or [m] vectors: those are in other
programs. And it fails where one loop sums over a row that another writes in place
(https://github.com/pytorch/pytorch/issues/196570), so an update returns new prototypes.

Shape legend: R anchors of a block, d feature dimension, m prototypes; U_j = W_j / |W_j|.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad

from pipeline.distributed.world import World
from pipeline.errors import UserError, in_a_line
from pipeline.objectives.pairwise import Workspace
from pipeline.objectives.temperature import Adam, Rate

LEAST_TAU = 0.002
"""Temperature down to which float64 holds exp(1 / tau), which is summed over the ranks."""
_CPU_PIECE = 2**18
"""Elements per thread of a piece that stays in a CPU's caches between consecutive passes."""


@dataclass(frozen=True)
class AdaGrad:
    """torch.optim.Adagrad without decay; on a CPU in its fused form, one pass over memory."""

    lr: float
    eps: float = 1e-10
    slots: ClassVar[tuple[str, ...]] = ("accumulator",)

    def step(self, parameter: Tensor, gradient: Tensor, slots: Mapping[str, Tensor], *, updates: Rate) -> None:
        adagrad(
            [parameter],
            [gradient],
            [slots["accumulator"]],
            [torch.zeros(())],  # the step counter, which only matters to learning-rate decay
            fused=parameter.device.type == "cpu",
            lr=self.lr,
            weight_decay=0.0,
            lr_decay=0.0,
            eps=self.eps,
            maximize=False,
        )


InnerOptimizer = AdaGrad | Adam


@dataclass(frozen=True)
class Prototypes:
    """Prototypes W, [m, d], ready for a matrix product, with |W_j|, [m, 1]."""

    weight: Tensor
    directions: Tensor
    """U_j / tau up to `scale`, [m, d], in the precision of the product; may be a workspace's buffer, or `weight`
    itself."""
    scale: Tensor | None
    """Factors still missing from the rows of `directions`, [m]; None: none."""
    norms: Tensor
    tau: Tensor

    def tangent(self, product: Tensor, rows: slice) -> Tensor:
        """dL/dW_j = (G_j - (G_j . U_j) U_j) / |W_j| of these rows from G = dL/dU, [m, d]: the backward of W / |W|."""
        weight, norms = self.weight[rows], self.norms[rows]
        backward = torch.ops.aten._weight_norm_interface_backward
        result: Tensor = backward(product[rows].to(weight.dtype), weight, torch.ones_like(norms), norms, 0)[0]
        return result


@dataclass(frozen=True)
class Division:
    """The `live` prototypes divided among the ranks: rank k has numbers k, k + K, k + 2 K, ...

    Each rank sums over its own prototypes for all anchors, and the ranks add up these sums: B scalars per update.
    """

    world: World
    live: int

    @property
    def rows(self) -> int:
        """Number of this rank's prototypes."""
        return -(-(self.live - self.world.rank) // self.world.size)

    def own(self, start: int, features: Tensor) -> tuple[slice, Tensor]:
        """Where features of the prototypes `start`, `start + 1`, ... go among this rank's own, and which these are."""
        offset = (self.world.rank - start) % self.world.size
        mine, first = features[offset :: self.world.size], (start + offset) // self.world.size
        return slice(first, first + len(mine)), mine

    def whole(self, own: Tensor, *, count: int) -> Tensor:
        """All ranks' rows in order, [count, d], from each rank's [ceil(count / K), d]; collective."""
        parts = self.world.all_gather(own).view(self.world.size, *own.shape)
        return parts.transpose(0, 1).flatten(0, 1)[:count]


class Passes:
    """Passes over [m, d] and [R, m] matrices with PyTorch's own fused kernels, and their buffers.

    With a `division`, the prototypes that they are given are this rank's.
    """

    def __init__(self, space: Workspace | None = None, division: Division | None = None) -> None:
        self.space, self.division = space or Workspace(), division

    def live(self, at: Prototypes) -> int:
        """Prototypes of all ranks."""
        return self.division.live if self.division else len(at.weight)

    def all_ranks(self, shift: Tensor, total: Tensor) -> Tensor | None:
        """log of sum_j exp(z_ij) over all ranks' prototypes, from t_i and s_i over the own, [R]; None without a
        division."""
        if self.division is None:
            return None
        own = self.run(_exp_sum, shift, total)
        log_sum: Tensor = self.run(_log_sum, self.division.world.all_reduce(own), shift.dtype)
        return log_sum

    def prepare(self, weight_md: Tensor, tau: Tensor, *, dtype: torch.dtype | None = None) -> Prototypes:
        """The prototypes, ready for products in `dtype`; None: in their own precision."""
        m = weight_md.shape[0]
        scaled = self.space.take("directions", tuple(weight_md.shape), like=weight_md, dtype=dtype)
        norms, gain = self.space.take("norms", (m, 1), like=weight_md), (1.0 / tau).expand(m, 1).contiguous()
        for rows in pieces(weight_md):
            direction, norms[rows] = torch._weight_norm_interface(weight_md[rows], gain[rows], 0)
            scaled[rows] = direction
        return Prototypes(weight_md, scaled, None, norms, tau)

    def exponentials(self, z: Tensor, at: Prototypes) -> tuple[Tensor, Tensor, Tensor]:
        """p_ij = exp(scale_j z_ij - t_i), [R, m]; t_i near the row's largest exponent; s_i = sum_j p_ij.

        z are products with at.directions, which may be overwritten. p has the precision of at.directions; t and s,
        [R] each, that of W.
        """
        # Softmax is one kernel: with t the logarithm of the row's sum, s is 1. That sum follows without further
        # exponentials: the row's largest softmax is 1 / sum_j exp(z_ij - max_j z_ij).
        log_sums = []
        for rows in pieces(z):
            part = z[rows]
            wide = part
            if part.dtype != at.weight.dtype:
                wide = self.space.take("piece", tuple(part.shape), like=at.weight).copy_(part)
            if at.scale is not None:
                wide.mul_(at.scale)
            top = wide.amax(1)
            torch.softmax(wide, 1, out=wide)
            log_sums.append(top - wide.amax(1).log_())
            if wide is not part:
                part.copy_(wide)
        shift = torch.cat(log_sums)
        return z.to(at.directions.dtype), shift, torch.ones_like(shift)

    def sums(self, z: Tensor, at: Prototypes) -> tuple[Tensor, Tensor]:
        """t and s of `exponentials` without p."""
        _, shift, total = self.exponentials(z, at)  # softmax is faster than logsumexp
        return shift, total

    def descend(
        self, product: Tensor, at: Prototypes, slots: Mapping[str, Tensor], *, optimizer: InnerOptimizer, number: int
    ) -> Prototypes:
        """The prototypes after the optimizer's step `number`, which may have been taken in place, from dL/dU."""
        for rows in pieces(at.weight):
            parts = {name: slot[rows] for name, slot in slots.items()}
            optimizer.step(at.weight[rows], at.tangent(product, rows), parts, updates=number)
        return self.prepare(at.weight, at.tau, dtype=at.directions.dtype)

    def run(self, formula: Callable[..., Any], *arguments: Any) -> Any:
        """formula(*arguments), for formulas on [R] and [R, d]."""
        return formula(*arguments)


class CompiledPasses(Passes):
    """The same formulas, fused by torch.compile; updates of optimizers other than AdaGrad are the base class's."""

    def prepare(self, weight_md: Tensor, tau: Tensor, *, dtype: torch.dtype | None = None) -> Prototypes:
        low = self._low(weight_md, dtype)
        return _unscaled(weight_md, low, self.run(_squares, weight_md, low), tau)

    def exponentials(self, z: Tensor, at: Prototypes) -> tuple[Tensor, Tensor, Tensor]:
        out = self.space.take("exponentials", tuple(z.shape), like=at.directions)
        shift, total = self.run(_exponentials, z, at.scale, out, at.weight.dtype)
        return out, shift, total

    def sums(self, z: Tensor, at: Prototypes) -> tuple[Tensor, Tensor]:
        shift, total = self.run(_sums, z, at.scale, at.weight.dtype)
        return shift, total

    def descend(
        self, product: Tensor, at: Prototypes, slots: Mapping[str, Tensor], *, optimizer: InnerOptimizer, number: int
    ) -> Prototypes:
        if not isinstance(optimizer, AdaGrad):
            return super().descend(product, at, slots, optimizer=optimizer, number=number)
        low, inverse, memory = self._low(at.weight, at.directions.dtype), at.norms.reciprocal(), slots["accumulator"]
        weight_md, squares = self.run(_adagrad, at.weight, product, inverse, memory, low, optimizer.lr, optimizer.eps)
        return _unscaled(weight_md, low, squares, at.tau)

    def run(self, formula: Callable[..., Any], *arguments: Any) -> Any:
        return _compiled(formula, *arguments)

    def _low(self, weight_md: Tensor, dtype: torch.dtype | None) -> Tensor | None:
        """A buffer for the prototypes in another precision; None if `dtype` is None or their own."""
        if dtype in (None, weight_md.dtype):
            return None
        return self.space.take("directions", tuple(weight_md.shape), like=weight_md, dtype=dtype)


def pieces(matrix: Tensor) -> list[slice]:
    """Row slices of a matrix: on a CPU pieces that stay in cache between passes, on a GPU all rows at once."""
    rows, columns = matrix.shape
    step = rows if matrix.is_cuda else max(1, _CPU_PIECE * torch.get_num_threads() // columns)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _unscaled(weight_md: Tensor, low: Tensor | None, squares: Tensor, tau: Tensor) -> Prototypes:
    """Prototypes whose factors 1 / (|W_j| tau) are left to the pass over their products; `squares` is |W_j|^2."""
    norms = squares.sqrt()
    scale = (norms * tau).reciprocal_().squeeze(1)
    return Prototypes(weight_md, weight_md if low is None else low, scale, norms, tau)


def _squares(weight_md: Tensor, low: Tensor | None) -> Tensor:
    if low is not None:
        low.copy_(weight_md)
    return weight_md.square().sum(1, keepdim=True)


def _sums(z: Tensor, scale: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    wide = z.to(dtype) if scale is None else z.to(dtype) * scale
    shift = wide.amax(1, keepdim=True)
    return shift.squeeze(1), torch.exp(wide - shift).sum(1)


def _exponentials(z: Tensor, scale: Tensor | None, out: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    wide = z.to(dtype) if scale is None else z.to(dtype) * scale
    shift = wide.amax(1, keepdim=True)
    out.copy_(torch.exp(wide - shift))
    return shift.squeeze(1), out.to(dtype).sum(1)


def _adagrad(
    weight_md: Tensor, product: Tensor, inverse: Tensor, memory: Tensor, low: Tensor | None, lr: float, eps: float
) -> tuple[Tensor, Tensor]:
    gradient = product.to(weight_md.dtype)
    along = (gradient * weight_md).sum(1, keepdim=True) * inverse * inverse
    tangent = (gradient - along * weight_md) * inverse
    memory.add_(tangent.square())
    after = weight_md - lr * tangent / (memory.sqrt() + eps)
    return after, _squares(after, low)


def _exp_sum(shift: Tensor, total: Tensor) -> Tensor:
    """exp(t) s of up to exp(1/tau) leaves fp32's range; float64 holds it down to tau = 1/700 without a common shift."""
    return (shift + total.log()).double().exp()


def _log_sum(exp_sum: Tensor, dtype: torch.dtype) -> Tensor:
    return exp_sum.log().to(dtype)


_programs: dict[Callable[..., Any], Callable[..., Any]] = {}


@functools.cache
def why_not_compiled(device: torch.device) -> str:
    """Why torch.compile cannot be used on a device; empty if it can."""
    try:
        torch.compile(torch.sin, dynamic=False)(torch.zeros(8, device=device))
    except Exception as error:  # of Dynamo, Inductor, Triton or a compiler
        return in_a_line(error)
    return ""


def _compiled(formula: Callable[..., Any], *arguments: Any) -> Any:
    from torch._dynamo.exc import TorchDynamoException

    if formula not in _programs:
        # Inductor's disk cache ignores the number of threads unless it is an explicit option
        # (https://github.com/pytorch/pytorch/issues/167463): programs compiled under a launcher's OMP_NUM_THREADS=1
        # would be reused by processes with more threads.
        options: dict[str, str | int | bool | Callable[..., Any]] = {"cpp.threads": torch.get_num_threads()}
        # Otherwise each rank selects kernels by timing them on its GPU, and these may sum rows in different orders.
        options["deterministic"] = True
        _programs[formula] = torch.compile(formula, dynamic=False, options=options)
    try:
        return _programs[formula](*arguments)
    except TorchDynamoException as error:
        reason = str(error).split("\n\n")[0]
        raise UserError(
            f"objective.npn_compile = true, but torch.compile fails on this machine: {reason}. `neuclip doctor` looks "
            "for a compiler; objective.npn_compile=false needs none."
        ) from error

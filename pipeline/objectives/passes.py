"""The passes over memory of a prototypes' update, all that it costs beside its GEMMs, in two makes with one meaning.

`Passes` chains kernels that PyTorch has fused already (softmax, weight normalisation and its backward, AdaGrad), and
sends pieces that a core's cache can hold through them in turn. `CompiledPasses` lets torch.compile fuse the formulas as
they stand, with what follows them row by row: fewer passes and kernels, for some seconds of compilation and a compiler
on the machine. Its programs write in place only element by element or into what they do not read: Inductor 2.12 fails
on a reduction in the same program (https://github.com/pytorch/pytorch/issues/196570).

Shape legend: R anchors of a block, d feature dimension, m prototypes; U_j = W_j / |W_j|.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import UserError
from pipeline.objectives.inner_optimizer import AdaGrad, InnerOptimizer
from pipeline.objectives.workspace import Workspace

# Elements per thread of a piece that consecutive passes find in a CPU's caches.
_CPU_PIECE = 2**18

# What is computed per row from log sum_j exp(z_ij), [R], and the arguments given with it.
Follow = Callable[..., Any]


@dataclass(frozen=True)
class UnitGradient:
    """G, dL/dU, [m, d], and |W_j|, [m, 1]; maybe buffers of a workspace, which the next gradient overwrites.

    product: bf16 where it is one GEMM's result in bf16, else in the precision of W.
    """

    product: Tensor
    norms: Tensor

    def clone(self) -> UnitGradient:
        return UnitGradient(self.product.clone(), self.norms.clone())

    def tangent(self, weight_md: Tensor, rows: slice) -> Tensor:
        """dL/dW_j = (G_j - (G_j . U_j) U_j) / |W_j| of these rows: the backward of W / |W|."""
        norms, gradient = self.norms[rows], self.product[rows].to(weight_md.dtype)
        backward = torch.ops.aten._weight_norm_interface_backward
        result: Tensor = backward(gradient, weight_md[rows], torch.ones_like(norms), norms, 0)[0]
        return result


class Passes:
    """What an update does to [m, d] and [R, m] beside multiplying them, by PyTorch's own fused kernels."""

    def directions(
        self, weight_md: Tensor, tau: Tensor, *, dtype: torch.dtype, space: Workspace
    ) -> tuple[Tensor, Tensor]:
        """W_j / (|W_j| tau), [m, d] in `dtype`, a buffer of `space`, and |W_j|, [m, 1]."""
        m = weight_md.shape[0]
        scaled = space.take("directions", tuple(weight_md.shape), like=weight_md, dtype=dtype)
        norms, gain = space.take("norms", (m, 1), like=weight_md), (1.0 / tau).expand(m, 1).contiguous()
        for rows in pieces(weight_md):
            direction, norms[rows] = torch._weight_norm_interface(weight_md[rows], gain[rows], 0)
            scaled[rows] = direction
        return scaled, norms

    def softmax(
        self, z: Tensor, follow: Follow, *given: Any, like: Tensor, dtype: torch.dtype, space: Workspace
    ) -> tuple[Tensor, Any]:
        """Softmax of z, [R, m], over its columns, in `dtype`; and follow(log sum_j exp(z_ij), [R], *given).

        Both are computed as `like`. z may be lost.
        """
        # A row's largest probability is one over its sum of exp(z_ij - max_j z_ij): no further exponentials.
        log_sums = []
        for rows in pieces(z):
            part = z[rows]
            wide = part
            if part.dtype != like.dtype:
                wide = space.take("piece", tuple(part.shape), like=like).copy_(part)
            top = wide.amax(1)
            torch.softmax(wide, 1, out=wide)
            log_sums.append(top - wide.amax(1).log_())
            if wide is not part:
                part.copy_(wide)
        return z.to(dtype), follow(torch.cat(log_sums), *given)

    def descend_(
        self,
        weight_md: Tensor,
        gradient: UnitGradient,
        slots: Mapping[str, Tensor],
        *,
        optimizer: InnerOptimizer,
        number: int,
    ) -> None:
        """The optimizer's step `number` (from 1) on the prototypes, in place."""
        for rows in pieces(weight_md):
            tangent = gradient.tangent(weight_md, rows)
            optimizer.step(weight_md[rows], tangent, {name: slot[rows] for name, slot in slots.items()}, updates=number)


class CompiledPasses(Passes):
    """The formulas, fused by torch.compile. Optimizers other than AdaGrad take their step as in the base class."""

    def directions(
        self, weight_md: Tensor, tau: Tensor, *, dtype: torch.dtype, space: Workspace
    ) -> tuple[Tensor, Tensor]:
        scaled = space.take("directions", tuple(weight_md.shape), like=weight_md, dtype=dtype)
        return scaled, _compiled(_directions, weight_md, tau, scaled)

    def softmax(
        self, z: Tensor, follow: Follow, *given: Any, like: Tensor, dtype: torch.dtype, space: Workspace
    ) -> tuple[Tensor, Any]:
        out = space.take("softmax", tuple(z.shape), like=z, dtype=dtype)
        return out, _compiled(_softmax, z, out, like.dtype, follow, *given)

    def descend_(
        self,
        weight_md: Tensor,
        gradient: UnitGradient,
        slots: Mapping[str, Tensor],
        *,
        optimizer: InnerOptimizer,
        number: int,
    ) -> None:
        if isinstance(optimizer, AdaGrad):
            product, norms, memory = gradient.product, gradient.norms, slots["accumulator"]
            along = _compiled(_along, weight_md, product, norms)
            _compiled(_adagrad_, weight_md, product, norms, along, memory, optimizer.lr, optimizer.eps)
        else:
            super().descend_(weight_md, gradient, slots, optimizer=optimizer, number=number)


FUSED, COMPILED = Passes(), CompiledPasses()


def pieces(matrix: Tensor) -> list[slice]:
    """Rows of a matrix in pieces that several passes can share: on a CPU small ones, elsewhere all at once."""
    rows, columns = matrix.shape
    step = rows if matrix.is_cuda else max(1, _CPU_PIECE * torch.get_num_threads() // columns)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _directions(weight_md: Tensor, tau: Tensor, scaled: Tensor) -> Tensor:
    norms = weight_md.square().sum(1, keepdim=True).sqrt()
    scaled.copy_(weight_md * (1.0 / (norms * tau)))
    return norms


def _softmax(z: Tensor, out: Tensor, dtype: torch.dtype, follow: Follow, *given: Any) -> Any:
    wide = z.to(dtype)
    top = wide.amax(1, keepdim=True)
    power = torch.exp(wide - top)
    total = power.sum(1, keepdim=True)
    out.copy_(power / total)
    return follow((top + total.log()).squeeze(1), *given)


def _along(weight_md: Tensor, product: Tensor, norms: Tensor) -> Tensor:
    return (product.to(weight_md.dtype) * weight_md).sum(1, keepdim=True) / norms.square()


def _adagrad_(
    weight_md: Tensor, product: Tensor, norms: Tensor, along: Tensor, memory: Tensor, lr: float, eps: float
) -> None:
    tangent = (product.to(weight_md.dtype) - along * weight_md) / norms
    memory.add_(tangent.square())
    weight_md.sub_(lr * tangent / (memory.sqrt() + eps))


_programs: dict[Callable[..., Any], Callable[..., Any]] = {}


def _compiled(formula: Callable[..., Any], *arguments: Any) -> Any:
    from torch._dynamo.exc import TorchDynamoException

    if formula not in _programs:
        # Inductor's cache on disk overlooks the threads a program was made for, unless they are an option of it
        # (https://github.com/pytorch/pytorch/issues/167463): a launcher's OMP_NUM_THREADS=1 would stay for ever.
        options: dict[str, str | int | bool | Callable[..., Any]] = {"cpp.threads": torch.get_num_threads()}
        _programs[formula] = torch.compile(formula, dynamic=False, options=options)
    try:
        return _programs[formula](*arguments)
    except TorchDynamoException as error:
        reason = str(error).split("\n\n")[0]
        raise UserError(
            f"objective.npn_compile = true, but torch.compile fails on this machine: {reason}. `neuclip doctor` looks "
            "for a compiler; objective.npn_compile=false does without."
        ) from error

"""DeepSpeed's bookkeeping of bf16 gradients in a few kernels instead of three per parameter.

At ZeRO stage 1 in bf16, DeepSpeed (0.19) adds every parameter's gradient to its fp32 copy, and takes every copy's norm,
one parameter at a time: about 1,300 launches for ViT-B/16, at the end of a step, where nothing else is queued.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def fuse_gradients(optimizer: Any) -> None:
    """Let DeepSpeed's `BF16_Optimizer` treat the gradients of a parameter group at once; leave others as they are.

    The accumulated gradients are the same to the bit, and their norm is the same up to rounding.
    """
    if not hasattr(optimizer, "update_hp_grads") or optimizer.immediate_grad_update:
        return

    @torch.no_grad()
    def update_hp_grads(clear_lp_grads: bool = False) -> None:
        for index, group in enumerate(optimizer.bf16_groups):
            rows = [row for row, parameter in enumerate(group) if parameter.grad is not None]
            copies = [optimizer.fp32_groups_gradients[index][row] for row in rows]
            gradients = [group[row].grad.view(copy.shape) for row, copy in zip(rows, copies, strict=True)]
            present = optimizer.fp32_groups_has_gradients[index]
            if not rows:
                continue
            if any(present):
                torch._foreach_add_(copies, gradients)
            else:  # the copies are zeros
                torch._foreach_copy_(copies, gradients)
            for row in rows:
                present[row] = True
            if clear_lp_grads:
                torch._foreach_zero_([group[row].grad for row in rows])

    every = optimizer.get_grads_for_norm

    def get_grads_for_norm(for_clipping: bool = False) -> Any:
        if for_clipping:
            return every(for_clipping=True)
        gradients, of_experts = every()
        norms: list[Tensor] = [torch.stack(torch._foreach_norm(gradients))] if gradients else []
        return norms, of_experts  # the norm of the norms is that of all gradients

    optimizer.update_hp_grads, optimizer.get_grads_for_norm = update_hp_grads, get_grads_for_norm

"""What the setting `auto` comes to: `model.compile` by the length of the run, `engine.micro_batch` by trial."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from pipeline.checkpoint.reader import Checkpoint
from pipeline.distributed.world import World
from pipeline.engine.engine_protocol import EngineFacts
from pipeline.errors import UserError, is_out_of_memory
from pipeline.metrics.mfu import known_peak, training_flops
from pipeline.model.towers import Towers
from pipeline.training.recipe import RunConfig
from pipeline.training.run_state import RunState
from pipeline.training.step import batch_norms_of, frozen_statistics, seeded

COMPILING_SECONDS = 75.0
"""What compiling the towers of ViT-B/16 took on an H200 (torch 2.11)."""
SAVED = 0.1
"""Share of a step that compiled towers save (ViT-B/16 there, bf16 weights, patches as a product: 203 to 188 ms)."""
USUAL_MFU, UNKNOWN_PEAK = 0.3, 100.0
"""Share of a GPU's peak that training reaches, and the peak in TFLOP/s that is assumed of a GPU outside the table."""


def compiled_towers(run: RunConfig, facts: EngineFacts, *, world: World, steps: int) -> bool | Literal["auto"]:
    """Whether to compile the towers for a number of steps; "auto": if they can be.

    The answer is the same on every rank and after a restart: a resumed run computes what an uninterrupted one does.
    """
    setting = run.model.compile
    if setting != "auto":
        return setting
    if world.device.type != "cuda" or facts.stage == 3 or run.model.lora.rank is not None:
        return False
    peak = known_peak(torch.cuda.get_device_name(world.device)) or UNKNOWN_PEAK
    seconds = training_flops(run.model) * run.batch_size * steps / (world.size * USUAL_MFU * peak * 1e12)
    return "auto" if seconds * SAVED > COMPILING_SECONDS else False


def choose_micro_batch(state: RunState, *, plain: Towers | None, resumed: Checkpoint | None) -> str:
    """Set `state.micro_batch` to the largest one, of those found by halving, that fits on every rank. Collective.

    A forward and a backward pass of the uncompiled towers are tried, on each rank alone. Weights, gradients, running
    statistics and random states stay as they are. A run that goes on with as many samples a rank begins with its former
    number, with which it computes the same bits. On a CPU, where lack of memory ends the process, everything fits.
    `plain` are the towers of the gradient check, which compute in fp32. Returns a sentence for the log.

    Raises:
        UserError: A single sample does not fit.
    """
    engine, world, local = state.engine, state.world, state.run.batch_size // state.world.size
    before = None
    if resumed is not None and resumed.batch_size == local * resumed.meta["world_size"]:
        before = resumed.meta.get("micro_batch")
    size = before or local
    tried = [(engine.module, engine.dtype, engine.bf16 and engine.dtype == torch.float32)]
    if plain is not None:
        tried.append((plain.to(world.device).train(), torch.float32, False))
    batch = state.loader.stand_in()
    image, text = state.normalized(batch.image.to(world.device)), batch.text.to(world.device)
    text = text[:, : state.run.model.text_tokens]  # of the widest batch
    while True:
        fits = all(_fits(*each, image=image[:size], text=text[:size]) for each in tried)
        torch.cuda.empty_cache()  # for libraries that have allocators of their own, such as NCCL
        if not world.all_reduce(torch.tensor(float(not fits), device=world.device), "max"):
            break
        if size == 1:
            raise UserError(
                "engine.micro_batch=auto: not even one sample of a rank fits into memory. Set "
                "model.grad_checkpointing=true, or see docs/cluster.md, 'A large batch on few GPUs'."
            )
        size = max(part for part in range(1, size // 2 + 1) if local % part == 0)
    state.micro_batch = size
    why = "" if size == local else ", as before" if size == before else "; more do not fit into memory"
    return f"engine.micro_batch=auto: {size} of a rank's {local} samples at a time{why}."


def _fits(towers: Towers, dtype: torch.dtype, autocast: bool, *, image: Tensor, text: Tensor) -> bool:
    """Whether a forward and a backward pass fit, beside two fp32 copies of what is trained: the moments that some
    optimizers allocate in their first step, and room for what else a step needs."""
    trained = [p for p in towers.parameters() if p.requires_grad]
    try:
        room = [torch.empty(2, *p.shape, device=p.device) for p in trained]
        with (
            seeded(0, 0, 0, 0),
            frozen_statistics(batch_norms_of(towers)),
            torch.autocast(image.device.type, torch.bfloat16, enabled=autocast),
        ):
            features = [f for f in towers.forward(image.to(dtype), text) if f.requires_grad]
        torch.autograd.grad(features, trained, [torch.ones_like(f) for f in features], allow_unused=True)
        del room
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True

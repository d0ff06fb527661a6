"""Program run on each rank by `test_objectives_ranks`; in a single process it computes the reference."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn.parallel import DistributedDataParallel

from pipeline.distributed.start import start_world
from pipeline.distributed.world import leave
from pipeline.errors import UserError
from pipeline.objectives import build_objective, pairwise
from pipeline.objectives.distill import Teacher
from pipeline.objectives.drift import fingerprint
from tests.unit.objectives_reference import context, unit_features

BATCH, DIM, STEPS = 16, 12, 5
NEUCLIP = {"name": "neuclip", "prototypes": 24, "restart_every": 3}
VARIANTS: dict[str, dict[str, Any]] = {
    **{n: {"name": n} for n in ("openclip", "dcl", "siglip", "sogclr", "isogclr", "amorlip")},
    **{f"fastclip_v{i}": {"name": f"fastclip_v{i}"} for i in range(4)},
    "neuclip": NEUCLIP,
    "neuclip_few_prototypes": {**NEUCLIP, "prototypes": 5},
    "neuclip_uneven": {**NEUCLIP, "prototypes": 23},
    "neuclip_queue": {**NEUCLIP, "npn": "queue"},
    "neuclip_simultaneous": {**NEUCLIP, "npn_schedule": "simultaneous", "inner_steps": 1},
    "neuclip_replicated": {**NEUCLIP, "npn_update": "replicated"},
    "neuclip_full_gradient": {**NEUCLIP, "stop_gradient": False, "ratio_cap": 0},
    "neuclip_literal": {**NEUCLIP, "name": "neuclip_literal"},
    "neuclip_plus": {"name": "neuclip_plus", "prototypes": 24},
    "neuclip_mlp": {"name": "neuclip", "npn": "mlp", "restart_every": 0},
    **{f"{n}_distilled": {"name": n, "distill": 0.5} for n in ("openclip", "isogclr")},
    **{f"{n}_masked": {"name": n, "mask_equal": True} for n in ("openclip", "siglip", "fastclip_v3")},
    "neuclip_masked": {**NEUCLIP, "mask_equal": True},
}


def make(name, world, *, dtype=torch.float64):
    facts = {"world": world, "dtype": dtype, "dataset_size": 37, "steps_per_epoch": 2, "total_steps": 8}
    return build_objective(VARIANTS[name], context=context(BATCH, DIM, **facts))


def local(world, step, *, dtype=torch.float64):
    rows = world.rows(BATCH // world.size)
    image, text = unit_features(BATCH, DIM, seed=step, dtype=torch.float64)
    ids = torch.randperm(37, generator=torch.Generator().manual_seed(step))[:BATCH]
    return image[rows].to(dtype), text[rows].to(dtype), ids[rows]


def guide(objective, world, step):
    """Features of a teacher for the samples of `local`, where the objective distills."""
    if not objective.config.distill:
        return None
    rows = world.rows(BATCH // world.size)
    image, text = unit_features(BATCH, 6, seed=100 + step)
    return Teacher(image[rows], text[rows], 0.05)


def trajectory(name, world, *, dtype, steps):
    """Return loss and gathered gradients of every step, and the final state; the third batch is discarded once."""
    objective, found = make(name, world, dtype=dtype), {}
    for step in range(steps):
        image, text, ids = local(world, step, dtype=dtype)
        given = {"sample_ids": ids, "teacher": guide(objective, world, step)}
        if objective.config.mask_equal:
            given["keys"] = torch.stack([ids, ids % 5], 1)
        output = objective.compute(image, text, **given)
        if step == 2:
            objective.discard()
            objective.prefetch(ids)
            output = objective.compute(image, text, **given)
        objective.commit(lr_scale=1 / (1 + step))
        found[f"loss{step}"] = output.loss
        for side, gradient in (("image", output.grad_image), ("text", output.grad_text)):
            found[f"{side}{step}"] = world.all_gather(gradient)
        found |= {f"{key}{step}": value for key, value in output.metrics.items()}
    small = objective.state_dict()
    print_bits = fingerprint(small, device=torch.device("cpu"))
    found["same_bits"] = (world.all_gather(print_bits[None]) == print_bits).all()
    own = {name: torch.cat(list(blocks)) for name, (_, blocks) in objective.row_blocks().items()}
    rows = {name: torch.cat(world.gather_objects(part)) for name, part in own.items()}
    return found | {f"state.{k}": v for k, v in (small | rows).items()}


def everything(world):
    """Run every variant for some steps in float64 (on several ranks, in blocks of three rows) and one step in fp32."""
    found = {}
    for name in VARIANTS:
        blocks = {"LEAST_ROWS": 3, "CPU_BLOCK": 1} if world.size > 1 else {}
        with mock.patch.multiple(pairwise, **blocks) if blocks else contextlib.nullcontext():
            found[name] = trajectory(name, world, dtype=torch.float64, steps=STEPS)
        found[f"{name}.fp32"] = trajectory(name, world, dtype=torch.float32, steps=1)
    return found


def bytes_moved(world):
    """Return the payload that one step of each method passes to the collectives, by collective."""
    found = {}
    for name in (name for name, settings in VARIANTS.items() if not {"distill", "mask_equal"} & settings.keys()):
        objective = make(name, world, dtype=torch.float32)
        image, text, ids = local(world, 0, dtype=torch.float32)
        world.traffic.clear()
        objective.compute(image, text, sample_ids=ids)
        objective.commit()
        found[name] = {key: count for key, count in world.traffic.items() if key.endswith(".bytes")}
    return found


def drifting(world):
    """Flip a bit on rank 1 three times that the commit does not round away: repaired twice, then all ranks stop."""
    objective = build_objective(NEUCLIP, context=context(BATCH, DIM, world=world, dtype=torch.float32))
    objective.drift.every = 2
    events, error, agreed = [], "", []
    for step in range(8):
        image, text, ids = local(world, step, dtype=torch.float32)
        objective.compute(image, text, sample_ids=ids)
        if world.rank == 1 and step in (3, 5, 7):
            objective.temperature.log_scale.moment2.view(torch.int32).bitwise_xor_(1 << 12)
        try:
            objective.commit()
        except UserError as stop:
            error = str(stop)
        events.append(objective.counters()["drift_events"])
        bits = fingerprint(objective.state_dict(), device=torch.device("cpu"))
        agreed.append(bool((world.all_gather(bits[None]) == bits).all()))
    return {"events": events, "error": error, "agreed": agreed}


def own_loop(world):
    """Return losses and weights of an open_clip model in the training loop of docs/methods.md; no `world` is passed."""
    from open_clip import CLIP

    towers = {
        "vision_cfg": {"image_size": 16, "layers": 1, "width": 16, "patch_size": 8, "head_width": 8},
        "text_cfg": {"context_length": 8, "vocab_size": 20, "width": 16, "heads": 2, "layers": 1},
    }
    found = {}
    for name in ("neuclip", "fastclip_v3", "siglip"):
        torch.manual_seed(0)
        model = CLIP(embed_dim=DIM, init_logit_bias=-10.0 if name == "siglip" else None, **towers).double()
        learned = [p for p in (model.logit_scale, model.logit_bias) if p is not None]
        for parameter in learned:
            parameter.requires_grad_(False)
        encode = DistributedDataParallel(model) if world.size > 1 else model
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        facts = {"dim": DIM, "batch_size": BATCH, "dataset_size": 37, "total_steps": 8, "dtype": torch.float64}
        objective = build_objective({"name": name, "rho": 1.5} if name != "siglip" else name, **facts)
        assert objective.world.size == world.size
        rows = world.rows(BATCH // world.size)
        for step in range(STEPS):
            draw = torch.Generator().manual_seed(step)
            images = torch.randn(BATCH, 3, 16, 16, generator=draw, dtype=torch.float64)
            tokens, ids = torch.randint(1, 20, (BATCH, 8), generator=draw), torch.randperm(37, generator=draw)[:BATCH]
            features = encode(images[rows], tokens[rows])
            loss = objective.loss(features[0], features[1], sample_ids=ids[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            objective.commit(lr_scale=0.5)
            found[f"{name}.loss{step}"] = loss.detach()
        for parameter, value in zip(learned, objective.logit_parameters(), strict=False):
            parameter.data.fill_(value)
        found |= {f"{name}.{key}": value.clone() for key, value in model.state_dict().items()}
    return found


def main(out):
    with start_world(device="cpu") as world:
        result = {
            "everything": everything(world),
            "bytes": bytes_moved(world),
            "drift": drifting(world),
            "own_loop": own_loop(world),
        }
        torch.save(result, out / f"{world.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave(0)

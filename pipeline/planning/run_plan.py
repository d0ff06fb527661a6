"""The plan of a recipe: memory, time and data, without computing values.

Memory counts weights, gradients, optimizer, normalizer network, tables and what autograd saves for backward; workspaces
of kernels and fragmentation come on top. Towers and objective are built on the meta device.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pipeline.data.data_config import PREFETCH, DataConfig
from pipeline.data.loading.blocks import SPARE
from pipeline.data.loading.stored_features import how_to_write, open_features
from pipeline.data.order.canonical_order import Order, make_layout, make_order
from pipeline.data.shards.check_shards import caption_notes, first_captions
from pipeline.distributed.world import World
from pipeline.engine.engine_config import BUCKET
from pipeline.engine.engine_protocol import ENGINES
from pipeline.errors import UserError
from pipeline.metrics.mfu import TowerCosts, activation_bytes, measure_towers
from pipeline.model.architectures import Architecture
from pipeline.model.starting_weights import find_start
from pipeline.model.towers import ModelConfig, build_towers, text_batching, without_weights
from pipeline.objectives import ObjectiveMemory, build_objective
from pipeline.training.build import check_stages
from pipeline.training.recipe import RunConfig, check_captions_of, check_run, stages_of

META = torch.device("meta")


def engine_memory(
    parameters: int,
    *,
    stage: int,
    bf16: bool,
    ranks: int,
    bucket: int = BUCKET,
    average: bool = False,
    trained: int | None = None,
) -> dict[str, int]:
    """Bytes on one GPU, whatever the batch, of DeepSpeed's ZeRO stages with AdamW, configured as in `ds_configs/`.

    Stage 0 keeps fp32 weights (bf16 by autocast). Stages 1 to 3 hold weights in bf16 (or fp32) and partition fp32
    masters and moments among the ranks. They accumulate gradients in fp32: whole at stage 1, partitioned at 2 and 3.
    Stage 3 also partitions the weights; the layers that it gathers at a time are counted as buffers. An average of the
    weights (EMA) is counted with the masters.

    Of the towers' `parameters`, those that are not `trained` (None: all are) have no gradients, masters or moments.
    `bucket` is the number of elements that are reduced at once.
    """
    compute = 2 if bf16 and stage > 0 else 4
    trained = parameters if trained is None else trained
    share, bucket = -(-trained // ranks), min(bucket, trained)
    if stage == 0:
        values = compute * parameters, 4 * trained, 4 * trained if average else 0, 8 * trained, 4 * bucket
    else:
        weights = compute * (-(-parameters // ranks) if stage == 3 else parameters)
        gradients = 4 * (trained if stage == 1 else share)
        reduced = 4 if stage == 1 else compute  # stage 1 reduces the fp32 accumulators
        values = weights, gradients, (8 if average else 4) * share, 8 * share, reduced * bucket
    return dict(zip(("weights", "gradients", "masters", "moments", "buffers"), values, strict=True))


def host_bytes(config: DataConfig, order: Order, *, ranks: int, image_size: int) -> tuple[int, int]:
    """One rank's host memory: encoded samples in its shuffle buffers, on average, and decoded batches kept ready."""
    layout, manifest = order.layout, order.mixture.manifest
    buffered = min(config.shuffle_buffer, layout.stream_length) / 2 * layout.streams / ranks
    local = layout.global_batch // ranks
    return round(buffered * manifest.bytes / manifest.n), (PREFETCH + SPARE) * local * 3 * image_size**2


@dataclass(frozen=True)
class RunPlan:
    """All estimates of a run."""

    architecture: Architecture
    gpus: int
    local_batch: int
    micro_batch: int
    stage: int
    """ZeRO stage of the recipe."""
    towers: TowerCosts
    memory: dict[int, dict[str, int]]
    """Bytes on one GPU by ZeRO stage: `engine_memory`, activations of one micro-batch, the objective's state."""
    objective: ObjectiveMemory
    stages: list[tuple[str, float]]
    """Description and FLOPs, as executed, of each stage; one without `schedule.stages`."""
    dataset_size: int
    data: Order | None
    """None if there is no manifest yet."""
    data_missing: str
    """Why `data` is None."""
    notes: tuple[str, ...]
    """What is unusual about the towers, the captions and stored features."""

    @property
    def flops(self) -> float:
        """Of the whole run, as executed, with recomputation."""
        return sum(flops for _, flops in self.stages)


def plan_run(run: RunConfig, *, gpus: int, dataset_size: int | None = None) -> RunPlan:
    """Plan a recipe for a number of GPUs, without using one; `dataset_size` counts while there is no manifest.

    Raises:
        UserError: recipe, GPUs and data do not fit together, or the size of the data is unknown.
    """
    if run.engine.device == "auto":  # on the machine that is planned for
        run = replace(run, engine=replace(run.engine, device="cuda"))
    check_run(run, world_size=gpus)
    check_captions_of(run)
    check_stages(run)
    towers, architecture, _ = measured_towers(run.model)
    data, missing = None, ""
    try:
        data = make_order(run.data, ranks=gpus, global_batch=run.batch_size, seed=0)
    except UserError as error:
        missing = str(error)
    dataset_size = data.layout.samples if data else dataset_size
    if dataset_size is None:
        raise UserError(f"{missing} To plan without the data, give --dataset-size SAMPLES.")
    make_layout(samples=dataset_size, global_batch=run.batch_size, streams=run.data.streams, ranks=gpus)
    engine = ENGINES[run.engine.name].facts(
        run.engine, optimizer=run.optimizer, global_batch=run.batch_size, world_size=gpus
    )
    local = run.batch_size // gpus
    micro = run.engine.rows(local)
    objective = build_objective(
        run.objective,
        dim=architecture.dim,
        batch_size=run.batch_size,
        dataset_size=dataset_size,
        steps_per_epoch=dataset_size // run.batch_size,
        total_steps=run.total_steps,
        world=World(size=gpus, device=META),
        device=META,
    ).memory()
    every = [measured_towers(stage.run.model) for stage in stages_of(run)]
    largest = max((measured for measured, _, _ in every), key=lambda measured: measured.saved_bytes)
    notes = [note for *_, notes in every for note in notes]
    notes += _stored_features(run, data)
    if captions := first_captions(run.data, count=run.batch_size):
        of, tokenize = f"the first {len(captions):,}", architecture.tokenize
        notes += caption_notes(tokenize(captions), tokenize=tokenize, of=of, masked=run.objective.mask_equal)
    return RunPlan(
        architecture=architecture,
        gpus=gpus,
        local_batch=local,
        micro_batch=micro,
        stage=engine.stage,
        towers=towers,
        memory={
            stage: {
                **engine_memory(
                    towers.parameters,
                    stage=stage,
                    bf16=engine.bf16,
                    ranks=gpus,
                    bucket=engine.bucket,
                    average=run.ema.decay is not None,
                    trained=towers.trained_parameters,
                ),
                "activations": activation_bytes(largest, micro_batch=micro, bf16=engine.bf16, autocast=stage == 0),
                "objective": objective.replicated,
            }
            for stage in range(4)
        },
        objective=objective,
        stages=stage_flops(run, accumulation=micro < local),
        dataset_size=dataset_size,
        data=data,
        data_missing=missing,
        notes=tuple(dict.fromkeys(notes)),
    )


def _stored_features(run: RunConfig, data: Order | None) -> Iterator[str]:
    """Notes on stored features that the run needs and that are not there yet.

    Raises:
        UserError: Those that are there do not fit the run.
    """
    named = run.data.stored_features
    for setting, folder in named.items():
        if not Path(folder).exists():
            yield f"{setting}={folder} is not there yet: {how_to_write(setting, folder)}"
    if data is not None:
        there = {setting: folder for setting, folder in named.items() if Path(folder).exists()}
        open_features(run.data, data.mixture.digests, named=there)


def stage_flops(run: RunConfig, *, accumulation: bool) -> list[tuple[str, float]]:
    """Description and FLOPs of each stage: a backward pass counts as two forward passes."""
    stages = []
    for stage in stages_of(run):
        towers, architecture, _ = measured_towers(stage.run.model)
        # GradCache computes features twice, checkpointing activations; a locked tower has no backward pass.
        trained, locked = 3 + accumulation + run.model.grad_checkpointing, 1 + accumulation
        image, text = (trained if learns else locked for learns in towers.trained)
        if run.data.image_features is not None:
            image = 0
        pair = image * towers.image_flops + text * towers.text_flops
        flops = pair * (stage.end - stage.first) * run.batch_size
        stages.append((stage.describe(image_size=architecture.image_size), flops))
    return stages


@functools.cache
def measured_towers(model: ModelConfig) -> tuple[TowerCosts, Architecture, tuple[str, ...]]:
    """An architecture, its costs, and what is unusual about it."""
    find_start(model.arch, model.pretrained)
    towers, architecture = build_towers(without_weights(model), seed=0, device="meta")
    text_batching(towers.clip, model, by_kernel=True)  # whatever the device
    length = min(model.text_tokens or architecture.context_length, architecture.context_length)
    costs = measure_towers(towers, image_size=architecture.image_size, context_length=length)
    return costs, architecture, towers.notes

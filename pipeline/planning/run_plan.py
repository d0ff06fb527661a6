"""The plan of a recipe (memory, time and data, without computing), and what a run says before its first step."""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pipeline.cores import usable_cores
from pipeline.data.loading.stored_features import how_to_write, open_features
from pipeline.data.order.canonical_order import Order, make_layout, make_order
from pipeline.data.shards.check_shards import caption_notes, first_captions
from pipeline.engine.engine_protocol import ENGINES
from pipeline.errors import UserError
from pipeline.metrics.mfu import TowerCosts, activation_bytes, measure_towers
from pipeline.model.architectures import Architecture
from pipeline.model.towers import ModelConfig, build_towers, check_start, text_batching, without_weights
from pipeline.objectives import ObjectiveMemory
from pipeline.planning.run_costs import EngineMemory, engine_memory, host_bytes, simulate_objective
from pipeline.training.build import check_stages
from pipeline.training.recipe import RunConfig, check_captions_of, check_run, stages_of

CORE_GFLOPS = 50.0
"""What a CPU core reaches in fp32, roughly."""
LONG_STEP = 60.0
"""Seconds of a step from which on a CPU is hardly what was meant."""


@dataclass(frozen=True)
class RunPlan:
    """All estimates of a run."""

    architecture: str
    gpus: int
    local_batch: int
    micro_batch: int
    stage: int
    """ZeRO stage of the recipe."""
    towers: TowerCosts
    engine: dict[int, EngineMemory]
    """Memory by ZeRO stage."""
    activations: dict[int, int]
    """Bytes of activations of one micro-batch by ZeRO stage: at 0, bf16 is autocast."""
    objective: ObjectiveMemory
    traffic: dict[str, int]
    """Calls and bytes of each collective of the objective in a step, as a rank contributes them."""
    stages: list[tuple[str, float]]
    """Description and FLOPs, as executed, of each stage; one without `schedule.stages`."""
    dataset_size: int
    data: Order | None
    """None if there is no manifest yet."""
    host: tuple[int, int]
    """Bytes of a rank's shuffle buffers and decoded batches, see `host_bytes`; with data."""
    data_missing: str
    """Why `data` is None."""
    notes: tuple[str, ...]
    """What is unusual about the towers, the captions and stored features."""

    @property
    def flops(self) -> float:
        """Of the whole run, as executed, with recomputation."""
        return sum(flops for _, flops in self.stages)

    def gpu_hours(self, *, peak_tflops: float, mfu: float) -> float:
        """Hours of one GPU that reaches the share `mfu` of its peak."""
        return self.flops / (peak_tflops * 1e12 * mfu) / 3600

    def gpu_bytes(self, stage: int) -> int:
        """Estimated bytes on one GPU at a ZeRO stage."""
        return self.engine[stage].total + self.activations[stage] + self.objective.replicated


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
    objective, traffic = simulate_objective(
        run.objective,
        dim=architecture.dim,
        batch_size=run.batch_size,
        ranks=gpus,
        dataset_size=dataset_size,
        steps_per_epoch=dataset_size // run.batch_size,
        total_steps=run.total_steps,
    )
    every = [measured_towers(stage.run.model) for stage in stages_of(run)]
    largest = max((measured for measured, _, _ in every), key=lambda measured: measured.saved_bytes)
    notes = [note for *_, notes in every for note in notes]
    notes += [*_stored_features(run, data), *_caption_notes(run, architecture)]
    return RunPlan(
        architecture=architecture.name,
        gpus=gpus,
        local_batch=local,
        micro_batch=micro,
        stage=engine.stage,
        towers=towers,
        engine={
            stage: engine_memory(
                towers.parameters,
                stage=stage,
                bf16=engine.bf16,
                ranks=gpus,
                bucket=engine.bucket,
                average=run.ema.decay is not None,
                trained=towers.trained_parameters,
            )
            for stage in range(4)
        },
        activations={
            stage: activation_bytes(largest, micro_batch=micro, bf16=engine.bf16, autocast=stage == 0)
            for stage in range(4)
        },
        objective=objective,
        traffic=traffic,
        stages=stage_flops(run, accumulation=micro < local),
        dataset_size=dataset_size,
        data=data,
        host=host_bytes(run.data, data, ranks=gpus, image_size=architecture.image_size) if data else (0, 0),
        data_missing=missing,
        notes=tuple(dict.fromkeys(notes)),
    )


def _caption_notes(run: RunConfig, architecture: Architecture) -> list[str]:
    """Notes on as many of the first captions as a batch has."""
    captions = first_captions(run.data, count=run.batch_size)
    if not captions:
        return []
    tokens, of = architecture.tokenize(captions), f"the first {len(captions):,}"
    return caption_notes(tokens, tokenize=architecture.tokenize, of=of, masked=run.objective.mask_equal)


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
    check_start(model)
    towers, architecture = build_towers(without_weights(model), seed=0, device="meta")
    text_batching(towers.clip, model)
    length = min(model.text_tokens or architecture.context_length, architecture.context_length)
    costs = measure_towers(towers, image_size=architecture.image_size, context_length=length)
    return costs, architecture, towers.notes


def start_lines(run: RunConfig, *, pairs: int | None, ranks: int, scaled: Mapping[str, str]) -> list[str]:
    """What a run says before its first step, and a warning where the device cannot be meant.

    `pairs` are those in the data (None: it is not there yet), and `scaled` the rates that `reference_batch` has
    changed, as `resolve_methods` gives them.

    Raises:
        UserError: There is no such architecture.
    """
    towers, architecture, _ = measured_towers(run.model)
    facts = ENGINES[run.engine.name].facts(
        run.engine, optimizer=run.optimizer, global_batch=run.batch_size, world_size=ranks
    )
    on_cpu = run.engine.device == "cpu" or not torch.cuda.is_available()
    device = "CPU" if on_cpu else torch.cuda.get_device_name()
    trained = towers.trained_parameters
    some = f", {trained / 1e6:,.1f}M of them trained" if trained < towers.parameters else ""
    was = f" = {scaled['optimizer.lr']}" if "optimizer.lr" in scaled else ""
    steps, output = run.total_steps, shlex.quote(run.output)
    board = f", or tensorboard --logdir {output}" if run.telemetry.tensorboard else ""
    lines = {
        "model": f"{architecture.name}, {towers.parameters / 1e6:,.1f}M parameters{some}; method {run.objective.name}",
        "data": f"{pairs:,} pairs" if pairs else "not there yet",
        "budget": (
            f"{_count(steps, 'step')} of batch_size={run.batch_size}"
            + (f" ({steps * run.batch_size / pairs:,.2f} times the data)" if pairs else "")
        ),
        "device": f"{device}, {_count(ranks, 'rank')}, {'bf16' if facts.bf16 else 'fp32'}",
        "learning rate": f"{run.optimizer.lr:g}{was}",
        "output": f"{run.output}; to look at it: neuclip report {output}{board}",
    }
    rows = [f"{label:<14} {text}" for label, text in lines.items()]
    if on_cpu:
        step = sum(flops for _, flops in stage_flops(run, accumulation=False)) / steps
        rows += _unlikely(step=step, ranks=ranks)
    return rows


def _unlikely(*, step: float, ranks: int) -> list[str]:
    """Warnings about a run on a CPU; `step` in FLOP."""
    cores, here = usable_cores(), int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    warnings = []
    if (seconds := step * here / ranks / (1e9 * CORE_GFLOPS * cores)) > LONG_STEP:
        warnings.append(
            f"WARNING: torch uses no GPU here: a step is {step / 1e12:,.1f} TFLOP, which takes {_count(cores, 'core')} "
            f"about {seconds / 60:,.0f} min. `neuclip doctor` says why a GPU is not seen."
        )
    if here > cores:
        warnings.append(
            f"WARNING: {here} ranks share {_count(cores, 'core')}, without a GPU: they only wait for each other. "
            f"Use --ranks {cores} at most."
        )
    return warnings


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"

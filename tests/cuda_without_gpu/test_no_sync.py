"""No method makes the host wait for the GPU in a step: every objective and every variant of its settings, on fake CUDA.

Values of fake tensors cannot be read: `.item()`, `bool()` and `nonzero` raise. Copies between devices are recorded, and
are an error unless they are asynchronous. What autograd trains is traced on the meta device.
"""

from __future__ import annotations

import inspect
import typing
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from pipeline.config import section
from pipeline.distributed.world import World
from pipeline.model.trimming import TextChunks
from pipeline.objectives import build_objective, objective_names, register
from pipeline.objectives.autograd import AutogradObjective
from pipeline.objectives.npn import kernels
from pipeline.objectives.npn.network import NPNS
from pipeline.objectives.pairwise import batch_keys
from pipeline.objectives.registry import OBJECTIVES, parse_objective
from pipeline.objectives.temperature import TemperatureConfig
from pipeline.training.step import Flags
from tests.cuda_without_gpu.kernel_trace import fake_gpu

RANKS, LOCAL, DIM, STEPS = 4, 8, 16, 3
SMALL = {"prototypes": 16, "inner_steps": 2, "restart_every": 2}
# Settings that a value of another one needs.
COMPANIONS: dict[tuple[str, Any], dict[str, Any]] = {
    ("npn", "mlp"): {"restart_every": 0},
    ("npn_schedule", "simultaneous"): {"inner_steps": 1},
    ("gamma_schedule", "cosine"): {"gamma_decay_epochs": 2},
}
SIZES = {
    "queue_longer_than_a_batch": {"name": "neuclip", "prototypes": 96},
    "growing_from_previous": {"name": "neuclip", "prototypes": 96, "restart_with": "previous"},
    "without_restarts": {"name": "neuclip", "restart_every": 0},
    "adam_divided": {"name": "neuclip", "npn_optimizer": "adam", "npn_update": "prototypes"},
    "compiled_replicated": {"name": "neuclip", "npn_compile": True, "npn_update": "replicated"},
    "mlp_simultaneous": {"name": "neuclip", "npn": "mlp", "restart_every": 0, "npn_schedule": "simultaneous",
                         "inner_steps": 1},
    "mlp_through_alpha": {"name": "neuclip", "npn": "mlp", "restart_every": 0, "stop_gradient": False},
}  # fmt: skip


def variants():
    """Every method with its defaults, and with each other value of each setting that has a list of values.

    A setting that several methods inherit is varied for the first of them.
    """
    found: dict[str, dict[str, Any]] = dict(SIZES)
    varied = set[tuple[type, str]]()
    for name in objective_names():
        config = parse_objective({"name": name})
        hints = typing.get_type_hints(type(config))
        found[name] = {"name": name}
        for field, hint in hints.items():
            origin = next(base for base in reversed(type(config).__mro__) if field in inspect.get_annotations(base))
            if (origin, field) in varied:
                continue
            varied.add((origin, field))
            values = (True, False) if hint is bool else typing.get_args(hint)
            values = values if hint is bool or typing.get_origin(hint) is Literal else ()
            if (name, field) == ("neuclip", "npn"):
                values = NPNS.names()
            for value in values:
                if value != getattr(config, field):
                    given = {"name": name, field: value, **COMPANIONS.get((field, value), {})}
                    found[f"{name}-{field}={value}"] = given
    return found


VARIANTS = variants()


@pytest.fixture(autouse=True)
def four_ranks(monkeypatch):
    monkeypatch.setattr(kernels, "_compiled", lambda formula, *arguments: formula(*arguments))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def small(settings):
    return {**(SMALL if settings["name"].startswith("neuclip") else {}), **settings}


def keys_of(settings, ids):
    return ids[:, None] if settings.get("mask_equal") else None


def uses_autograd(settings):
    """Whether a step runs the autograd engine, which asks the CUDA driver for streams; found by a step on the CPU."""
    objective = build_objective(
        small(settings), dim=DIM, batch_size=LOCAL, dataset_size=10**4, total_steps=8, world=World()
    )
    with mock.patch("torch.autograd._engine_run_backward", wraps=torch.autograd._engine_run_backward) as engine:
        ids = torch.arange(LOCAL)
        objective.compute(*torch.randn(2, LOCAL, DIM), sample_ids=ids, keys=keys_of(settings, ids))
    return engine.called


def trace(settings):
    """What some steps would run on a GPU."""
    device = torch.device("meta") if uses_autograd(settings) else torch.device("cuda", 0)
    world = World(rank=0, size=RANKS, device=device)
    with fake_gpu(device.type) as found:
        objective = build_objective(
            small(settings), dim=DIM, batch_size=RANKS * LOCAL, dataset_size=10**4,
            steps_per_epoch=2, total_steps=8, world=world, device=device,
        )  # fmt: skip
        image, text = (torch.randn(LOCAL, DIM, device=device) for _ in range(2))
        ids = torch.zeros(LOCAL, dtype=torch.int64, device=device)
        found.kernels.clear()
        found.blocking_copies.clear()
        found.collectives.clear()
        for step in range(STEPS):  # with the first batch, restarts, and the begin of an epoch
            objective.prefetch(ids)
            given = {"sample_ids": ids, "keys": keys_of(settings, ids)}
            objective.compute(image, text, **given)
            if step == 1:
                objective.discard()
                objective.compute(image, text, **given)
            objective.commit(lr_scale=0.5)
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_never_waits_for_the_gpu(name):
    settings = VARIANTS[name]
    found = trace(settings)
    assert found.blocking_copies == []
    assert len(found.collectives) > 2 * STEPS
    assert {device for _, device, _ in found.collectives} == {found.device}, "NCCL takes no tensors of the host"
    precisions = {torch.float32, torch.float64, torch.int64}  # float64: `Division`, whose sums overflow fp32
    assert {dtype for *_, dtype in found.collectives} <= precisions
    assert len(found.kernels) > 20
    has_table = hasattr(parse_objective(settings), "gamma")
    assert (found.waits > 0) == has_table, "only tables wait: for copies that began a step earlier"


@section
class ToyConfig(TemperatureConfig):
    name: str = "toy_autograd"


def test_a_method_outside_the_package_that_uses_autograd_never_waits(monkeypatch):
    monkeypatch.setattr(OBJECTIVES, "registered", dict(OBJECTIVES.registered))

    @register("toy_autograd", ToyConfig)
    class Toy(AutogradObjective):
        def batch_loss(self, image, text, *, tau):
            return -((image @ text.T) / tau).log_softmax(1).diagonal().mean()

    assert uses_autograd({"name": "toy_autograd"})
    assert not uses_autograd({"name": "openclip"})
    found = trace({"name": "toy_autograd"})
    assert found.blocking_copies == []
    assert found.waits == 0


def test_every_npn_variant_is_among_them():
    of_npn = {"neuclip-npn=mlp", "neuclip-npn=queue", "neuclip-npn_update=replicated", "neuclip-npn_update=prototypes"}
    assert {*of_npn, "amorlip", "siglip", "neuclip_literal"} <= VARIANTS.keys()


WAITS = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x[0, 0]),
    "bool": lambda x: bool((x > 0).all()),
    "tolist": lambda x: x.tolist(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: torch.ones(3).to(x.device),
    "to_unpinned": lambda x: torch.ones(3).to(x.device, non_blocking=True),
    "copy": lambda x: torch.ones(2, 3).copy_(x),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_is_found_and_asynchronous_copies_are_not(name):
    with fake_gpu() as found:
        x = torch.randn(2, 3, device="cuda")
        torch.ones(2, 3).pin_memory().to("cuda", non_blocking=True)
        torch.empty(2, 3, pin_memory=True).copy_(x, non_blocking=True)
        x.mul_(torch.tensor(2.0)).add_(1.0)
        assert found.blocking_copies == []
        try:
            WAITS[name](x)
        except (RuntimeError, NotImplementedError):
            return
    assert len(found.blocking_copies) == 1


@pytest.mark.parametrize("packed", [False, True])
def test_a_micro_batchs_texts_are_chosen_without_waiting(packed):
    text, lengths = torch.ones(8, 16, dtype=torch.int64), torch.tensor([16, 3, 9, 4, 5, 12, 7, 8])
    rows, device = [slice(0, 4), slice(4, 8)], torch.device("cuda")
    with fake_gpu() as found:
        text = text if packed else torch.ones(8, 16, dtype=torch.int64, device=device)
        chunks = TextChunks(text, rows, lengths=lengths, packed=packed, by_kernel=True, device=device)
        tokens = [chunks.tokens(index) for index in range(2)]
    assert found.blocking_copies == []
    assert len(tokens) == 2


def test_keys_of_equal_pairs_are_made_without_waiting():
    text = torch.ones(8, 16, dtype=torch.int64)
    with fake_gpu() as found:
        ids, pixels = torch.zeros(8, dtype=torch.int64, device="cuda"), torch.zeros(8, 3, 2, 2, device="cuda")
        batch_keys(text, ids, pixels)  # copies the multipliers for rows of this length, once
        found.blocking_copies.clear()
        assert batch_keys(text, ids, pixels).shape == (8, 3)
    assert found.blocking_copies == []


def test_flags_are_copied_to_the_host_without_waiting():
    with fake_gpu() as found:
        flags = Flags(torch.ones((), device="cuda"), True, world=World())
        assert (found.blocking_copies, found.waits) == ([], 0)
        assert len(flags.read()) == 2
    assert (found.blocking_copies, found.waits) == ([], 1), "for the event of the copy, not for the device"

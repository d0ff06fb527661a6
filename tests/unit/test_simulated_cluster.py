"""Every shipped recipe on up to 1,024 ranks that do not exist: layouts, memory per rank, and bytes of collectives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.objectives import build_objective, parts
from pipeline.planning.run_plan import SimulatedRanks, measured_towers, plan_run, simulate_objective
from pipeline.training.recipe import RunConfig, load_recipe

FOLDER = Path(__file__).parents[2] / "jobs" / "recipes"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.yaml") if not path.stem.endswith("-fast"))
"""Those in stages (-fast) are laid out as the recipes that they extend."""
LARGE = ("cc12m", "dfn14m", "dfn192m", "dfn1b", "laion315m")
"""At least ten million samples: these must run on both of these numbers of ranks."""
SIZES = (8, 1024)
SAMPLES = 10_000_000
META = torch.device("meta")
pytestmark = pytest.mark.filterwarnings("ignore:objective.npn_lr")


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    """A process group of that many ranks, all but one of which do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


def sent(run: RunConfig, ranks: int) -> tuple[int, int]:
    """Calls and bytes of the objective's collectives in a step, of one rank."""
    facts = {"dataset_size": SAMPLES, "steps_per_epoch": SAMPLES // run.batch_size, "total_steps": run.total_steps}
    dim = measured_towers(run.model)[1].dim
    _, traffic = simulate_objective(run.objective, dim=dim, batch_size=run.batch_size, ranks=ranks, **facts)
    return tuple(sum(n for name, n in traffic.items() if name.endswith(what)) for what in (".calls", ".bytes"))


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_laid_out_on_simulated_clusters(name):
    run = load_recipe(str(Path("jobs/recipes") / f"{name}.yaml"), (), dataset_size=SAMPLES)
    for size in SIZES:
        if name not in LARGE and (run.batch_size % size or run.data.streams % size):
            with pytest.raises(UserError, match=f"{size} ranks"):
                plan_run(run, gpus=size, dataset_size=SAMPLES)
            continue
        plan = plan_run(run, gpus=size, dataset_size=SAMPLES)
        assert plan.local_batch * size == run.batch_size
        assert run.data.streams % size == 0
        assert plan.gpu_bytes(plan.stage) < 80 * 2**30
        assert sent(run, size)[1] < 0.2 * 4 * plan.towers.trained_parameters, "less than a fifth of the gradients"
        if size == 8:
            smaller = plan
            continue
        assert plan.gpu_bytes(plan.stage) < smaller.gpu_bytes(plan.stage)
        assert plan.objective.replicated <= smaller.objective.replicated
        (calls, shrunk), (usual, whole) = sent(run, size), sent(run, 8)
        assert calls == usual
        assert shrunk <= whole, "a rank's share of the features shrinks"


OBJECTIVES = {
    "openclip": {"name": "openclip"},
    "siglip": {"name": "siglip"},
    "fastclip_v3": {"name": "fastclip_v3"},
    "isogclr": {"name": "isogclr"},
    "amorlip": {"name": "amorlip"},
    "prototypes": {"name": "neuclip", "prototypes": 2048},
    "replicated": {"name": "neuclip", "prototypes": 2048, "npn_update": "replicated"},
    "mlp": {"name": "neuclip", "npn": "mlp", "restart_every": 0},
}
BATCH, DIM, SAMPLES, INNER = 2048, 32, 10**9, 10
FACTS = {"dataset_size": SAMPLES, "steps_per_epoch": SAMPLES // BATCH, "total_steps": 10**6}


def by_hand(name: str, ranks: int) -> int:
    """Bytes that a rank contributes to the collectives of a step."""
    b = BATCH // ranks
    features, scalars = 2 * b * DIM * 4, 5 * b * 4  # both sides; s_ii, log g and mean h
    table = {"fastclip_v3": 2, "isogclr": 9}
    further = {
        # Sums in fp64, for each update and the last prediction; a metric.
        "prototypes": 2 * (INNER + 1) * BATCH * 8 + 4,
        **{method: 8 * b + 4 * columns * BATCH for method, columns in table.items()},  # ids and rows
    }
    return features + scalars + further.get(name, 0)


@pytest.mark.parametrize("ranks", SIZES, indirect=True)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_bytes_of_collectives_are_those_of_the_real_ones(name, ranks):
    """The plan's simulated ranks, torch's own collectives in a fake process group, and a calculation by hand agree."""
    _, traffic = simulate_objective(OBJECTIVES[name], dim=DIM, batch_size=BATCH, ranks=ranks, **FACTS)
    world = World(size=ranks, device=META)
    objective = build_objective(OBJECTIVES[name], dim=DIM, batch_size=BATCH, world=world, device=META, **FACTS)
    image, text = (torch.empty(BATCH // ranks, DIM, device=META) for _ in range(2))
    for _ in range(2):
        world.traffic.clear()
        output = objective.compute(image, text, sample_ids=torch.empty(BATCH // ranks, dtype=torch.int64, device=META))
        objective.commit()
    assert output.grad_image.shape == image.shape
    assert traffic == dict(world.traffic)
    total = sum(count for key, count in traffic.items() if key.endswith("bytes"))
    if name != "siglip":
        assert total == by_hand(name, ranks)


def test_comparisons_of_the_ranks_state_do_not_stop_the_simulation(monkeypatch):
    _, without = simulate_objective(OBJECTIVES["prototypes"], dim=DIM, batch_size=BATCH, ranks=8, **FACTS)
    for every in (1, 2):
        monkeypatch.setattr(parts, "DRIFT_CHECK_EVERY", every)
        _, found = simulate_objective(OBJECTIVES["prototypes"], dim=DIM, batch_size=BATCH, ranks=8, **FACTS)
        assert found == without


def test_a_rank_keeps_its_share_of_the_prototypes_and_of_the_rows():
    def memory(ranks: int, settings: dict[str, object]) -> tuple[int, float]:
        found, _ = simulate_objective(settings, dim=DIM, batch_size=BATCH, ranks=ranks, **FACTS)
        return found.replicated, found.per_sample

    one, many = (memory(size, OBJECTIVES["prototypes"])[0] for size in (1, 64))
    prototypes = 2 * 2 * 2048 * DIM * 4  # both sides, with the optimizer's accumulator
    assert one - many == prototypes - prototypes // 64
    assert memory(64, OBJECTIVES["replicated"])[0] == one
    world = SimulatedRanks(size=64, device=META)
    table = build_objective(OBJECTIVES["isogclr"], dim=DIM, batch_size=BATCH, world=world, device=META, **FACTS).table
    assert table.values.nbytes == pytest.approx(memory(64, OBJECTIVES["isogclr"])[1] * SAMPLES / 64, rel=1e-6)

"""Every shipped recipe on up to 1,024 ranks that do not exist: layouts, memory per rank, and bytes of collectives."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.objectives import build_objective
from pipeline.planning.run_plan import measured_towers, plan_run
from pipeline.training.recipe import load_recipe

FOLDER = Path(__file__).parents[2] / "jobs" / "recipes"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.yaml") if not path.stem.endswith("-fast"))
"""Those in stages (-fast) are laid out as the recipes that they extend."""
LARGE = ("cc12m", "dfn14m", "dfn192m", "dfn1b", "laion315m")
"""At least ten million samples: these must run on both of these numbers of ranks."""
SIZES = (8, 1024)
SAMPLES = 10_000_000
META = torch.device("meta")
pytestmark = pytest.mark.filterwarnings("ignore:objective.npn_lr")


def sent(config, *, ranks, dim, batch_size, **facts):
    """`World.traffic` of an objective's second step, in a process group whose other ranks do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        world, local = World(size=ranks, device=META), batch_size // ranks
        objective = build_objective(config, dim=dim, batch_size=batch_size, world=world, device=META, **facts)
        image, text = (torch.empty(local, dim, device=META) for _ in range(2))
        for _ in range(2):
            world.traffic.clear()
            output = objective.compute(image, text, sample_ids=torch.empty(local, dtype=torch.int64, device=META))
            objective.commit()
        assert output.grad_image.shape == image.shape
        return dict(world.traffic)
    finally:
        dist.destroy_process_group()


def total(traffic, what):
    return sum(count for name, count in traffic.items() if name.endswith(what))


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_laid_out_on_simulated_clusters(name):
    run = load_recipe(str(Path("jobs/recipes") / f"{name}.yaml"), (), dataset_size=SAMPLES)
    facts = {"dataset_size": SAMPLES, "steps_per_epoch": SAMPLES // run.batch_size, "total_steps": run.total_steps}
    facts |= {"dim": measured_towers(run.model)[1].dim, "batch_size": run.batch_size}
    for size in SIZES:
        if name not in LARGE and (run.batch_size % size or run.data.streams % size):
            with pytest.raises(UserError, match=f"{size} ranks"):
                plan_run(run, gpus=size, dataset_size=SAMPLES)
            continue
        plan = plan_run(run, gpus=size, dataset_size=SAMPLES)
        assert plan.local_batch * size == run.batch_size
        assert run.data.streams % size == 0
        assert sum(plan.memory[plan.stage].values()) < 80 * 2**30
        traffic = sent(run.objective, ranks=size, **facts)
        assert total(traffic, ".bytes") < 0.2 * 4 * plan.towers.trained_parameters, "less than a fifth of the gradients"
        if size == 8:
            smaller, usual = plan, traffic
            continue
        assert sum(plan.memory[plan.stage].values()) < sum(smaller.memory[plan.stage].values())
        assert plan.objective.replicated <= smaller.objective.replicated
        assert total(traffic, ".calls") == total(usual, ".calls")
        assert total(traffic, ".bytes") <= total(usual, ".bytes"), "a rank's share of the features shrinks"


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


def by_hand(name, ranks):
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


@pytest.mark.parametrize("name", OBJECTIVES)
def test_bytes_of_collectives_are_those_by_hand(name):
    for ranks in SIZES:
        traffic = sent(OBJECTIVES[name], ranks=ranks, dim=DIM, batch_size=BATCH, **FACTS)
        assert name == "siglip" or total(traffic, ".bytes") == by_hand(name, ranks)


def test_a_rank_keeps_its_share_of_the_prototypes_and_of_the_rows():
    def built(ranks, name):
        world = World(size=ranks, device=META)
        return build_objective(OBJECTIVES[name], dim=DIM, batch_size=BATCH, world=world, device=META, **FACTS)

    one, many = (built(size, "prototypes").memory().replicated for size in (1, 64))
    prototypes = 2 * 2 * 2048 * DIM * 4  # both sides, with the optimizer's accumulator
    assert one - many == prototypes - prototypes // 64
    assert built(64, "replicated").memory().replicated == one
    table = built(64, "isogclr")
    assert table.table.values.nbytes == pytest.approx(table.memory().per_sample * SAMPLES / 64, rel=1e-6)

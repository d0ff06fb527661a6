"""The fingerprint that ranks use to compare their replicas."""

import pytest
import torch

from pipeline.objectives import build_objective, objective_names
from pipeline.objectives.drift import fingerprint
from tests.unit.objectives_reference import context, unit_features

CPU = torch.device("cpu")


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "weight": torch.randn(3, 4, generator=generator),
        "double": torch.randn(5, generator=generator, dtype=torch.float64),
        "low": torch.randn(3, generator=generator).bfloat16(),
        "count": torch.tensor(7),
        "empty": torch.zeros(0, 3),
    }


def test_the_hash_is_of_bits_and_positions_and_leaves_tensors_as_they_are():
    one, other = tensors(), tensors()
    reference = fingerprint(one, device=CPU)
    assert reference == fingerprint(other, device=CPU) == fingerprint(one, device=CPU)
    assert all(torch.equal(one[name], other[name]) for name in one)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    for name in ("weight", "double", "low", "count"):
        for place in range(one[name].numel()):
            changed = tensors()
            changed[name].flatten().view(bits[changed[name].element_size()])[place] ^= 1
            assert fingerprint(changed, device=CPU) != reference, (name, place)
    other["weight"] = other["weight"].flip(0)
    assert fingerprint(other, device=CPU) != reference


@pytest.mark.parametrize("name", objective_names())
@pytest.mark.filterwarnings("ignore:objective.npn_lr")
def test_all_replicated_state_is_compared(name, monkeypatch):
    objective = build_objective(name, context=context(8))
    seen: list[set[str]] = []
    monkeypatch.setattr(objective.drift, "every", 1)  # as if there were other ranks
    monkeypatch.setattr(objective.drift, "check", lambda state, step: seen.append(set(state)))
    objective.compute(*unit_features(8), sample_ids=torch.arange(8))
    objective.commit()
    assert seen == [set(objective.state_dict()) - {"steps"}]

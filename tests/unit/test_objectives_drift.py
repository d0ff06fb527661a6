"""The fingerprint that ranks use to compare their replicas."""

from __future__ import annotations

import pytest
import torch

from pipeline.objectives import build_objective, objective_names
from pipeline.objectives.parts import fingerprint
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


def test_equal_bits_give_equal_hashes_and_tensors_are_not_modified():
    one, other = tensors(), tensors()
    assert fingerprint(one, device=CPU) == fingerprint(other, device=CPU) == fingerprint(one, device=CPU)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", ["weight", "double", "low", "count"])
def test_one_flipped_bit_anywhere_changes_the_hash(name):
    reference = fingerprint(tensors(), device=CPU)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    for place in range(tensors()[name].numel()):
        changed = tensors()
        changed[name].flatten().view(bits[changed[name].element_size()])[place] ^= 1
        assert fingerprint(changed, device=CPU) != reference


def test_the_hash_depends_on_the_order_of_values():
    swapped = tensors()
    swapped["weight"] = swapped["weight"].flip(0)
    assert fingerprint(swapped, device=CPU) != fingerprint(tensors(), device=CPU)


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

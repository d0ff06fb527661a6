"""`neuclip_plus` equals its equations over several steps: a queue of earlier features, pooled with the batch."""

import math

import pytest
import torch

from pipeline.objectives import build_objective
from tests.unit.objectives_reference import context, relative_error, unit_features

BATCH, PROTOTYPES, EPS, SAMPLES = 6, 16, 1e-3, 11


def ids_of(step):
    """Most samples of a batch are still in the queue from their last visit, some of them twice."""
    return torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(step))[:BATCH]


def normalizers(anchors, partners, earlier, ids, tau):
    """exp(alpha) of the methods page, [B]; earlier: sample ids and [d] features of the partners' side."""
    values = []
    for i in range(len(anchors)):
        own = float(anchors[i] @ partners[i])
        batch = [math.exp((float(anchors[i] @ partners[j]) - own) / tau) for j in range(len(anchors)) if j != i]
        queue = [math.exp((float(anchors[i] @ w) - own) / tau) for sample, w in earlier if sample != ids[i]]
        values.append(EPS + (sum(queue) + sum(batch)) / (len(queue) + len(batch)))
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(("cap", "power"), [(0, 1.0), (2.0, 1.0), (0, 0.25), (2.0, 0.75)])
def test_losses_and_gradients_equal_the_equations(cap, power):
    settings = {"name": "neuclip_plus", "prototypes": PROTOTYPES, "eps": EPS, "ratio_cap": cap, "ratio_power": power}
    objective = build_objective({**settings, "tau_lr": 0.0, "rho": 1.5, "tau_init": 0.2}, context=context(BATCH))
    history: list[tuple[torch.Tensor, torch.Tensor]] = []
    seen: list[int] = []
    for step in range(6):
        image, text = (f.requires_grad_() for f in unit_features(BATCH, seed=step))
        ids = ids_of(step)
        output = objective.compute(image.detach(), text.detach(), sample_ids=ids)
        loss = torch.zeros((), dtype=torch.float64)
        for a, b, side in ((image, text, 1), (text, image, 0)):
            past = torch.cat([pair[side] for pair in history])[-PROTOTYPES:] if history else torch.empty(0)
            earlier = list(zip(seen[-PROTOTYPES:], past, strict=True))
            similarity = a @ b.T
            h = (similarity - similarity.diagonal()[:, None]) / 0.2
            g = h.exp().masked_fill(torch.eye(BATCH, dtype=torch.bool), 0).sum(1) / (BATCH - 1)
            alpha = normalizers(a.detach(), b.detach(), earlier, ids.tolist(), 0.2).log()
            alpha = power * alpha + (1 - power) * (EPS + g.detach()).log()
            if cap:
                alpha = torch.maximum(alpha, (EPS + g.detach()).log() - math.log(cap))
            loss = loss + 0.2 * ((EPS + g) * (-alpha).exp() + alpha).mean()
        loss = loss + 2 * 0.2 * 0.5
        loss.backward()
        assert relative_error(output.loss, loss) < 1e-9, step
        assert relative_error(output.grad_image, image.grad) < 1e-8, step
        assert relative_error(output.grad_text, text.grad) < 1e-8, step
        assert float(output.metrics["ratio_max"]) <= (cap or (PROTOTYPES + BATCH) / (BATCH - 1)) * (1 + 1e-9)
        objective.commit()
        history.append((image.detach(), text.detach()))
        seen += ids.tolist()


@pytest.mark.parametrize("given", [True, False], ids=["ids", "no ids"])
def test_a_first_step_has_the_batch_s_own_normalizers(given):
    objective = build_objective({"name": "neuclip_plus", "prototypes": 64}, context=context(BATCH, dataset_size=400))
    batch_gcl = build_objective({"name": "neuclip", "npn": "queue", "tau_init": 0.07}, context=context(BATCH))
    image, text = unit_features(BATCH)
    ids = torch.arange(BATCH) if given else None
    found = objective.loss(image, text, sample_ids=ids)
    estimates = batch_gcl._gather((image, text), torch.arange(BATCH)).log_g
    tau, expected = 0.07, sum(float((1 + log_g).mean()) for log_g in estimates)
    assert float(found) == pytest.approx(tau * (expected + 2 * (2.5 - 1)), rel=1e-12)


def test_without_ids_only_the_batch_itself_is_known(caplog):
    """Unknown samples are all different, also over steps: nothing is excluded by mistake."""
    objective = build_objective({"name": "neuclip_plus", "prototypes": 18}, context=context(BATCH, dataset_size=36))
    for step in range(4):
        objective.loss(*unit_features(BATCH, seed=step))
        objective.commit()
    ids = objective.npn.queue.ids.tolist()
    assert len(set(ids)) == len(ids) == 18
    assert max(ids) < 0
    assert not caplog.records


@pytest.mark.parametrize(("samples", "warns"), [(31, True), (32, False), (0, False)])
def test_a_queue_of_more_than_half_of_the_dataset_is_reported(samples, warns, caplog):
    build_objective(
        {"name": "neuclip_plus", "prototypes": 16, "rho": 1.0}, context=context(BATCH, dataset_size=samples)
    )
    assert [("more than half of the dataset" in record.getMessage()) for record in caplog.records] == [True] * warns

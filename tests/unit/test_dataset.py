"""`neuclip.dataset`: the trainer's samples in loops of others, also open_clip's own, killed and resumed."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace
from typing import Any

import open_clip
import pytest
import torch
import webdataset
from torch.utils.data import DataLoader

import neuclip
from pipeline.data.order.canonical_order import default_streams
from pipeline.errors import UserError
from tests.shards import count_tokens, open_loader, write_shards
from tests.towers import TINY

BATCH, STEPS = 8, 6
SETTINGS: dict[str, Any] = {"streams": 4, "shuffle_buffer": 10, "workers": 0}
MEAN_STD = ((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    write_shards(folder, [20, 17, 14])
    return folder


def make(folder, **changes):
    options: dict[str, Any] = {"batch_size": BATCH, "image_size": 16, "seed": 3, "tokenize": count_tokens, **SETTINGS}
    return neuclip.dataset(str(folder), **{**options, **changes})


def expected(folder, batches):
    with open_loader(folder, batch=BATCH, **SETTINGS) as loader:
        return [(batch.image.clone(), batch.sample_id.clone()) for batch in itertools.islice(loader, batches)]


WAYS: dict[str, Any] = {
    "itself": lambda data: data,
    "DataLoader": lambda data: DataLoader(data, batch_size=None, num_workers=0),
    "DataPipeline": lambda data: webdataset.DataPipeline(data, webdataset.map(lambda rows: rows)),
}


@pytest.mark.parametrize(("ranks", "through"), [(4, "itself"), (2, "DataLoader"), (1, "DataPipeline")])
def test_every_loop_sees_what_the_trainer_sees(folder, ranks, through):
    trained = expected(folder, STEPS)
    found = [list(WAYS[through](make(folder, rank=rank, ranks=ranks))) for rank in range(ranks)]
    assert [len(rows) for rows in found] == [STEPS] * ranks
    for step, (image, ids) in enumerate(trained):
        assert torch.equal(torch.cat([rows[step][2] for rows in found]), ids)
        assert torch.equal(torch.cat([rows[step][0] for rows in found]), image)


def test_a_state_continues_on_another_number_of_ranks_and_workers(folder):
    trained = expected(folder, 2 * STEPS)
    one = make(folder)
    seen = [rows[2] for rows in itertools.islice(one, 4)]
    state = one.state_dict()
    assert state == copy.deepcopy(state)
    pair = [make(folder, rank=rank, ranks=2, workers=1) for rank in range(2)]
    for part in pair:
        part.load_state_dict(state)
    for _ in range(2):  # the rest of this epoch, and the next
        seen += [torch.cat([rows[2] for rows in step]) for step in zip(*pair, strict=True)]
    for part in pair:
        part.close()
    assert len(one) == STEPS
    assert torch.equal(torch.stack(seen), torch.stack([ids for _, ids in trained]))


def test_what_does_not_fit_is_refused(folder):
    for number in (1,):
        with pytest.raises(UserError, match=rf"num_workers={number} .* `workers` of neuclip.dataset"):
            list(DataLoader(make(folder), batch_size=None, num_workers=number))
    with pytest.raises(UserError, match="There is no manifest at"):
        make(folder / "nowhere")
    assert make(folder, streams="auto").state_dict() == make(folder, streams=default_streams(BATCH)).state_dict()
    for changes, words in (
        ({"batch_size": 0}, "batch_size = 0: should be greater than or equal to 1"),
        ({"ranks": 2.5}, "ranks = 2.5: should be a valid integer"),
        ({"seed": 2**63}, rf"seed = {2**63}: should be less than"),
        ({"normalization": (0.5, 0.5)}, "normalization.0 = 0.5: should be a valid tuple"),
        ({"normalization": ((0, 0, 0), (1, 0, 1))}, "normalization.1.1 = 0: should be greater than 0"),
        ({"tokenize": None}, "tokenize = None must be callable"),
        ({"rank": 2, "ranks": 2}, "rank = 2 must be below ranks = 2"),
        ({"streems": 2}, "Unknown key data.streems.*nearest valid key is data.streams"),
        ({"sources": "x"}, "sources: give the folder, or a list of them, as the first argument"),
        ({"batch_size": 4000}, "fewer than the global batch of 4000"),
        (
            {"caption": "json:captoins"},
            r"'json:captoins' is in none of the first samples .* Allowed: json, json:url, txt",
        ),
    ):
        with pytest.raises(UserError, match=words):
            make(folder, **changes)
    one = make(folder)
    next(iter(one))
    state = one.state_dict()
    for wrong, words in (
        ({"epoch": 1}, r"This is not what state_dict\(\) returned \(KeyError: 'order'\)"),
        ({**state, "batch": "1"}, r"This is not what state_dict\(\) returned"),
        ({**state, "batch": 7}, "computes another order"),
        ({**state, "epoch": -1, "batch": 0, "proof": ""}, "computes another order"),
        ({**state, "order": {**state["order"], "data.replacement": True}}, "data.replacement was True, now False"),
    ):
        with pytest.raises(UserError, match=words):
            make(folder).load_state_dict(wrong)
    with pytest.raises(UserError, match=r"data order cannot be continued: .*seed was 3, now 4"):
        make(folder, seed=4).load_state_dict(one.state_dict())


def test_a_list_of_folders_is_a_mixture(folder):
    options: dict[str, Any] = {"batch_size": BATCH, "image_size": 16, "tokenize": count_tokens, **SETTINGS}
    assert len(neuclip.dataset(folder, **options)) == STEPS
    assert len(neuclip.dataset([{"manifest": str(folder), "weight": 2}], **options)) == 2 * STEPS
    with pytest.raises(UserError, match="a manifest is listed twice"):
        neuclip.dataset([str(folder), str(folder)], **options)


class ForOpenClip:
    """The attributes that open_clip's trainer reads from its loader."""

    def __init__(self, data, batches):
        self.pipeline = webdataset.DataPipeline(data, webdataset.map(lambda rows: rows[:2]))
        self.num_batches, self.num_samples, self._batches = STEPS, BATCH * STEPS, batches

    def __iter__(self):
        return itertools.islice(self.pipeline, self._batches)


def open_clips_training(data, state=None, batches=STEPS):
    """Train a small model with open_clip's own loop; return its state dicts."""
    from open_clip_train.train import train_one_epoch

    torch.manual_seed(0)
    model = open_clip.model.CLIP(**copy.deepcopy(TINY), output_dict=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if state is not None:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
    args = SimpleNamespace(
        device="cpu", precision="fp32", distill=False, accum_freq=1, skip_scheduler=True, grad_clip_norm=None,
        horovod=False, rank=0, local_rank=0, log_local=False, log_every_n_steps=10**9, batch_size=BATCH, world_size=1,
        wandb=False,
    )  # fmt: skip
    source = {"train": SimpleNamespace(dataloader=ForOpenClip(data, batches), set_epoch=lambda _: None)}
    train_one_epoch(model, source, open_clip.ClipLoss(), 0, optimizer, None, None, None, args)
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def test_open_clips_own_trainer_stopped_and_resumed_ends_with_the_same_bits(folder):
    def made():
        return make(folder, tokenize=few_tokens, normalization=MEAN_STD)

    whole, first, again = open_clips_training(made()), made(), made()
    halfway = open_clips_training(first, batches=3)
    again.load_state_dict(first.state_dict())
    resumed = open_clips_training(again, state=halfway)
    assert not torch.equal(halfway[0]["visual.proj"], whole[0]["visual.proj"])
    assert all(torch.equal(resumed[0][name], value) for name, value in whole[0].items())


def few_tokens(texts):
    """Tokens of the small architecture."""
    return torch.tensor([[49406, int(text.rpartition(" ")[2]) + 1, 49407, *[0] * 5] for text in texts])

"""The cached tokenizer returns the same token ids as open_clip, for clean captions and for messy web text."""

import pickle
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.loading.decode import fast_tokenizer
from pipeline.model.architectures import build_tokenizer

PIECES = [
    "photo", "of", "a", "Dog's", "don't", "I'LL", "N°5", "naïve", "ΣΑΣ", "&amp;", "&amp;amp;lt;b&gt;", "\x07x", "12345",
    "$$$!!", "<start_of_text>", "<END_OF_TEXT>", "<start_of_text>a", "日本語", "😀", "\u200b", "\x1c", "a\x0bb",
    "ß", "İ", " \n", "…", "“q”", "''s", "_", "a" * 50, "Å", "ſ", "'ſ", "schÃ¶n", "\x1b[31mred", "", "\xa0", "...",
    "http://a.b/c?d=1&e=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def pair():
    import open_clip

    reference = open_clip.get_tokenizer("ViT-B-32")
    return reference, fast_tokenizer(reference)


def test_awkward_captions(pair):
    reference, fast = pair
    rng = random.Random(0)
    captions = [
        rng.choice([" ", "", "  "]).join(rng.choices(PIECES, k=rng.randint(0, 90 if i % 10 == 0 else 12)))
        for i in range(3000)
    ]
    assert torch.equal(reference(captions), fast(captions))


@settings(max_examples=600, deadline=None, derandomize=True)
@given(caption=st.text(max_size=60) | st.text(st.characters(codec="ascii"), max_size=60))
def test_any_text(pair, caption):
    reference, fast = pair
    assert torch.equal(reference([caption]), fast([caption]))


@pytest.mark.parametrize("context_length", [2, 3, 8, 16])
def test_other_context_lengths(context_length):
    from open_clip.tokenizer import SimpleTokenizer

    reference = SimpleTokenizer(context_length=context_length)
    captions = ["", "a", "a photo", "an unquestionably long caption of several uncommon words"]
    assert torch.equal(reference(captions), fast_tokenizer(reference)(captions))
    built = build_tokenizer({"text_cfg": {"context_length": context_length}}, name="own")
    assert build_tokenizer({"text_cfg": {}}, name="another").context_length == 77
    assert torch.equal(reference(captions), built(captions))


def test_the_cache_is_bounded_and_the_tokenizer_can_be_pickled(pair, monkeypatch):
    reference, fast = pair
    monkeypatch.setattr("pipeline.data.loading.decode.CACHED_WORDS", 10)
    captions = [f"word{i} and {i}" for i in range(100)]
    assert torch.equal(reference(captions), fast(captions))
    copy = pickle.loads(pickle.dumps(fast))
    assert torch.equal(copy(captions[:3]), reference(captions[:3]))
    assert len(copy._cache) <= 10


def test_unknown_tokenizers_are_returned_unchanged():
    from open_clip.tokenizer import SimpleTokenizer

    for other in (SimpleTokenizer(clean="whitespace"), SimpleTokenizer(reduction_mask="simple")):
        assert fast_tokenizer(other) is other

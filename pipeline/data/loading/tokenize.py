"""CLIP's byte-pair tokenizer with a cache per word: the same ids as open_clip's, several times as fast.

It consists of plain tables, so that the loader's workers need not import open_clip.
"""

from __future__ import annotations

import functools
import html
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

CACHED_WORDS = 200_000
CACHED_LENGTH = 32
# ftfy changes ASCII text only if it contains control characters or HTML entities; any other ASCII text skips it.
NEEDS_CLEANING = re.compile(r"[^\t\n\r\x20-\x25\x27-\x7e]")


def fast_tokenizer(tokenizer: Any) -> Any:
    """The cached equivalent of what `open_clip.get_tokenizer` returns; the tokenizer itself if it is another's."""
    from open_clip import tokenizer as reference

    plain = type(tokenizer) is reference.SimpleTokenizer and tokenizer.reduction_fn is None
    if not plain or tokenizer.clean_fn is not reference.get_clean_fn("lower"):
        return tokenizer
    return CachedTokenizer(
        context_length=tokenizer.context_length,
        pattern=tokenizer.pat.pattern,
        ids=tokenizer.encoder,
        ranks=tokenizer.bpe_ranks,
        letters=tokenizer.byte_encoder,
        special={tokenizer.decoder[number]: number for number in tokenizer.all_special_ids},
        start=tokenizer.sot_token_id,
        end=tokenizer.eot_token_id,
    )


@dataclass
class CachedTokenizer:
    """Captions -> int64 [b, context_length]: start token, lower-cased byte pairs, cut if too long, end token, zeros."""

    context_length: int
    pattern: str
    """Regular expression that splits text into words."""
    ids: Mapping[str, int]
    """Byte-pair symbol -> id."""
    ranks: Mapping[tuple[str, str], int]
    """Pair of symbols -> rank of its merge."""
    letters: Mapping[int, str]
    """Byte -> printable character that represents it."""
    special: Mapping[str, int]
    """Tokens that are never split -> id."""
    start: int
    end: int
    _cache: dict[str, list[int]] = field(default_factory=dict, repr=False)

    def __call__(self, texts: list[str]) -> Tensor:
        result = np.zeros((len(texts), self.context_length), dtype=np.int64)
        for row, text in zip(result, texts, strict=True):
            if NEEDS_CLEANING.search(text):
                text = _clean(text)
            ids = [self.start]
            for word in " ".join(text.split()).lower().split(" "):  # no token contains a space
                ids += self._cache.get(word) or self._encode_word(word)
                if len(ids) >= self.context_length - 1:
                    break
            ids = [*ids[: self.context_length - 1], self.end]
            row[: len(ids)] = ids
        return torch.from_numpy(result)

    @functools.cached_property
    def _words(self) -> Any:
        import regex

        return regex.compile(self.pattern, regex.IGNORECASE)

    def _encode_word(self, word: str) -> list[int]:
        ids: list[int] = []
        for token in self._words.findall(word):
            stand_in = "".join(self.letters[byte] for byte in token.encode("utf-8"))
            ids += [self.special[stand_in]] if stand_in in self.special else self._merge(stand_in)
        if len(word) <= CACHED_LENGTH:
            if len(self._cache) >= CACHED_WORDS:
                self._cache.clear()
            self._cache[word] = ids
        return ids

    def _merge(self, token: str) -> list[int]:
        """Byte-pair encoding: merge all pairs of the lowest rank, until no pair has a rank."""
        parts = [*token[:-1], token[-1] + "</w>"]
        never = len(self.ranks)
        while len(parts) > 1:
            best = min(itertools.pairwise(parts), key=lambda pair: self.ranks.get(pair, never))
            if best not in self.ranks:
                break
            merged, i = [], 0
            while i < len(parts):
                if i + 1 < len(parts) and (parts[i], parts[i + 1]) == best:
                    merged.append(parts[i] + parts[i + 1])
                    i += 2
                else:
                    merged.append(parts[i])
                    i += 1
            parts = merged
        return [self.ids[part] for part in parts]


def _clean(text: str) -> str:
    import ftfy

    return html.unescape(html.unescape(ftfy.fix_text(text)))

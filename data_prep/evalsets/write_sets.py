"""Evaluation sets of our own in the on-disk layout of the DataComp benchmark, bit-identical for the same samples.

A zero-shot set is a folder with `classnames.txt`, `zeroshot_classification_templates.txt`, `test/nshards.txt` and
`test/<k>.tar` with members such as `s0000000.jpg` and `s0000000.cls`. A retrieval set has `.txt` captions instead of
labels, and `dataset_type.txt`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from data_prep.dataset import canonical_tar
from pipeline.files import sha256_of

SHARD_SIZE = 1_000
Members = Sequence[tuple[str, bytes]]
"""The files of one sample: suffix and content."""


def write_zeroshot(
    samples: Iterable[tuple[str, bytes, int]], folder: Path, *, classnames: Sequence[str], templates: Sequence[str]
) -> dict[str, str]:
    """Write a classification set.

    Args:
        samples: The image's suffix, the encoded image and the label, the index of its class.
        folder: `wds_<name>_test`.
        classnames: The classes.
        templates: Prompts with `{c}` for the class.

    Returns:
        The SHA-256 of each tar, by its name `test/<k>.tar`.
    """
    members = (((suffix, image), ("cls", str(label).encode())) for suffix, image, label in samples)
    digests = _write_shards(members, folder / "test")
    _write_lines(folder / "classnames.txt", classnames)
    _write_lines(folder / "zeroshot_classification_templates.txt", templates)
    return digests


def write_retrieval(samples: Iterable[tuple[str, bytes, str]], folder: Path) -> dict[str, str]:
    """Write a retrieval set of pairs: the image's suffix, the encoded image and its caption.

    Returns:
        The SHA-256 of each tar, by its name `test/<k>.tar`.
    """
    members = (((suffix, image), ("txt", caption.encode())) for suffix, image, caption in samples)
    digests = _write_shards(members, folder / "test")
    _write_lines(folder / "dataset_type.txt", ["retrieval"])
    return digests


def _write_shards(samples: Iterator[Members], folder: Path) -> dict[str, str]:
    folder.mkdir(parents=True, exist_ok=True)
    digests: dict[str, str] = {}
    while batch := list(itertools.islice(samples, SHARD_SIZE)):
        path = folder / f"{len(digests)}.tar"
        numbered = enumerate(batch, start=len(digests) * SHARD_SIZE)
        canonical_tar.write(path, ((f"s{k:07d}.{suffix}", body) for k, sample in numbered for suffix, body in sample))
        digests[f"test/{path.name}"] = sha256_of(path)
    _write_lines(folder / "nshards.txt", [str(len(digests))])
    return digests


def _write_lines(path: Path, lines: Sequence[str]) -> None:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")

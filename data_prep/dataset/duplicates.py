"""Exact and near duplicates in a finished data set.

Exact: the same hash of the bytes as served. Near: difference hashes (64 bits: is each pixel of a 9 x 8 thumbnail darker
than its right neighbour) that differ in few bits; these are candidates, not proof: plain images can match by
chance.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from data_prep.dataset import canonical_tar
from data_prep.dataset.dataset_folder import Folder, local_manifest, read_meta
from data_prep.settings.source_config import HASH_KINDS
from pipeline.data.shards.manifest_format import FORMATS
from pipeline.data.shards.tar_reader import CorruptSample
from pipeline.errors import UserError
from pipeline.pixels import eight_bits

# Five blocks of the 64 bits: at most three flipped bits leave at least two blocks unchanged, so that every pair within
# three bits agrees on some pair of blocks (25 to 26 bits) and is found by sorting.
_BLOCKS = ((0, 13), (13, 26), (26, 39), (39, 52), (52, 64))
MAX_DISTANCE = 3


@dataclass(frozen=True)
class Duplicates:
    """Groups of keys, each sorted, so that "keep the first of each group" gives the same result everywhere."""

    exact: list[list[str]]
    near: list[list[str]]

    def surplus(self) -> list[str]:
        """All keys but the first of each group: a removal list."""
        return sorted({key for group in (*self.exact, *self.near) for key in group[1:]})


def find_duplicates(
    root: str | Path, *, distance: int = MAX_DISTANCE, on_undecodable: Callable[[str], None] = lambda name: None
) -> Duplicates:
    """Find duplicates among all samples of a data set.

    Memory, estimated and not measured: about 100 bytes a sample for keys and hashes while they are collected, and about
    200 more for the table of exact hashes. Ten million samples take some 3 GB.

    Args:
        root: The data set's folder.
        distance: Number of bits in which near duplicates may differ, 0 to 3.
        on_undecodable: Called with the key of every sample that is left out because its image cannot be decoded.

    Raises:
        UserError: `distance` is out of range.
    """
    if not 0 <= distance <= MAX_DISTANCE:
        raise UserError(f"distance = {distance}: near duplicates are found up to {MAX_DISTANCE} differing bits.")
    keys, hashes = _difference_hashes(root, on_undecodable)
    near = [[keys[i] for i in group] for group in near_groups(hashes, distance=distance)]
    exact = exact_groups(Folder(Path(root)))
    known = {tuple(group) for group in exact}
    return Duplicates(exact, [group for group in near if tuple(group) not in known])


def find_overlap(
    root: str | Path,
    suite: str | Path,
    *,
    distance: int = MAX_DISTANCE,
    on_undecodable: Callable[[str], None] = lambda name: None,
) -> dict[str, str]:
    """Samples that look like an image of an evaluation set: the sample's key, and the set's folder.

    Args:
        root: The data set's folder.
        suite: A folder of `wds_*` sets, as `neuclip evalsets` makes it.
        distance: As for `find_duplicates`.
        on_undecodable: As for `find_duplicates`; also for images of the suite, as TAR:KEY.

    Raises:
        UserError: The suite holds no tar.
    """
    tars = sorted(Path(suite).rglob("*.tar"))
    if not tars:
        raise UserError(f"{suite} holds no tar of an evaluation set: give the folder of `neuclip evalsets`.")
    names: list[str] = []
    theirs: list[int] = []
    for path in tars:
        for key, parts in canonical_tar.intact_samples(path):
            if body := canonical_tar.picture(parts):
                try:
                    theirs.append(difference_hash(body))
                except CorruptSample:
                    on_undecodable(f"{path}:{key}")
        names.extend([path.relative_to(suite).parts[0]] * (len(theirs) - len(names)))
    keys, ours = _difference_hashes(root, on_undecodable)
    groups = near_groups(np.concatenate([np.array(theirs, dtype=np.uint64), ours]), distance=distance)
    start = len(theirs)
    found = {keys[i - start]: names[group[0]] for group in groups if group[0] < start for i in group if i >= start}
    return dict(sorted(found.items()))


def exact_groups(folder: Folder) -> list[list[str]]:
    """Groups of keys whose bytes as served have the same hash, according to their records."""
    first: dict[bytes, str] = {}
    groups: dict[str, list[str]] = {}
    for shard in folder.finished():
        table = read_meta(folder, shard, ["key", "status", *HASH_KINDS])
        name = next((name for name in HASH_KINDS if name in table.column_names), None)
        if name is None:
            continue
        columns = (table.column(column).to_pylist() for column in ("key", "status", name))
        for key, status, digest in zip(*columns, strict=True):
            if status == "success" and digest:
                original = first.setdefault(bytes.fromhex(digest)[:12], key)
                if original != key:
                    groups.setdefault(original, [original]).append(key)
    return [sorted(group) for _, group in sorted(groups.items())]


def near_groups(hashes: np.ndarray, *, distance: int) -> list[list[int]]:
    """Groups of indices connected by pairs of hashes that differ in at most `distance` bits; singles are omitted."""
    parent = np.arange(len(hashes))

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = int(parent[i])
        return i

    for i, j in _close_pairs(hashes, distance):
        a, b = sorted((find(i), find(j)))
        parent[b] = a
    groups: dict[int, list[int]] = {}
    for i in range(len(hashes)):
        root = find(i)
        if root != i:
            groups.setdefault(root, [root]).append(i)
    return [sorted(group) for _, group in sorted(groups.items())]


def _close_pairs(hashes: np.ndarray, distance: int) -> Iterator[tuple[int, int]]:
    # Equal hashes first, so that the runs below hold distinct values only.
    values, representative, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    for i in np.flatnonzero(representative[inverse] != np.arange(len(hashes))):
        yield int(representative[inverse[i]]), int(i)
    if distance == 0:
        return
    for blocks in combinations(_BLOCKS, 2):
        mask = np.uint64(sum(((1 << (end - start)) - 1) << start for start, end in blocks))
        masked = values & mask
        order = np.argsort(masked, kind="stable")
        edges = np.flatnonzero(np.diff(masked[order])) + 1
        for run in np.split(order, edges):
            if len(run) < 2:
                continue
            for place, i in enumerate(run[:-1]):
                others = run[place + 1 :]
                near = np.bitwise_count(values[i] ^ values[others]) <= distance
                yield from ((int(representative[i]), int(representative[j])) for j in others[near])


def difference_hash(body: bytes) -> int:
    """Compute the 64-bit difference hash of an encoded image.

    Raises:
        CorruptSample: The image cannot be decoded.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(body), formats=FORMATS) as image:
            image.draft("L", (36, 32))
            small = np.asarray(eight_bits(image).convert("L").resize((9, 8), Image.Resampling.BOX), dtype=np.int16)
    except Exception as error:  # Pillow's plugins raise exceptions of many types on broken files
        raise CorruptSample("image cannot be decoded") from error
    bits = (small[:, :-1] < small[:, 1:]).ravel()
    return int(np.packbits(bits).view(">u8")[0])


def _difference_hashes(root: str | Path, on_undecodable: Callable[[str], None]) -> tuple[list[str], np.ndarray]:
    manifest = local_manifest(root)
    keys: list[str] = []
    hashes: list[int] = []
    for shard in manifest.shards:
        for key, parts in canonical_tar.intact_samples(manifest.url(shard)):
            try:
                hashes.append(difference_hash(canonical_tar.picture(parts)))
                keys.append(key)
            except CorruptSample:
                on_undecodable(key)
    return keys, np.array(hashes, dtype=np.uint64)

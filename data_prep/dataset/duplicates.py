"""Exact and near duplicates in a data set.

Exact: the same hash of the bytes as served, or of the stored image's bytes if none was recorded. Near: all three of

- difference hashes (64 bits: is each pixel of a 9 x 8 grey thumbnail darker than its right neighbour) that differ in at
  most three bits,
- 8 x 8 thumbnails in colour that differ by at most 6 of 255 on average,
- and by at most 32 at every pixel and channel.

A sample is surplus if it is a near duplicate of an earlier one that is kept: A and C are compared themselves, and are
not duplicates because both resemble B. Near duplicates are candidates, not proof: small details do not count.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from data_prep.dataset import canonical_tar
from data_prep.dataset.dataset_folder import Folder, read_meta
from data_prep.dataset.manifest_writer import local_manifest
from data_prep.download_config import HASH_KINDS
from pipeline.data.shards.manifest_format import Manifest
from pipeline.data.shards.tar_reader import CorruptSample, counted_errors
from pipeline.errors import UserError
from pipeline.evaluation.datasets.suite import open_suite, open_task
from pipeline.files import as_text
from pipeline.pictures.pixels import load, open_image, to_rgb

# Five blocks of the 64 bits: at most three flipped bits leave at least two blocks unchanged, so that every pair within
# three bits agrees on some pair of blocks (25 to 26 bits) and is found by sorting.
_BLOCKS = ((0, 13), (13, 26), (26, 39), (39, 52), (52, 64))
MAX_DISTANCE = 3
MAX_MEAN, MAX_PIXEL = 6, 32
_SIDE = 8
_HASH_BYTES = 12
RULE = (
    f"near: {MAX_DISTANCE} or fewer of 64 bits of the difference hash differ, and {_SIDE} x {_SIDE} thumbnails in "
    f"colour by at most {MAX_MEAN} of 255 on average and {MAX_PIXEL} anywhere"
)


class Signatures:
    """What near duplicates are found by, of n images, from what `signature` gives of each."""

    def __init__(self, each: list[tuple[int, bytes]]) -> None:
        self.hashes = np.array([bits for bits, _ in each], dtype=np.uint64)
        """[n], difference hashes."""
        thumbnails = np.frombuffer(b"".join(thumbnail for _, thumbnail in each), np.uint8)
        self.thumbnails = thumbnails.reshape(-1, 3 * _SIDE**2)
        """[n, 192] uint8, RGB."""
        rows = np.concatenate([self.hashes[:, None].view(np.uint8), self.thumbnails], axis=1)
        whole = np.ascontiguousarray(rows).view(np.dtype((np.void, rows.shape[1])))[:, 0]  # sorted faster than axis=0
        _, first, inverse = np.unique(whole, return_index=True, return_inverse=True)
        self.first = first[inverse]
        """[n], the first image with the same signature as each."""

    def near(self, one: int, others: np.ndarray) -> np.ndarray:
        """Those of the others whose thumbnails are near, a mask."""
        difference = np.abs(self.thumbnails[others].astype(np.int16) - self.thumbnails[one])
        return (difference.mean(axis=1) <= MAX_MEAN) & (difference.max(axis=1) <= MAX_PIXEL)


def find_duplicates(
    root: str | Path, *, allow_outside: bool = False, on_undecodable: Callable[[str], None] = lambda name: None
) -> tuple[list[list[str]], dict[str, str]]:
    """Find duplicates among all samples of a data set; captions are not compared.

    Memory, estimated and not measured: about 350 bytes a sample for keys, hashes and thumbnails, as much again while
    equal ones are found, and about 300 more for the tables of exact hashes. Ten million samples take some 10 GB.

    `allow_outside` is that of `load_manifest`; `on_undecodable` is called with the key of every sample that is left out
    because its image cannot be decoded.

    Returns:
        Groups of keys of exact duplicates, sorted, so that "keep the first of each group" gives the same result
        everywhere; and each near duplicate, with the sample that it resembles and that is kept.
    """
    keys, signatures, stored = _signatures(local_manifest(root, allow_outside=allow_outside), on_undecodable)
    groups: dict[bytes, list[str]] = {}
    for key, digest in {**dict(zip(keys, stored, strict=True)), **dict(_recorded(Folder(Path(root))))}.items():
        groups.setdefault(digest, []).append(key)
    exact = sorted(sorted(group) for group in groups.values() if len(group) > 1)
    same = {key: number for number, group in enumerate(exact) for key in group}
    near = {keys[i]: keys[kept] for i, kept in near_duplicates(signatures).items()}
    return exact, {key: kept for key, kept in near.items() if same.get(key, -1) != same.get(kept, -2)}


def find_overlap(
    root: str | Path,
    suite: str | Path,
    *,
    allow_outside: bool = False,
    on_undecodable: Callable[[str], None] = lambda name: None,
    on_unread: Callable[[str], None] = lambda problem: None,
) -> dict[str, str]:
    """Samples that equal or look like an image of an evaluation set: the sample's key, and the set's.

    Equal are images with the same hash: that recorded of what was served, or that of what is stored. `suite` is a
    folder of evaluation sets or a `tasks.yaml`, to whose files the options of `find_duplicates` apply, too; `on_unread`
    is called with a line about each set that cannot be read.

    Raises:
        UserError: No set can be read.
    """
    names, equal = list[str](), dict[bytes, str]()
    theirs: list[tuple[int, bytes]] = []
    for entry in open_suite(suite, partial=True).entries:
        try:
            images = open_task(entry, allow_outside=allow_outside).images
            for index in range(len(images)):
                body = images.read(index)
                for kind in HASH_KINDS:
                    equal.setdefault(hashlib.new(kind, body).digest()[:_HASH_BYTES], entry.task.key)
                try:
                    theirs.append(signature(body))
                    names.append(entry.task.key)
                except CorruptSample:
                    on_undecodable(as_text(images.name(index)))
        except UserError as error:
            on_unread(f"{entry.task.key} is not compared: {error}")
    if not equal:
        raise UserError(f"No evaluation set of {suite} can be read: give the folder of `neuclip evalsets`.")
    keys, ours, stored = _signatures(local_manifest(root, allow_outside=allow_outside), on_undecodable)
    both = Signatures([*theirs, *ours])
    start, match = len(theirs), dict[int, int]()
    for i, j in near_pairs(both):
        if i < start <= j:
            match[j] = min(i, match.get(j, i))
    heads = both.first[start:].tolist()
    match |= {head: head for head in heads if head < start}
    overlap = {key: names[match[head]] for key, head in zip(keys, heads, strict=True) if head in match}
    hashes = itertools.chain(zip(keys, stored, strict=True), _recorded(Folder(Path(root))))
    overlap |= {key: equal[digest] for key, digest in hashes if digest in equal}
    return dict(sorted(overlap.items()))


def _recorded(folder: Folder) -> Iterator[tuple[str, bytes]]:
    """Key and start of the recorded hash of every sample that has one."""
    for shard in folder.finished():
        table = read_meta(folder, shard, ["key", "status", *HASH_KINDS])
        name = next((name for name in HASH_KINDS if name in table.column_names), None)
        if name is None:
            continue
        columns = (table.column(column).to_pylist() for column in ("key", "status", name))
        for key, status, digest in zip(*columns, strict=True):
            if status == "success" and digest:
                yield key, bytes.fromhex(digest)[:_HASH_BYTES]


def near_duplicates(each: list[tuple[int, bytes]]) -> dict[int, int]:
    """Each image that is a near duplicate of an earlier one that is kept, and that one; in order."""
    signatures, copies = Signatures(each), dict[int, int]()
    first = signatures.first
    for i, j in sorted(near_pairs(signatures), key=lambda pair: (pair[1], pair[0])):
        if i not in copies:
            copies.setdefault(j, i)
    for copy in np.flatnonzero(first != np.arange(len(first))):
        head = int(first[copy])
        copies[int(copy)] = copies.get(head, head)
    return dict(sorted(copies.items()))


def near_pairs(signatures: Signatures) -> Iterator[tuple[int, int]]:
    """All pairs `i < j` of near duplicates among the images that are the first with their signature, in no order."""
    heads = np.flatnonzero(signatures.first == np.arange(len(signatures.first)))
    values, inverse = np.unique(signatures.hashes[heads], return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    members = np.split(heads[order], np.flatnonzero(np.diff(inverse[order])) + 1)
    for group in members if len(heads) else ():
        for place, i in enumerate(group[:-1]):
            others = group[place + 1 :]
            yield from ((int(i), int(j)) for j in others[signatures.near(i, others)])
    close = set[tuple[int, int]]()  # indices of distinct hashes
    for blocks in itertools.combinations(_BLOCKS, 2):
        masked = values & np.uint64(sum(((1 << (end - start)) - 1) << start for start, end in blocks))
        order = np.argsort(masked, kind="stable")
        for run in np.split(order, np.flatnonzero(np.diff(masked[order])) + 1):
            for place, i in enumerate(run[:-1]):
                others = run[place + 1 :]
                few = np.bitwise_count(values[i] ^ values[others]) <= MAX_DISTANCE
                close.update((int(i), int(j)) for j in others[few])
    for a, b in close:
        for i in members[a]:
            yield from ((int(min(i, j)), int(max(i, j))) for j in members[b][signatures.near(i, members[b])])


def signature(body: bytes) -> tuple[int, bytes]:
    """The 64-bit difference hash of an encoded image, and its thumbnail of 8 x 8 RGB pixels.

    Raises:
        CorruptSample: The image cannot be decoded.
    """
    with counted_errors(), open_image(body) as image:
        image.draft("RGB", (36, 32))
        load(image, body)
        picture = to_rgb(image, None)
    small = np.asarray(picture.convert("L").resize((9, 8), Image.Resampling.BOX), dtype=np.int16)
    bits = (small[:, :-1] < small[:, 1:]).ravel()
    thumbnail = picture.resize((_SIDE, _SIDE), Image.Resampling.BOX)
    return int(np.packbits(bits).view(">u8")[0]), thumbnail.tobytes()


def _signatures(
    manifest: Manifest, on_undecodable: Callable[[str], None]
) -> tuple[list[str], list[tuple[int, bytes]], list[bytes]]:
    """Names, signatures and hashes of the images of all samples.

    A name is the key, or SHARD:KEY where several shards have the same keys.
    """
    names: list[tuple[str, str]] = []
    hashes: list[bytes] = []
    signatures: list[tuple[int, bytes]] = []
    for shard in manifest.shards:
        for key, parts in canonical_tar.intact_samples(manifest.url(shard)):
            try:
                body = canonical_tar.picture(parts)
                signatures.append(signature(body))
                names.append((shard.name, as_text(key)))
                hashes.append(hashlib.sha256(body).digest()[:_HASH_BYTES])
            except CorruptSample:
                on_undecodable(as_text(key))
    qualified = len({key for _, key in names}) < len(names)
    return [f"{shard}:{key}" if qualified else key for shard, key in names], signatures, hashes

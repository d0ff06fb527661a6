"""`neuclip verify`: is what the manifest promises really there, and what to do where it is not."""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from data_prep.dataset import canonical_tar
from data_prep.dataset.dataset_folder import local_manifest
from pipeline.data.shards.manifest_format import FORMATS, Manifest, Shard


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with one file of a data set."""

    shard: str
    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.shard}: {self.kind}: {self.detail}"


def verify(
    root: str | Path,
    *,
    decode: int = 16,
    seed: int = 0,
    on_shard: Callable[[int], None] = lambda shards: None,
) -> list[Problem]:
    """Check every shard of a manifest: presence, size, SHA-256, that it is a whole tar of the promised samples, and
    that some of its images decode.

    Args: decode: images per shard that are decoded, chosen by `seed`. on_shard: called with the shards done so far.
    Returns: what is wrong, in the order of the shards. Raises: UserError when the manifest itself is unusable, or
      shards lie elsewhere than on this machine.
    """
    manifest = local_manifest(root)
    problems: list[Problem] = []
    for done, shard in enumerate(manifest.shards, start=1):
        problems.extend(_check_shard(manifest, shard, decode=decode, seed=seed))
        on_shard(done)
    listed = {shard.name for shard in manifest.shards}
    tars = sorted(str(path.relative_to(manifest.root)) for path in Path(manifest.root).rglob("*.tar"))
    problems.extend(Problem(name, "not listed", "the manifest does not know it") for name in tars if name not in listed)
    return problems


def _check_shard(manifest: Manifest, shard: Shard, *, decode: int, seed: int) -> Iterator[Problem]:
    path = Path(manifest.url(shard))
    if not path.exists():
        yield Problem(shard.name, "missing", "there is no such file")
        return
    size = path.stat().st_size
    if size != shard.bytes:
        yield Problem(shard.name, "size", f"{size:,} bytes instead of {shard.bytes:,}")
    digest = canonical_tar.sha256_of(path)
    if digest == shard.sha256:
        # The bytes are those that were published: only what was published can still be wrong.
        yield from _undecodable(path, shard, decode=decode, seed=seed)
        return
    yield Problem(shard.name, "sha256", f"{digest[:16]}... instead of {shard.sha256[:16]}...")
    try:
        count = sum(1 for _ in canonical_tar.samples(path))
    except (tarfile.TarError, EOFError, ValueError) as error:
        yield Problem(shard.name, "damaged", f"it is not a whole tar ({error})")
        return
    if count != shard.samples:
        yield Problem(shard.name, "count", f"{count:,} samples instead of {shard.samples:,}")


def _undecodable(path: Path, shard: Shard, *, decode: int, seed: int) -> Iterator[Problem]:
    """PIL's verdict on a few images; and the count, which the digest vouches for only if the manifest was right."""
    from PIL import Image

    chosen = set(random.Random(f"{seed}/{shard.name}").sample(range(shard.samples), min(decode, shard.samples)))
    count = 0
    for count, (key, parts) in enumerate(canonical_tar.samples(path), start=1):
        if count - 1 not in chosen:
            continue
        try:
            with Image.open(io.BytesIO(canonical_tar.picture(parts)), formats=FORMATS) as image:
                image.load()
        except (OSError, ValueError, SyntaxError) as error:
            yield Problem(shard.name, "undecodable", f"sample {key} ({error})")
    if count != shard.samples:
        yield Problem(shard.name, "count", f"{count:,} samples instead of {shard.samples:,}")

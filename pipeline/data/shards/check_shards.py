"""Whether shards match their manifest and settings, checked before step 0: sizes, the samples of one, the captions.

`neuclip verify` compares the contents as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from pipeline.config import suggest
from pipeline.cores import thread_map
from pipeline.data.data_config import DataConfig, Source
from pipeline.data.order.mixture import Purpose, key, permutation
from pipeline.data.shards.manifest_format import Manifest, load_manifest
from pipeline.data.shards.storage import is_local, open_records, open_shard
from pipeline.data.shards.tar_reader import (
    IMAGE_SUFFIXES,
    CaptionField,
    CorruptSample,
    DamagedTar,
    keys,
    members,
    split_name,
)
from pipeline.errors import UserError
from pipeline.run_files import record_of

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.distributed.world import World

REMOTE_CHECKED = 32
THREADS = 16
SHOWN = 5
FIRST_MEMBERS = 32
"""Of a shard, in which captions are looked for."""
LEAST_SHARE = 0.01
"""Of the captions, from which on a note is made."""
SAMPLED = 1000


def check_captions(config: DataConfig) -> None:
    """Raise a UserError if the first samples of a source on this machine have no captions where `data.caption` says.

    A source without a readable manifest or first shard is passed over: whatever reads the data reports it.
    """
    for source in config.sources:
        try:
            manifest = load_manifest(source.manifest, allow_outside=config.allow_outside)
        except (UserError, OSError):
            continue
        check_caption(manifest, source.caption or config.caption)


def check_caption(manifest: Manifest, wanted: str, *, name: str = "data.caption") -> None:
    """`check_captions` for one source; `name` is the setting or option for captions."""
    url, places = manifest.url(manifest.shards[0]), dict[str, None]()
    if not is_local(url):
        return
    with suppress(OSError, DamagedTar), open_shard(url) as file:
        for member, payload in islice(members(file, wanted=lambda suffix: suffix == "json"), FIRST_MEMBERS):
            suffix = split_name(member)[1]
            if suffix and suffix not in IMAGE_SUFFIXES:
                places[suffix] = None
                places.update(dict.fromkeys(f"json:{field}" for field in record_of(payload) or {}))
        if places and wanted not in places:
            raise UserError(
                f"{name} = {wanted!r} is in none of the first samples of {url}. {suggest(wanted, tuple(places))}"
            )


def check_shards(manifest: Manifest, world: World) -> int:
    """Raise a UserError if shards are missing, differ from the manifest or cannot be read; the ranks share the work.

    The sizes of all local shards are compared, and the samples of one are counted. Of its remote shards each rank
    checks 32, chosen by hash, and starts to read one. Returns the number of shards that this rank checked.
    """
    shards = [manifest.shards[number] for number in range(world.rank, len(manifest.shards), world.size)]
    local = [shard for shard in shards if is_local(manifest.url(shard))]
    remote = [shard for shard in shards if not is_local(manifest.url(shard))]
    remote = [remote[k] for k in permutation(key(Purpose.PROBE, world.rank), len(remote))[:REMOTE_CHECKED].tolist()]
    checked = local + remote
    with ThreadPoolExecutor(THREADS) as pool:
        sizes = list(thread_map(pool, lambda shard: _size(manifest.url(shard)), checked, ahead=64))
    wrong = [(shard, size) for shard, size in zip(checked, sizes, strict=True) if size != shard.bytes]
    missing = [shard.name for shard, size in wrong if size is None]
    other = [f"{shard.name} has {size} bytes, not {shard.bytes}" for shard, size in wrong if size is not None]
    if missing or other:
        raise UserError(
            f"The shards in {manifest.root} do not match their manifest: of {len(checked)} checked, {len(missing)} are "
            f"missing ({', '.join(missing[:SHOWN]) or 'none'}) and {len(other)} differ "
            f"({'; '.join(other[:SHOWN]) or 'none'}). Fetch them again (`neuclip verify` says how), or write a new "
            "manifest (`neuclip manifest --replace`)."
        )
    for url in [manifest.url(shard) for shard in remote[:1]]:
        try:
            with open_records(url, skip=1) as records:
                next(records, None)
        except Exception as error:
            raise UserError(
                f"The shard {url} exists, but cannot be read ({type(error).__name__}: {error}). A web server must "
                "support range requests; for an object store, check the version of its client."
            ) from error
    for shard in sorted(local, key=lambda shard: shard.bytes)[:1]:
        # In a damaged one, whose size is right, the readable samples are used, and the others count as corrupt.
        with suppress(DamagedTar), open_shard(manifest.url(shard)) as file:
            counted = sum(1 for _ in keys(file))
            if counted != shard.samples:
                raise UserError(
                    f"{manifest.url(shard)} holds {counted} samples, but its manifest lists {shard.samples}: sample "
                    "ids would be wrong. Write a new manifest with `neuclip manifest --replace`, or download the shard "
                    "again."
                )
    return len(checked)


def _size(url: str) -> int | None:
    """Bytes of a shard, or None if it does not exist."""
    try:
        if is_local(url):
            return os.stat(url).st_size
        import fsspec

        filesystem, path = fsspec.core.url_to_fs(url)
        size = filesystem.size(path)
    except FileNotFoundError:
        return None
    except Exception as error:  # clients of object stores raise exceptions of many types, some without a message
        reason = str(error) or type(error).__name__
        raise UserError(f"The shard {url} cannot be accessed ({reason}): check its path and access rights.") from error
    if size is None:
        raise UserError(f"The server of {url} does not report its size: use another kind of URL, or a local copy.")
    return int(size)


def caption_notes(tokens_bL: Tensor, *, tokenize: Callable[[list[str]], Tensor], of: str, masked: bool) -> list[str]:
    """What to know about captions, as tokens of a model's tokenizer; `of` says whose they are, "the first batch's".

    `masked` is `objective.mask_equal`, with which equal captions need no note.
    """
    length, notes = tokens_bL.shape[1], []
    empty, long = tokenize(["", "word " * length])
    last = -1 if long[-1] != empty[-1] else -2  # some tokenizers pad with the token that ends a text
    full = (tokens_bL[:, last] != empty[-1]).double().mean().item()
    if full >= LEAST_SHARE:
        notes.append(
            f"{full:.0%} of {of} captions fill all {length} tokens of the context, and what longer ones have beyond "
            "it is not read. Shorten these, or choose a model with a longer context."
        )
    _, inverse, counts = tokens_bL.unique(dim=0, return_inverse=True, return_counts=True)
    repeated = (counts[inverse] > 1).double().mean().item()
    if repeated >= LEAST_SHARE and not masked:
        notes.append(
            f"{repeated:.0%} of {of} captions occur more than once, and equal texts are each other's negatives: "
            "objective.mask_equal=true leaves them out."
        )
    return notes


def first_captions(config: DataConfig, *, count: int) -> list[str]:
    """Up to `count` captions from the beginning of the sources on this machine that can be read, at most `SAMPLED`."""
    share = -(-min(count, SAMPLED) // len(config.sources))
    return [text for source in config.sources for text in islice(_captions(config, source), share)]


def _captions(config: DataConfig, source: Source) -> Iterator[str]:
    field = CaptionField.parse(source.caption or config.caption)
    with suppress(UserError, OSError, DamagedTar):
        manifest = load_manifest(source.manifest, allow_outside=config.allow_outside)
        for url in map(manifest.url, manifest.shards):
            if not is_local(url):
                return
            with open_records(url, caption_suffix=field.suffix) as records:
                for record in records:
                    with suppress(CorruptSample):
                        yield field.read(record)

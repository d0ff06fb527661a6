"""Do the shards match their manifest? Asked before step 0, of sizes and counts; `neuclip verify` compares contents."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from pipeline.data.order.hashing import Purpose, key, permutation
from pipeline.data.shards.manifest_format import Manifest, Shard
from pipeline.data.shards.storage import is_local, open_records, open_shard
from pipeline.data.shards.tar_reader import DamagedTar, count_records
from pipeline.distributed.world import World
from pipeline.errors import UserError

REMOTE_CHECKED = 32
THREADS = 16
SHOWN = 5


def check_shards(manifest: Manifest, world: World) -> int:
    """Compare sizes with the manifest, and count the samples of one local shard; the ranks share the work.

    Local shards are all looked at; of remote ones this rank asks for 32 and begins to read one, and `pipe:` commands
    are not run.
    Returns: how many shards this rank looked at.
    Raises: UserError that names shards and numbers.
    """
    local, remote = _own_share(manifest, world)
    with ThreadPoolExecutor(THREADS) as pool:
        sizes = list(pool.map(lambda shard: _size(manifest.url(shard)), local + remote))
    found = list(zip(local + remote, sizes, strict=True))
    missing = [shard.name for shard, size in found if size is None]
    other = [f"{s.name} has {size} bytes, not {s.bytes}" for s, size in found if size not in (None, s.bytes)]
    if missing or other:
        raise UserError(
            f"The shards in {manifest.root} do not match their manifest: of {len(found)} looked at, {len(missing)} are "
            f"missing ({', '.join(missing[:SHOWN]) or 'none'}) and {len(other)} differ "
            f"({'; '.join(other[:SHOWN]) or 'none'}). Fetch them again (`neuclip verify --rebuild`), or write another "
            "manifest (`neuclip manifest --replace`)."
        )
    for shard in remote[:1]:
        _read(manifest.url(shard))
    if local:
        _count(manifest, min(local, key=lambda shard: shard.bytes))
    return len(found)


def _own_share(manifest: Manifest, world: World) -> tuple[list[Shard], list[Shard]]:
    """This rank's local shards, and some of its remote ones chosen by hash."""
    own = manifest.shards[world.rank :: world.size]
    local = [shard for shard in own if is_local(manifest.url(shard))]
    remote = [shard for shard in own if not is_local(shard.name) and not shard.name.startswith("pipe:")]
    chosen = permutation(key(Purpose.PROBE, world.rank), len(remote))[:REMOTE_CHECKED]
    return local, [remote[number] for number in chosen.tolist()]


def _size(url: str) -> int | None:
    """Bytes of a shard, or None when it is not there.

    Raises: UserError when that cannot be found out: object stores' clients raise many kinds, and say little in some.
    """
    try:
        if is_local(url):
            return os.stat(url).st_size
        import fsspec

        filesystem, path = fsspec.core.url_to_fs(url)
        size = filesystem.size(path)
    except FileNotFoundError:
        return None
    except ImportError as error:
        raise UserError(f"The shard {url} needs a package that is not installed here: {error}") from error
    except Exception as error:
        said = str(error) or type(error).__name__
        raise UserError(f"The shard {url} cannot be looked at ({said}): check path and access rights.") from error
    if size is None:
        raise UserError(f"The server of {url} does not tell its size: use another kind of URL, or a local copy.")
    return int(size)


def _read(url: str) -> None:
    """Read the second sample of a remote shard, which takes all that reading needs: access, seeking, the tar itself."""
    try:
        with open_records(url, skip=1) as records:
            next(records, None)
    except Exception as error:
        raise UserError(
            f"The shard {url} is there, but cannot be read ({type(error).__name__}: {error}). A web server must serve "
            "byte ranges; of an object store, check the client's version. `pipe:curl ...` reads without either."
        ) from error


def _count(manifest: Manifest, shard: Shard) -> None:
    try:
        with open_shard(manifest.url(shard)) as file:
            counted = count_records(file)
    except DamagedTar:
        return  # of the right size: its readable samples are used, the others counted as corrupt
    if counted != shard.samples:
        raise UserError(
            f"{manifest.url(shard)} holds {counted} samples, but its manifest says {shard.samples}: "
            "sample ids would be wrong. Write another with `neuclip manifest --replace`, or fetch the shard again."
        )

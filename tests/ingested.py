"""A data set of 24 images in 4 shards, made by img2dataset's downloader in this process, and faults at any step."""

import errno
import gc
import itertools
import os
import re
import shutil
import urllib.request
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from data_prep import ingest
from data_prep.dataset.dataset_folder import Folder
from data_prep.dataset.manifest_writer import expected_manifest
from data_prep.dataset.shard_plan import load_plan
from data_prep.fetching.downloader import ShardDownloader
from data_prep.ingest import prepare
from jobs.manifest import command as manifest_command
from pipeline.config import dump
from tests.downloads import download_config
from tests.images import encoded
from tests.web import jpeg, picture, serve

ROWS, SHARD = 24, 6


@pytest.fixture(scope="module", autouse=True)
def own_opener():
    """Remove our URL opener, which replaces the one img2dataset fetches through, after the tests of the module."""
    yield
    urllib.request.install_opener(None)


@pytest.fixture(scope="module")
def site():
    with serve() as site:
        yield site


@pytest.fixture(scope="module")
def made(site, tmp_path_factory):
    """A data set of 24 images in 4 shards, made by img2dataset's downloader in this process."""
    folder = tmp_path_factory.mktemp("made")
    bodies = [jpeg(side=40 + k) for k in range(ROWS)]
    bodies[9] = bodies[2]
    bodies[20] = encoded(picture(44).resize((60, 60)), "JPEG", quality=70)
    columns = {
        "url": [site.image(f"/{k}.jpg", body) for k, body in enumerate(bodies)],
        "caption": [f"picture {k}" for k in range(ROWS)],
        "uid": [f"{k:032x}" for k in range(ROWS)],
    }
    pq.write_table(pa.table(columns), folder / "urls.parquet")
    fetch = {"shard_size": SHARD, "threads": 4, "retries": 0}
    config, plan = prepare(
        download_config(folder / "data", folder / "urls.parquet", source={"uid": "uid"}, fetch=fetch)
    )
    fetch_here(config, plan, range(plan.shards))
    return config


def prepared(folder, columns, **source):
    """Return the configuration and plan of a download to `folder`/data of a table, given by its columns or file."""
    table = columns if isinstance(columns, Path) else folder / "urls.parquet"
    if not isinstance(columns, Path):
        pq.write_table(pa.table(dict(columns)), table)
    return prepare(download_config(folder / "data", table, source=source))


def fetch_here(config, plan, shards, *, manifest=True):
    """Do the work of the engine's workers in this process; then write the manifest, unless `manifest` is false."""
    folder = Folder(Path(config.output), config.fetch.worker)
    folder.config.write_text(dump(config))
    downloader = ShardDownloader(config, folder, plan)
    for shard in shards:
        ok, _ = downloader((shard, str(folder.staging / f"{shard}.arrow")))
        assert ok
    if not manifest:
        return None
    made = expected_manifest(folder, plan)
    made.save(folder.root)
    return made


def contents(root):
    """All files of a data set, through links, but for logs, locks, indexes and settings."""
    files = ((Path(folder) / name) for folder, _, names in os.walk(root, followlinks=True) for name in names)
    named = {str(path.relative_to(root)): path.read_bytes() for path in files}
    return {name: body for name, body in named.items() if not re.search(r"staging/|index/|download\.yaml", name)}


def index(root, *options):
    """Call `neuclip manifest`."""
    CliRunner().invoke(manifest_command, [str(root), *options], catch_exceptions=False, standalone_mode=False)


@pytest.fixture
def copied(made, tmp_path):
    shutil.copytree(made.output, tmp_path / "data")
    return tmp_path / "data"


def fetch_in_process(config, shards, **_):
    """In place of `data_prep.ingest.fetch`."""
    fetch_here(config, load_plan(Folder(Path(config.output))), list(shards), manifest=False)


@pytest.fixture(autouse=True)
def in_process(monkeypatch):
    """Let `download` fetch in this process, in the modules that import this fixture."""
    monkeypatch.setattr(ingest, "fetch", fetch_in_process)


def in_a_fork(work, steps, at, action="kill"):
    """Do some work in a fork that is killed, or meets a full disk, at call number `at` of a step.

    Args:
        work: Called without arguments.
        steps: Functions whose calls count, each as its owner and name.
        at: The number of the call, from 1.
        action: `kill` or `full`.

    Returns:
        The exit status: 0, 9 if it was killed, 3 if the disk was full, 1 for another error.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    gc.disable()  # what belongs to threads of libraries that the fork lacks must not be collected here
    calls = itertools.count(1)

    def counted(real):
        def call(*arguments, **options):
            if next(calls) == at:
                if action == "kill":
                    os._exit(9)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments, **options)

        return call

    for owner, name in steps:
        setattr(owner, name, counted(getattr(owner, name)))
    try:
        work()
    except OSError:
        os._exit(3)
    except BaseException:
        os._exit(1)
    os._exit(0)

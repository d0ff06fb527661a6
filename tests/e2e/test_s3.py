"""Runs whose checkpoints are copied to an S3 server, and runs that read their shards from one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.checkpoint.mirror import Mirror
from pipeline.run_files import META_NAME, PREFIX, name_of
from tests.e2e.test_train import STEPS, base, equal, records, settings, weights  # noqa: F401 (a fixture)
from tests.launch import Program, run, wait_for
from tests.metrics import metrics
from tests.mirrors import steps_in
from tests.s3_server import client, end, s3_server
from tests.shards import write_shards

pytestmark = pytest.mark.daily

MIRROR = "s3://bucket/runs"


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with s3_server(tmp_path_factory.mktemp("s3") / "log"):
        client().mkdir("bucket")
        yield


def messages(folder: Path) -> list[str]:
    return [event["message"] for event in metrics(folder, "event") if "message" in event]


def kill_while_uploading(arguments: list[str], folder: Path) -> None:
    """Start a run, and kill it while its mirror has a checkpoint and some files of a later one."""
    store = client()

    def uploading() -> bool:
        files = [Path(path) for path in store.find("bucket/runs", refresh=True) if f"/{folder.name}/" in path]
        finished = {path.parent for path in files if path.name == META_NAME}
        return bool(finished and {path.parent for path in files if path.parent.name.startswith(PREFIX)} - finished)

    with Program("tests.e2e.slow_run", "0.3", *arguments) as program:
        wait_for(uploading, "a later checkpoint is being uploaded", process=program, seconds=300, pause=0)


@pytest.mark.slow
def test_a_run_continues_on_a_fresh_machine_with_the_same_bits(base, s3):  # noqa: F811
    often = ("checkpoint.every=1", "checkpoint.keep_last=2")
    run("jobs.train", *settings(base, "undisturbed", *often))
    folder, arguments = base / "spot", settings(base, "spot", *often, f"checkpoint.mirror={MIRROR}")
    kill_while_uploading(arguments, folder)
    store = Mirror(MIRROR, folder)
    newest = steps_in(store)[-1]
    shutil.rmtree(folder)
    done = run("tests.e2e.slow_run", "mirror", *arguments, "--resume", "latest")
    assert f"Checkpoint {name_of(newest)} was downloaded from the mirror" in done.stdout + done.stderr
    assert equal(weights(folder), weights(base / "undisturbed"))
    assert steps_in(store) == sorted({newest, STEPS - 1, STEPS}), "the run has resumed from the first one"


@pytest.mark.slow
def test_training_goes_on_without_the_server(base, monkeypatch):  # noqa: F811
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    folder, arguments = base / "alone", settings(base, "alone", "checkpoint.every=3", f"checkpoint.mirror={MIRROR}")
    with s3_server(base / "server.log") as (server, _):
        client().mkdir("bucket")
        with Program("tests.e2e.slow_run", "0.3", *arguments) as program:
            begun = folder / "metrics.jsonl"
            wait_for(lambda: begun.exists() and messages(folder)[1:], "a checkpoint", process=program, pause=0.1)
            end(server)
            assert program.wait(300).returncode == 0
    failed = [message for message in messages(folder) if "is NOT in the mirror" in message]
    assert name_of(STEPS) in failed[-1]
    assert (folder / "checkpoints" / name_of(STEPS) / META_NAME).is_file()


@pytest.mark.slow
def test_shards_in_a_bucket_train_and_validate_like_local_ones(base, s3):  # noqa: F811
    write_shards(base / "held-out", [9, 7], first=1000)
    for name, last in (("shards", 2), ("held-out", 1)):
        for shard in (base / name).glob("*.tar"):
            client().put_file(str(shard), f"bucket/{name}/{shard.name}")
        (base / "bucket" / name).mkdir(parents=True)
        urls = f"s3://bucket/{name}/{{00000..{last:05d}}}.tar"
        run("jobs.cli", "manifest", str(base / "bucket" / name), "--shards", urls)
        local, remote = (
            json.loads((folder / name / "manifest.json").read_text())["shards"] for folder in (base, base / "bucket")
        )
        assert [shard["sha256"] for shard in remote] == [shard["sha256"] for shard in local]
    for name, data in (("from-disk", base), ("from-bucket", base / "bucket")):
        more = (f"data.sources={data / 'shards'}", f"validation.sources={data / 'held-out'}", "validation.every=6")
        run("jobs.train", *settings(base, name, *more, "data.workers=2"))
    assert equal(weights(base / "from-bucket"), weights(base / "from-disk"))
    losses = [[record["loss"] for record in records(base / name).values()] for name in ("from-bucket", "from-disk")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == STEPS

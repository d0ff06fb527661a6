"""Runs whose checkpoints are copied to an S3 server (moto), and runs that read their shards from one."""

import json
import os
import shutil
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from pipeline.checkpoint.mirror import Mirror
from pipeline.errors import UserError
from pipeline.run_files import META_NAME, PREFIX, name_of
from tests.e2e.test_train import STEPS, base, equal, records, settings, weights  # noqa: F401 (a fixture)
from tests.launch import Program, free_port, run, wait_for
from tests.shards import write_shards
from tests.written_checkpoints import begin, fetch, steps_in

pytestmark = [pytest.mark.daily, pytest.mark.slow]

MIRROR = "s3://bucket/runs"


@contextmanager
def s3_server(log, **settings_of_moto):
    """A server for this process and those that it starts, with nothing of the user's own configuration."""
    for package in ("s3fs", "moto", "flask_cors"):
        pytest.importorskip(package, reason="the extras `s3` and `s3-server` are not installed")
    import s3fs

    port = free_port()
    found = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "NO_PROXY": "127.0.0.1",
    }

    def answers():
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with log.open("ab") as output:
        server = subprocess.Popen(
            command, env={**os.environ, **settings_of_moto}, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        wait_for(answers, "the S3 server answers", process=server, seconds=60)
        s3fs.S3FileSystem.clear_instance_cache()  # clients that found an earlier server
        with patch.dict(os.environ, found):
            yield
    finally:
        server.kill()
        server.wait()


def client():
    """A client of the current server that no other code uses."""
    import s3fs

    return s3fs.S3FileSystem(skip_instance_cache=True)


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3") / "log"):
        client().mkdir("bucket")
        yield


def kill_while_uploading(arguments, folder):
    """Start a run, and kill it while its mirror has a checkpoint and some files of a later one."""
    store = client()

    def uploading():
        files = [Path(path) for path in store.find("bucket/runs", refresh=True) if f"/{folder.name}/" in path]
        finished = {path.parent for path in files if path.name == META_NAME}
        return bool(finished and {path.parent for path in files if path.parent.name.startswith(PREFIX)} - finished)

    with Program("tests.e2e.slow_run", "0.3", *arguments) as program:
        wait_for(uploading, "a later checkpoint is being uploaded", process=program, seconds=300, pause=0)


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


def test_a_bucket_that_is_missing_is_refused_and_not_created(tmp_path, s3):
    before = client().find("bucket")
    for start in (begin, fetch):
        with pytest.raises(UserError, match=r"s3://buckte/runs/.* cannot be used .*bucket does not exist.* address"):
            start(tmp_path / "run", "s3://buckte/runs")
        start(tmp_path / "run", MIRROR)
    assert client().ls("") == ["bucket"]
    assert client().find("bucket") == before, "the check at the start leaves nothing behind"


def test_credentials_that_are_missing_or_wrong_are_refused(tmp_path, monkeypatch):
    with s3_server(tmp_path / "log", INITIAL_NO_AUTH_ACTION_COUNT="0"):
        for reason in ("Access Key Id you provided does not exist", "Unable to locate credentials"):
            with pytest.raises(UserError, match=rf"cannot be used \(.*{reason}.*the credentials"):
                begin(tmp_path / "run", MIRROR)
            for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
                monkeypatch.delenv(name, raising=False)
            client().clear_instance_cache()


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

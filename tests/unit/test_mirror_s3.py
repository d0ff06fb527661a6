"""What only an object store does to a mirror: buckets, credentials, uploads in parts, and servers that go away."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.checkpoint.layout import FORMAT, MOMENTS_NAME, OBJECTIVE_NAME, VERSION
from pipeline.checkpoint.mirror import Mirror
from pipeline.errors import UserError
from pipeline.files import sha256_of, write_json
from pipeline.model.model_folder import WEIGHTS_NAME
from pipeline.run_files import META_NAME, MODEL_CONFIG_NAME, digest_of, name_of
from tests.launch import ROOT, python, wait_for
from tests.mirrors import begin, fetch, steps_in
from tests.s3_server import client, client_settings, s3_server
from tests.written_checkpoints import FACTS

pytestmark = pytest.mark.daily
PARTS = 101 * 2**20
"""Bytes of a file that s3fs uploads in three parts."""
UPLOAD = """
import sys
from pathlib import Path
from pipeline.checkpoint.mirror import Mirror
Mirror(sys.argv[1], Path(sys.argv[2])).upload(Path(sys.argv[3]))
"""


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    with s3_server(tmp_path / "log") as (_, port):
        client().mkdir("bucket")
        yield port


def large_checkpoint(run: Path, step: int, *, size: int) -> Path:
    """A checkpoint with one large file, written without the trainer."""
    folder = run / "checkpoints" / name_of(step)
    folder.mkdir(parents=True)
    files = {}
    for name in (MODEL_CONFIG_NAME, WEIGHTS_NAME, OBJECTIVE_NAME, MOMENTS_NAME):
        with (folder / name).open("wb") as out:
            out.truncate(size if name == MOMENTS_NAME else 1)
        files[name] = {"bytes": (folder / name).stat().st_size, "sha256": sha256_of(folder / name)}
    meta = {**FACTS, "format": FORMAT, "version": VERSION, "step": step, "counter": step, "samples": 8 * step}
    meta |= {"files": files, "run_id": "0123456789abcdef"}
    write_json(folder / META_NAME, {**meta, "digest": digest_of(meta)})
    return folder


def test_a_bucket_that_is_missing_is_refused_and_not_created(tmp_path, port):
    for start in (begin, fetch):
        with pytest.raises(UserError, match=r"s3://buckte/runs/.* cannot be used .*bucket does not exist.* address"):
            start(tmp_path / "run", "s3://buckte/runs")
        start(tmp_path / "run", "s3://bucket/runs")
    with pytest.raises(FileNotFoundError, match="bucket does not exist"):
        Mirror("s3://buckte/runs", tmp_path / "run").upload(large_checkpoint(tmp_path / "run", 1, size=10))
    assert client().ls("") == ["bucket"]
    assert client().find("bucket") == [], "the check at the start leaves nothing behind"


@pytest.mark.parametrize("known", [False, True])
def test_credentials_that_are_missing_or_wrong_are_refused(tmp_path, monkeypatch, known):
    with s3_server(tmp_path / "log", INITIAL_NO_AUTH_ACTION_COUNT="0"):
        if not known:
            monkeypatch.delenv("AWS_ACCESS_KEY_ID")
            monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        reason = "Access Key Id you provided does not exist" if known else "Unable to locate credentials"
        with pytest.raises(UserError, match=rf"cannot be used \(.*{reason}.*the credentials"):
            begin(tmp_path / "run", "s3://bucket/runs")


def test_an_upload_in_parts_that_is_killed_never_looks_complete(tmp_path, port):
    run, store = tmp_path / "run", client()
    older, newer = large_checkpoint(run, 1, size=100), large_checkpoint(run, 2, size=PARTS)
    mirror = Mirror("s3://bucket/runs", run)
    mirror.upload(older)
    call = [sys.executable, "-c", UPLOAD, "s3://bucket/runs", str(run), str(newer)]
    upload = subprocess.Popen(call, cwd=ROOT, text=True)
    wait_for(lambda: store.list_multipart_uploads("bucket"), "a part is uploaded", process=upload, pause=0)
    os.kill(upload.pid, signal.SIGKILL)
    assert upload.wait() == -signal.SIGKILL
    assert [part["Key"].rpartition("/")[2] for part in store.list_multipart_uploads("bucket")] == [
        "moments.safetensors"
    ]
    assert steps_in(mirror) == [1]
    shutil.rmtree(run)
    fetch(run, "s3://bucket/runs")
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == [older.name]
    mirror.upload(large_checkpoint(run, 2, size=PARTS))  # the next attempt is not disturbed by the parts
    assert steps_in(mirror) == [1, 2]


def test_the_endpoint_comes_from_the_environment(port, monkeypatch):
    """docs/cluster.md names two variables; the server would not be found without one of them."""
    script = "import fsspec; print(fsspec.filesystem('s3').ls(''))"
    settings = client_settings(port)
    endpoint = settings.pop("AWS_ENDPOINT_URL")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    for name in ("AWS_ENDPOINT_URL", "FSSPEC_S3_ENDPOINT_URL"):
        done = python("-c", script, **settings, **{name: endpoint})
        assert json.loads(done.stdout.replace("'", '"')) == ["bucket"]

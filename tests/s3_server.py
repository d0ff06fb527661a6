"""An S3 server (moto) on this machine, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest

from tests.launch import free_port

SECONDS = 60.0


def process(port: int, log: Path, **environment: str) -> subprocess.Popen[bytes]:
    """Start the server, and return when it answers. Its state is lost when it ends."""
    with log.open("ab") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    deadline = time.monotonic() + SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        try:
            urlopen(f"http://127.0.0.1:{port}/moto-api/", timeout=5).close()
            return server
        except HTTPError:
            return server
        except (URLError, OSError):
            time.sleep(0.05)
    end(server)
    raise AssertionError(f"the S3 server did not start:\n{log.read_text()[-2000:]}")


def end(server: subprocess.Popen[bytes]) -> None:
    """End the server."""
    server.kill()
    server.wait()


def client_settings(port: int) -> dict[str, str]:
    """The environment with which S3's clients find the server; nothing of the user's own configuration."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "NO_PROXY": "127.0.0.1",
    }


@contextmanager
def s3_server(log: Path, **environment: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A server for this process and those that it starts. Gives the process and its port.

    Args:
        log: The server's output.
        **environment: Settings of moto.
    """
    for package in ("s3fs", "moto", "flask_cors"):
        pytest.importorskip(package, reason="the extras `s3` and `s3-server` are not installed")
    import s3fs

    port = free_port()
    server = process(port, log, **environment)
    try:
        s3fs.S3FileSystem.clear_instance_cache()  # clients that found an earlier server
        with patch.dict(os.environ, client_settings(port)):
            yield server, port
    finally:
        end(server)


def client() -> Any:
    """A client of the current server that no other code uses."""
    import s3fs

    return s3fs.S3FileSystem(skip_instance_cache=True)

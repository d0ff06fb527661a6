"""`make` begins an installation again when the network fails it: pip itself only resumes a download."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
echo "$*" >> {calls}
test $(wc -l < {calls}) -gt {failures}
"""


@pytest.mark.parametrize("failures", [0, 2, 3])
def test_a_failed_installation_is_begun_again(tmp_path: Path, failures: int) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    calls, python = tmp_path / "calls", tmp_path / "env/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON.format(calls=calls, failures=failures), encoding="utf-8")
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "VENV=env", "PAUSES=0 0", "environment"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},  # of `make test`
        capture_output=True,
        text=True,
        timeout=60,
    )
    asked = calls.read_text(encoding="utf-8").splitlines()
    first, ready = "-m pip install --quiet --upgrade pip", tmp_path / "env/.ready"
    assert done.stdout.count("once more in 0 s") == min(failures, 2)
    if failures == 3:
        assert done.returncode != 0
        assert asked == [first] * 3
        assert not ready.exists()
    else:
        assert done.returncode == 0, done.stderr
        assert asked[: failures + 1] == [first] * (failures + 1)
        assert [call.split()[-1] for call in asked[failures + 1 :]] == ["wheel", ".[dev]"]
        assert ready.exists()

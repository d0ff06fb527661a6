"""One new file in `pipeline/objectives/` adds a method: the tests of all methods pass without other changes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.objectives import objective_names
from tests.documents import ROOT

TESTS = (
    "tests/unit/test_imports.py", "tests/unit/test_objectives_drift.py", "tests/unit/test_objectives_limits.py",
    "tests/unit/test_objectives_registry.py", "tests/unit/test_objectives_state.py",
    "tests/unit/test_readme.py::test_the_methods_page_describes_every_key_of_its_objectives",
    "tests/unit/test_settings_page.py::test_every_setting_is_documented",
    "tests/unit/test_settings_page.py::test_the_page_is_up_to_date",
)  # fmt: skip
FOR_EACH_METHOD = (
    "tests/unit/test_objectives_drift.py::test_all_replicated_state_is_compared",
    "tests/unit/test_objectives_limits.py::test_row_blocks_do_not_change_the_result",
    "tests/unit/test_objectives_state.py::test_a_resumed_run_is_bit_identical",
)
FOLDERS = ("pipeline", "data_prep", "jobs", "tests", "docs", "ds_configs")


@pytest.mark.slow
def test_one_file_adds_a_method(tmp_path):
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, tmp_path / path.name)
    methods = tmp_path / "pipeline" / "objectives"
    (methods / "toys").mkdir()
    (methods / "toys" / "__init__.py").touch()
    in_package = Path(shutil.copy(ROOT / "tests" / "toy_objective.py", methods / "toys" / "in_batch_toy.py"))
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
    }
    show = (
        "from pipeline.objectives import objective_names as names; import pipeline; print(*names(), pipeline.__path__)"
    )
    for place in (in_package, methods / "in_batch_toy.py"):  # in a package, then as a file, which the tests below see
        in_package.rename(place)
        command = [sys.executable, "-c", show]
        shown = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert "in_batch_toy" in shown.stdout
        assert str(tmp_path) in shown.stdout
    shutil.rmtree(methods / "toys")
    # Tests named after another method do not see the new one; they run in the suite itself.
    others = f"in_batch_toy or not ({' or '.join(objective_names())})"
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-v", "-k", others, *TESTS]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    for test in FOR_EACH_METHOD:
        assert f"{test}[in_batch_toy] PASSED" in done.stdout

"""Every shipped recipe parses, and every cluster template has a dry run and runs valid commands."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from data_prep.download_config import SOURCES, DownloadConfig
from pipeline.config import merge, parse, parse_overrides, read_yaml

JOBS = Path(__file__).parents[2] / "jobs"
RECIPES = sorted(JOBS.glob("recipes/download/*.yaml"))
SCRIPT = JOBS / "cluster/download-slurm.sh"


def test_recipes_parse_and_the_subsets_of_dfn_are_nested():
    subsets = {}
    for recipe in RECIPES:
        config = parse(DownloadConfig, merge(read_yaml(recipe), {"source": {"table": "urls.parquet"}}))
        assert config.source.name in SOURCES
        subsets[recipe.stem] = config.subset
        for line in recipe.read_text().splitlines():
            if "--recipe" in line:
                assert f"jobs/recipes/download/{recipe.name}" in shlex.split(line.lstrip("# "))
    dfn = [subsets[name] for name in ("dfn-1.37m", "dfn-14m", "dfn-192m", "dfn-1b")]
    assert [subset.fraction for subset in dfn] == sorted(subset.fraction for subset in dfn)
    assert len({subset.seed for subset in dfn}) == 1
    assert dfn[0].fraction * 10 == pytest.approx(dfn[1].fraction)


def test_slurm_template_runs_with_a_fake_sbatch(tmp_path):
    """The fake records the command of each step, with the array variable filled in."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "sbatch").write_text(
        "#!/usr/bin/env bash\n"
        'for SLURM_ARRAY_TASK_ID in 0 3; do export SLURM_ARRAY_TASK_ID; eval "${@: -1}"; done >&2\n'
        "echo 7\n"
    )
    (bin_folder / "neuclip").write_text(
        "#!/usr/bin/env python3\nimport json, os, sys\n"
        "with open(os.environ['RECORD'], 'a') as f: f.write(json.dumps(sys.argv[1:]) + '\\n')\n"
    )
    for path in bin_folder.iterdir():
        path.chmod(0o755)
    environment = {
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "RECORD": str(tmp_path / "record"),
        "RECIPE": str(JOBS / "recipes/download/cc3m.yaml"),
        "OUTPUT": str(tmp_path / "out put"),
        "WORKERS": "4",
    }
    words = [str(SCRIPT), "source.table=a b.tsv"]
    dry = subprocess.run(words, env={**environment, "DRY_RUN": "1"}, capture_output=True, text=True, check=True)
    assert "neuclip download" in dry.stdout + dry.stderr
    assert "neuclip verify" in (dry.stdout + dry.stderr).splitlines()[-1]
    assert not (tmp_path / "record").exists(), "a dry run runs nothing"
    subprocess.run(words, env=environment, check=True)
    calls = [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]
    assert len(calls) == 6
    configs = []
    for call in calls:
        if call[0] == "verify":
            assert call[1:] == [str(tmp_path / "out put")]
            continue
        overrides = [word for word in call[3:] if "=" in word]
        configs.append(parse(DownloadConfig, merge(read_yaml(call[2]), parse_overrides(overrides))))
    assert {config.output for config in configs} == {str(tmp_path / "out put")}
    assert {config.source.table for config in configs} == {"a b.tsv"}
    assert [config.fetch.worker for config in configs] == [0, 0, 0, 3]

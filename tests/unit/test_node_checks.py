"""The checks of `neuclip doctor` report what is broken and nothing else."""

from __future__ import annotations

import os
import re
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner

from jobs.doctor import command
from pipeline.data.data_config import default_workers
from pipeline.planning import loading_check, node_checks
from pipeline.planning.loading_check import check_loading
from tests.shards import write_shards


def of(findings: list[node_checks.DoctorFinding], subject: str) -> node_checks.DoctorFinding:
    return next(finding for finding in findings if finding.subject == subject)


def test_installed_versions_are_compared_with_the_tested_ones(tmp_path: Path) -> None:
    constraints = tmp_path / "constraints.txt"
    constraints.write_text(f"torch=={metadata.version('torch')}\nnot-installed-here==1.0\n")
    findings = node_checks.check_packages(constraints)
    assert of(findings, "packages").status == "good"
    assert of(findings, "versions").status == "good"
    constraints.write_text("torch==0.0.1\n")
    version = of(node_checks.check_packages(constraints), "versions")
    assert version.status == "note"
    assert "(tested 0.0.1)" in version.found


def test_a_missing_or_outdated_requirement_is_reported_as_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        node_checks.metadata, "requires", lambda _: ["no-such-package>=1", "torch>=99", "x; extra == 'dev'"]
    )
    finding = of(node_checks.check_packages(None), "packages")
    assert finding.status == "broken"
    assert "no-such-package absent" in finding.found
    assert "needs >=99" in finding.found
    assert "x absent" not in finding.found


@pytest.mark.parametrize(
    ("cores", "ranks", "workers"), [(2, 1, 1), (1, 1, 1), (8, 1, 7), (16, 1, 12), (96, 8, 11), (192, 8, 12), (8, 8, 1)]
)
def test_workers_share_the_cores(cores: int, ranks: int, workers: int) -> None:
    assert default_workers(cores=cores, ranks=ranks) == workers


def test_loading_is_measured_on_generated_images_and_on_those_of_a_shard(tmp_path: Path) -> None:
    write_shards(tmp_path, [20])
    for manifests, what in (([], "generated, 384 px"), ([str(tmp_path)], f"of {tmp_path}")):
        finding = check_loading(manifests, ranks=1)
        assert finding.subject == "loading"
        assert what in finding.found
        assert int(re.findall(r"decodes ([\d,]+) images/s", finding.found)[0].replace(",", "")) > 10


def test_slow_loading_is_noted_with_settings_that_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading_check, "_rate", lambda _: 150.0)
    for cores, ranks, remedy in ((32, 1, "data.workers=17 data.streams=17"), (16, 8, "more cores per rank")):
        monkeypatch.setattr(loading_check.os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        finding = check_loading([], ranks=ranks)
        assert finding.status == "note"
        assert remedy in finding.remedy
    monkeypatch.setattr(loading_check, "_rate", lambda _: 900.0)
    assert check_loading([], ranks=1).status == "good"
    assert "not measured" in check_loading(["/no/such/folder"], ranks=1).found


def test_two_processes_exchange_numbers() -> None:
    finding = node_checks.check_collectives("cpu", ranks=2)
    assert finding.status == "good", finding
    assert "2 processes agree" in finding.found


def test_processes_that_cannot_connect_are_reported_as_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    finding = node_checks.check_collectives("cpu", ranks=2)
    assert finding.status == "broken"
    assert "GLOO_SOCKET_IFNAME" in finding.remedy


def test_disk_space_and_write_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = node_checks.check_disk(tmp_path / "not" / "yet" / "there", needed_gib=0.001)
    assert [finding.subject for finding in findings] == ["disk space", "disk writing"]
    assert not node_checks.broken(findings)
    assert not list(tmp_path.iterdir())
    assert of(node_checks.check_disk(tmp_path, needed_gib=1e9), "disk space").status == "broken"

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    writing = of(node_checks.check_disk(tmp_path, needed_gib=0.001), "disk writing")
    assert writing.status == "broken"
    assert "No space left" in writing.found
    assert not list(tmp_path.iterdir())


def test_data_is_opened_and_read(tmp_path: Path) -> None:
    write_shards(tmp_path, [5, 5])
    (finding,) = node_checks.check_data(str(tmp_path))
    assert finding.status == "good"
    assert "10 samples" in finding.found
    (tmp_path / "00001.tar").unlink()
    (finding,) = node_checks.check_data(str(tmp_path))
    assert finding.status == "broken"
    assert "00001.tar" in finding.found
    (finding,) = node_checks.check_data(str(tmp_path / "nowhere"))
    assert finding.status == "broken"


def test_a_small_shared_memory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = os.statvfs_result((4096, 4096, 16384, 16384, 16384, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: small)
    finding = of(node_checks.check_memory(tmp_path), "shared memory")
    assert finding.status == "broken"
    assert "--shm-size" in finding.remedy


def test_the_command_exits_with_1_when_something_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        node_checks, "check_collectives", lambda *_, **__: node_checks.DoctorFinding("gloo", "good", "agree")
    )
    arguments = ["--output", str(tmp_path), "--needs-gib", "0.001"]
    good = CliRunner().invoke(command, arguments, standalone_mode=False)
    assert good.return_value == 0, good.output
    assert "A run can start here" in good.output
    bad = CliRunner().invoke(command, [*arguments, "--data", str(tmp_path / "nowhere")], standalone_mode=False)
    assert bad.return_value == 1
    assert "1 broken" in bad.output

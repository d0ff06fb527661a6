"""The checks of `neuclip doctor` report what is broken and nothing else."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner

from jobs.doctor import command
from pipeline.planning import node_checks
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

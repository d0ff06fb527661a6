"""The checks of `neuclip doctor` report what is broken and nothing else."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from importlib import metadata

import pytest
from click.testing import CliRunner

from jobs.doctor import command
from pipeline.errors import UserError
from pipeline.planning import measured_checks, node_checks
from pipeline.planning.measured_checks import adapters, check_collectives, check_loading, check_transport
from tests.shards import write_shards


def of(findings: Iterable[node_checks.DoctorFinding], subject: str) -> node_checks.DoctorFinding:
    return next(finding for finding in findings if finding.subject == subject)


def test_installed_packages_are_compared_with_the_requirements_and_the_tested_versions(tmp_path, monkeypatch):
    constraints = tmp_path / "constraints.txt"
    for tested, status in ((metadata.version("torch"), "good"), ("0.0.1", "note")):
        constraints.write_text(f"torch=={tested}\nnot-installed-here==1.0\n")
        findings = list(node_checks.check_packages(constraints))
        assert of(findings, "packages").status == "good"
        assert of(findings, "versions").status == status
        assert ("(tested 0.0.1)" in of(findings, "versions").found) == (status == "note")
    required = ["no-such-package>=1", "torch>=99", "x; extra == 'dev'"]
    monkeypatch.setattr(node_checks.metadata, "requires", lambda _: required)
    finding = of(node_checks.check_packages(None), "packages")
    assert finding.status == "broken"
    assert "no-such-package absent" in finding.found
    assert "needs >=99" in finding.found
    assert "x absent" not in finding.found

    def absent(name: str) -> list[str]:
        """As on a GPU machine without network, whose PYTHONPATH names the folder."""
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(node_checks.metadata, "requires", absent)
    finding = of(node_checks.check_packages(None), "packages")
    assert finding.status == "good", "those of the folder's pyproject.toml are met"
    monkeypatch.setattr(node_checks, "ROOT", tmp_path)
    finding = of(node_checks.check_packages(None), "packages")
    assert finding.status == "note"
    assert "is not installed" in finding.found


def test_a_wrong_recipe_is_refused_before_the_checks(tmp_path, monkeypatch):
    monkeypatch.setattr(node_checks, "check_packages", lambda _: pytest.fail("a check ran before"))
    (tmp_path / "wrong.yaml").write_text("samples: [\n")
    for given, message in ((tmp_path / "wrong.yaml", "is not valid YAML"), (tmp_path, "is a folder. Give a YAML file")):
        with pytest.raises(UserError, match=message):
            CliRunner().invoke(command, ["--recipe", str(given)], catch_exceptions=False)


def test_loading_is_measured_on_the_images_of_a_shard(tmp_path):
    write_shards(tmp_path, [20])
    finding = check_loading(str(tmp_path), ranks=1)
    assert finding.subject == "loading"
    assert int(re.findall(r"decodes ([\d,]+) images/s", finding.found)[0].replace(",", "")) > 10
    assert "not measured" in check_loading("/no/such/folder", ranks=1).found


def test_slow_loading_is_noted_with_settings_that_help(monkeypatch):
    monkeypatch.setattr(measured_checks, "_images", lambda _: [])
    monkeypatch.setattr(measured_checks, "_rate", lambda _: 150.0)
    for cores, ranks, remedy in ((32, 1, "data.workers=17 data.streams=17"), (16, 8, "more cores per rank")):
        monkeypatch.setattr(measured_checks, "usable_cores", lambda cores=cores: cores)
        finding = check_loading("", ranks=ranks)
        assert finding.status == "note"
        assert remedy in finding.remedy
    monkeypatch.setattr(measured_checks, "_rate", lambda _: 900.0)
    assert check_loading("", ranks=1).status == "good"
    for needed, status in ((2000.0, "good"), (10_000.0, "note")):
        finding = check_loading("", ranks=1, needed=needed)
        assert finding.status == status
        assert f"the recipe's steps take {needed:,.0f}" in finding.found


def test_processes_exchange_numbers(monkeypatch):
    """Regression test: with one process, as on a machine with one GPU, the check ended with "SystemExit: 0"."""
    for ranks in (1, 2):
        finding = check_collectives("cpu", ranks=ranks)
        assert finding.status == "good", finding
        assert f"{ranks} processes agree" in finding.found
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    finding = check_collectives("cpu", ranks=2)
    assert finding.status == "broken"
    assert "GLOO_SOCKET_IFNAME" in finding.remedy


def test_tcp_between_nodes_with_infiniband_is_broken(tmp_path):
    log = "node1:7:9 [0] NCCL INFO NET/IB : No device found.\nnode1:7:9 [0] NCCL INFO Using network {}\n"
    for names, network, status in (
        (["mlx5_0"], "Socket", "broken"),
        (["mlx5_1"], "IB", "good"),
        ([], "Socket", "good"),
        (["mlx5_2"], "unknown", "note"),  # NCCL's log has no such line
        (["mlx5_down"], "Socket", "note"),
    ):
        folder = tmp_path / f"{network}-{''.join(names)}"
        for name in names:
            port = folder / name / "ports" / "1"
            port.mkdir(parents=True)
            (port / "state").write_text("1: DOWN\n" if name == "mlx5_down" else "4: ACTIVE\n")
            (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
        said = "" if network == "unknown" else log.format(network)
        finding = check_transport(said, "2 processes agree", network=adapters(folder))
        assert finding.status == status
        assert f"NET/{network}" in finding.found
        assert all(name in finding.found for name in names)
        assert ("50 GB/s together" in finding.found) == (network == "IB")


def test_the_image_has_the_libraries_of_infiniband():
    """NCCL opens them by name at run time: nothing else would miss them."""
    text = (node_checks.ROOT / "jobs/cluster/Dockerfile").read_text()
    installed = re.findall(r"apt-get install[^&]*", text)[0].split()
    assert {"libibverbs1", "ibverbs-providers", "librdmacm1"} <= set(installed)


def test_disk_space_and_write_access(tmp_path, monkeypatch):
    findings = list(node_checks.check_disk(tmp_path / "not" / "yet" / "there", needed_gib=0.001))
    assert [finding.subject for finding in findings] == ["disk space", "disk writing"]
    assert all(finding.status != "broken" for finding in findings)
    assert not list(tmp_path.iterdir())
    assert of(node_checks.check_disk(tmp_path, needed_gib=1e9), "disk space").status == "broken"

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    writing = of(node_checks.check_disk(tmp_path, needed_gib=0.001), "disk writing")
    assert writing.status == "broken"
    assert "No space left" in writing.found
    assert not list(tmp_path.iterdir())


def test_data_is_opened_and_read(tmp_path):
    write_shards(tmp_path, [5, 5])
    finding = node_checks.check_data(str(tmp_path))
    assert finding.status == "good"
    assert "10 samples" in finding.found
    for needed, status in ((1.0, "good"), (1e12, "note")):
        finding = node_checks.check_data(str(tmp_path), needed=needed)
        assert finding.status == status
        assert f"{needed:,.0f} samples/s on this node" in finding.found
    (tmp_path / "00001.tar").unlink()
    finding = node_checks.check_data(str(tmp_path))
    assert finding.status == "broken"
    assert "00001.tar" in finding.found
    finding = node_checks.check_data(str(tmp_path / "nowhere"))
    assert finding.status == "broken"


def test_a_small_shared_memory_is_reported(tmp_path, monkeypatch):
    small = os.statvfs_result((4096, 4096, 16384, 16384, 16384, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: small)
    finding = of(node_checks.check_memory(tmp_path), "shared memory")
    assert finding.status == "broken"
    assert "--shm-size" in finding.remedy


def test_the_command_exits_with_1_when_something_is_broken(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "pipeline.planning.measured_checks.check_collectives",
        lambda *_, **__: node_checks.DoctorFinding("gloo", "good", "agree"),
    )
    arguments = ["--output", str(tmp_path), "--needs-gib", "0.001"]
    good = CliRunner().invoke(command, arguments, standalone_mode=False)
    assert good.return_value == 0, good.output
    assert "A run can start here" in good.output
    bad = CliRunner().invoke(command, [*arguments, "--data", str(tmp_path / "nowhere")], standalone_mode=False)
    assert bad.return_value == 1
    assert "1 broken" in bad.output
    endless = CliRunner().invoke(command, ["--output", str(tmp_path), "--needs-gib", "nan"])
    assert endless.exit_code == 2
    assert "'nan' is not a number of 0 or more." in endless.output

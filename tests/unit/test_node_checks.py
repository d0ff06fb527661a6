"""The checks of `neuclip doctor` report what is broken and nothing else."""

import os
import re
import shutil
from importlib import metadata

import pytest
from click.testing import CliRunner

from jobs import doctor
from pipeline.planning import DoctorFinding
from tests.shards import write_shards


def test_installed_packages_are_compared_with_the_tested_versions(tmp_path):
    constraints = tmp_path / "constraints.txt"
    assert [finding.subject for finding in doctor.check_versions(constraints)] == ["python"]
    for tested, status in ((metadata.version("torch"), "good"), ("0.0.1", "note")):
        constraints.write_text(f"torch=={tested}\nnot-installed-here==1.0\n")
        _, finding = doctor.check_versions(constraints)
        assert (finding.subject, finding.status) == ("versions", status)
        assert ("(tested 0.0.1)" in finding.found) == (status == "note")


def test_processes_exchange_numbers(monkeypatch):
    finding = doctor.check_collectives()
    assert finding.status == "good", finding
    assert "2 processes agree" in finding.found
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    finding = doctor.check_collectives()
    assert finding.status == "broken"
    assert "GLOO_SOCKET_IFNAME" in finding.remedy


def test_the_image_has_the_libraries_of_infiniband():
    """NCCL opens them by name at run time: nothing else would miss them."""
    text = (doctor.ROOT / "jobs/cluster/Dockerfile").read_text()
    installed = re.findall(r"apt-get install[^&]*", text)[0].split()
    assert {"libibverbs1", "ibverbs-providers", "librdmacm1"} <= set(installed)


def test_full_and_read_only_disks_and_small_shared_memory_are_broken(tmp_path, monkeypatch):
    disk = lambda: doctor.check_disk(tmp_path / "not" / "yet" / "there")  # noqa: E731
    small = os.statvfs_result((4096, 4096, 16384, 16384, 16384, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: small)
    assert "0.1 GiB free at" in disk().found
    (memory,) = doctor.check_shared_memory(tmp_path)
    for finding in (disk(), memory):
        assert finding.status == "broken"
        assert finding.remedy
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**40, 0, 2**40))
    assert disk().status == "good"
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert (disk().status, disk().found) == ("broken", f"{tmp_path} cannot be written")
    assert not list(tmp_path.iterdir())


def test_data_is_opened_and_read(tmp_path):
    write_shards(tmp_path, [5, 5])
    finding = doctor.check_data(str(tmp_path))
    assert finding.status == "good"
    assert re.search(r"10 samples; one reader reaches \S+ MiB/s, \S+ samples/s", finding.found)
    (tmp_path / "00001.tar").unlink()
    for folder, said in ((tmp_path, "00001.tar"), (tmp_path / "nowhere", "nowhere")):
        finding = doctor.check_data(str(folder))
        assert finding.status == "broken"
        assert said in finding.found


@pytest.mark.parametrize("broken", [False, True])
def test_the_command_exits_with_1_when_something_is_broken(tmp_path, monkeypatch, broken):
    monkeypatch.setattr(doctor, "check_collectives", lambda: DoctorFinding("gloo", "good", "agree"))
    monkeypatch.setattr(doctor, "NEEDED_GIB", 0.001)
    arguments = ["--output", str(tmp_path), *(["--data", str(tmp_path / "nowhere")] if broken else [])]
    done = CliRunner().invoke(doctor.command, arguments, standalone_mode=False)
    assert done.return_value == broken, done.output
    assert ("1 broken" if broken else "A run can start here") in done.output

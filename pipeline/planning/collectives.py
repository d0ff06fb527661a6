"""Whether this node's processes exchange data, and how fast compared with what its links allow (nvidia-smi, sysfs)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.distributed.launch import without_launcher
from pipeline.planning.node_checks import ROOT, DoctorFinding

ROUND_TRIP_SECONDS = 180
LEAST_SHARE = 0.4
"""Of what the links allow; a large all-reduce reaches more where GPUs exchange data directly (an estimate)."""


@dataclass(frozen=True)
class Link:
    """The slowest connection of a GPU to the others of its node."""

    kind: str
    """"NVLink" or "PCIe"."""
    gigabytes: float
    """Per second, in one direction."""


def check_collectives(device: Literal["cpu", "cuda"], *, ranks: int) -> DoctorFinding:
    """Let two or more processes exchange numbers: by gloo on the CPU, by NCCL on GPUs."""
    backend = "NCCL" if device == "cuda" else "gloo"
    command = [sys.executable, "-m", "pipeline.distributed.collective_check", device, str(ranks)]
    environment = without_launcher(os.environ) | {"OMP_NUM_THREADS": "1"}
    environment.pop("NCCL_DEBUG_FILE", None)  # what NCCL says is read below
    environment |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"} if device == "cuda" else {}
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=ROUND_TRIP_SECONDS,
            cwd=ROOT,
        )
    except subprocess.TimeoutExpired:
        return DoctorFinding(
            backend,
            "broken",
            f"{ranks} processes did not connect within {ROUND_TRIP_SECONDS} s",
            _network_hint(backend),
        )
    reported = re.search(r"round trip: (.*)", done.stdout)
    if done.returncode or reported is None:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return DoctorFinding(backend, "broken", f"{ranks} processes failed: {last[:200]}", _network_hint(backend))
    if device == "cuda":
        figures = reported[1] if ranks > 1 else "one GPU, which exchanges nothing within the node"
        return check_transport(done.stdout + done.stderr, figures, link=gpu_link(), network=adapters())
    return DoctorFinding(backend, "good", reported[1])


def check_transport(
    log: str, figures: str, *, link: Link | None = None, network: Mapping[str, float] | None = None
) -> DoctorFinding:
    """Which transport between nodes NCCL has chosen, whether this node has a better one, and how fast its GPUs are.

    Args:
        log: What NCCL printed at NCCL_DEBUG=INFO.
        figures: The measured all-reduce, which within a node goes over NVLink or PCIe.
        link: What connects the GPUs; None: unknown.
        network: Gbit/s of the InfiniBand and RoCE adapters.
    """
    chosen, network = re.search(r"Using network (\S+)", log), network or {}
    transport, speed = chosen[1] if chosen else "unknown", sum(network.values())
    names = ", ".join(network)
    found = f"{figures}; between nodes NCCL would use NET/{transport}"
    if network and not speed:
        remedy = "see `ibstat` or `rdma link`; nodes exchange data by TCP until a port is up"
        return DoctorFinding("NCCL", "note", f"{found}; no port of {names} is active", remedy)
    if network and transport == "unknown":
        remedy = "run the second check of 'Before you rent 64 GPUs' (docs/cluster.md), whose log shows it"
        return DoctorFinding("NCCL", "note", f"{found}: it has not said which; this node has {names}", remedy)
    if network and transport == "Socket":
        return DoctorFinding(
            "NCCL",
            "broken",
            f"{found} (TCP), although this node has {names}",
            "install libibverbs1 ibverbs-providers librdmacm1; a container needs --device=/dev/infiniband --ulimit "
            "memlock=-1; unset NCCL_IB_DISABLE",
        )
    found += f" ({names}: {speed / 8:,.0f} GB/s together)" if network else ""
    measured = re.search(r"(\d+) processes .* at ([\d,]+) MiB/s", figures)
    if link is None or measured is None:
        return DoctorFinding("NCCL", "good", found)
    ranks, rate = int(measured[1]), float(measured[2].replace(",", "")) * 2**20 / 1e9
    share = rate * 2 * (ranks - 1) / ranks / link.gigabytes  # each rank sends 2 (K - 1) / K times the data
    found += f"; this is {share:.0%} of what {link.kind} allows ({link.gigabytes:,.0f} GB/s per GPU)"
    if share >= LEAST_SHARE:
        return DoctorFinding("NCCL", "good", found)
    return DoctorFinding(
        "NCCL",
        "note",
        found,
        "see `nvidia-smi topo -m` and NCCL_DEBUG=INFO; unset NCCL_P2P_DISABLE and NCCL_SHM_DISABLE, give a container "
        "--ipc=host, and switch off ACS and IOMMU where GPUs are connected by PCIe",
    )


def _network_hint(backend: str) -> str:
    if backend == "NCCL":
        return "run again with NCCL_DEBUG=INFO; check the driver, NCCL_SOCKET_IFNAME, NCCL_IB_DISABLE and /dev/shm"
    return "check that 127.0.0.1 is reachable and that GLOO_SOCKET_IFNAME names an interface that exists"


def gpu_link(pci: Path = Path("/sys/bus/pci/devices")) -> Link | None:
    """NVLink if it connects every pair of GPUs, else PCIe; None for a single GPU, or if the speed is unknown.

    Args:
        pci: Folder of the PCI devices.
    """
    rows = [line.split() for line in _nvidia_smi("topo", "-m").splitlines() if re.match(r"GPU\d+\s", line)]
    pairs = [row[1 + j] for i, row in enumerate(rows) for j in range(len(rows)) if j != i and len(row) > 1 + j]
    if not pairs:
        return None
    if all(pair.startswith("NV") for pair in pairs):
        gpus = re.split(r"^GPU \d+:", _nvidia_smi("nvlink", "--status"), flags=re.MULTILINE)[1:]
        sums = [sum(map(float, re.findall(r"Link \d+: ([\d.]+) GB/s", gpu)), 0.0) for gpu in gpus]
        slowest = min(sums, default=0.0)
        return Link("NVLink", slowest) if slowest else None
    speeds = []
    for name in _nvidia_smi("--query-gpu=pci.bus_id", "--format=csv,noheader").split():
        device = pci / name.lower()[-12:]  # nvidia-smi writes the domain with eight digits
        with suppress(OSError, ValueError, IndexError):  # an idle GPU lowers its current speed, but not the width
            transfers = float((device / "max_link_speed").read_text().split()[0])
            speeds.append(transfers * int((device / "current_link_width").read_text()) / 8 * 128 / 130)
    return Link("PCIe", min(speeds)) if speeds else None


def adapters(folder: Path = Path("/sys/class/infiniband")) -> Mapping[str, float]:
    """Gbit/s of the node's InfiniBand and RoCE adapters, their active ports together."""
    found: dict[str, float] = {}
    for device in sorted(folder.iterdir()) if folder.is_dir() else ():
        found[device.name] = 0.0
        for port in device.glob("ports/*"):
            with suppress(OSError, ValueError, IndexError):
                if "ACTIVE" in (port / "state").read_text():
                    found[device.name] += float((port / "rate").read_text().split()[0])
    return found


def _nvidia_smi(*arguments: str) -> str:
    """What it prints, without colours; empty if it does not run."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return re.sub(r"\x1b\[[\d;]*m", "", done.stdout) if done.returncode == 0 else ""

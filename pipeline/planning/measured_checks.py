"""The checks of `neuclip doctor` that measure: collectives between this node's processes, and its loading workers.

How fast processes exchange data is compared with what the node's links allow (nvidia-smi, sysfs). Loading decodes
images for a second and recommends `data.workers`.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.cores import usable_cores
from pipeline.data.data_config import LEAST_LOADING, CropConfig, default_workers
from pipeline.distributed.launch import without_launcher
from pipeline.errors import UserError
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
    hint = "check that 127.0.0.1 is reachable and that GLOO_SOCKET_IFNAME names an interface that exists"
    if device == "cuda":
        hint = "run again with NCCL_DEBUG=INFO; check the driver, NCCL_SOCKET_IFNAME, NCCL_IB_DISABLE and /dev/shm"
    environment = without_launcher(os.environ) | {"OMP_NUM_THREADS": "1"}
    environment.pop("NCCL_DEBUG_FILE", None)  # what NCCL says is read below
    environment |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"} if device == "cuda" else {}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=ROUND_TRIP_SECONDS, cwd=ROOT
        )
    except subprocess.TimeoutExpired:
        late = f"{ranks} processes did not connect within {ROUND_TRIP_SECONDS} s"
        return DoctorFinding(backend, "broken", late, hint)
    reported = re.search(r"round trip: (.*)", done.stdout)
    if done.returncode or reported is None:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return DoctorFinding(backend, "broken", f"{ranks} processes failed: {last[:200]}", hint)
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
    found = f"{figures}; between nodes NCCL would use NET/{transport}" if chosen or network else figures
    if network and not speed:
        remedy = "see `ibstat` or `rdma link`; nodes exchange data by TCP until a port is up"
        return DoctorFinding("NCCL", "note", f"{found}; no port of {names} is active", remedy)
    if network and transport == "unknown":
        remedy = "run the second check of 'Before you rent 64 GPUs' (docs/cluster.md), whose log shows it"
        return DoctorFinding("NCCL", "note", f"{found}: it has not said which; this node has {names}", remedy)
    if network and transport == "Socket":
        remedy = (
            "install libibverbs1 ibverbs-providers librdmacm1; a container needs --device=/dev/infiniband --ulimit "
            "memlock=-1; unset NCCL_IB_DISABLE"
        )
        return DoctorFinding("NCCL", "broken", f"{found} (TCP), although this node has {names}", remedy)
    found += f" ({names}: {speed / 8:,.0f} GB/s together)" if network else ""
    measured = re.search(r"(\d+) processes .* at ([\d,]+) MiB/s", figures)
    if link is None or measured is None:
        return DoctorFinding("NCCL", "good", found)
    ranks, rate = int(measured[1]), float(measured[2].replace(",", "")) * 2**20 / 1e9
    share = rate * 2 * (ranks - 1) / ranks / link.gigabytes  # each rank sends 2 (K - 1) / K times the data
    found += f"; this is {share:.0%} of what {link.kind} allows ({link.gigabytes:,.0f} GB/s per GPU)"
    if share >= LEAST_SHARE:
        return DoctorFinding("NCCL", "good", found)
    remedy = (
        "see `nvidia-smi topo -m` and NCCL_DEBUG=INFO; unset NCCL_P2P_DISABLE and NCCL_SHM_DISABLE, give a container "
        "--ipc=host, and switch off ACS and IOMMU where GPUs are connected by PCIe"
    )
    return DoctorFinding("NCCL", "note", found, remedy)


def gpu_link(pci: Path = Path("/sys/bus/pci/devices")) -> Link | None:
    """NVLink if it connects every pair of GPUs, else PCIe; None for a single GPU, or if the speed is unknown."""
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


SIDE, STORED, IMAGES = 224, 384, 32
"""Pixels that a model reads, shorter side of the generated images, and how many images are decoded in turn."""
ENOUGH = 2500
"""Images per second and GPU, an estimate: ViT-B/16 (3 x 41 GFLOP a pair) at 31% of an H100's peak of 989 TFLOP/s.
Smaller models need more."""


def check_loading(
    manifests: Sequence[str], *, ranks: int, needed: float | None = None, **allowed: bool
) -> DoctorFinding:
    """Decode in one process for a second, and say how many images the default number of workers gives each rank.

    Args:
        manifests: Images are taken from the first shard of the first of these; without any, they are generated.
        ranks: Processes that train on this node: one per GPU.
        needed: Images per second that the steps of one GPU take; None: ENOUGH.
        allowed: Consents, as for `load_manifest`.
    """
    cores = usable_cores()
    try:
        images, what = _images(manifests, **allowed)
    except (UserError, OSError) as error:
        return DoctorFinding("loading", "note", f"not measured: {error}", "check the folder given by --data")
    workers = default_workers(cores // ranks)
    rate = _rate(images)
    found = (
        f"one process decodes {rate:,.0f} images/s ({what}); with the default data.workers, "
        f"{workers} per rank ({ranks} on {cores} cores), up to {workers * rate:,.0f} images/s per rank"
    )
    if needed is not None:
        found += f"; the recipe's steps take {needed:,.0f}"
    needed = ENOUGH if needed is None else LEAST_LOADING * needed
    streams = f"data.streams of at least {workers * ranks} lets all of them work (the default is 64)"
    if workers * rate < needed and cores // ranks - 1 > workers:
        more = min(cores // ranks - 1, math.ceil(needed / max(1.0, rate)))
        return DoctorFinding("loading", "note", found, f"data.workers={more} data.streams={more * ranks} or more")
    if workers * rate < needed:
        remedy = (
            "more cores per rank, images stored at about 256 px, or data.decoding=scaled for those of 448 px and more"
        )
        return DoctorFinding("loading", "note", found, remedy)
    return DoctorFinding("loading", "good", f"{found}; {streams}")


def _rate(images: Sequence[bytes]) -> float:
    """Images per second of CPU time in one thread, within a second: decoded, cropped and resized as in training."""
    import torch

    from pipeline.data.loading.decode import ImageDecoder

    decoder = ImageDecoder(size=SIDE, crop=CropConfig(), mode="fast", max_pixels=178_956_970)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    try:
        for image in images[:2]:
            decoder(image, state=0)
        start, until = time.process_time(), time.monotonic() + 5
        for count, image in enumerate(itertools.cycle(images), start=1):
            decoder(image, state=count)
            spent = time.process_time() - start
            if spent > 1 or time.monotonic() > until:
                return count / spent
    finally:
        torch.set_num_threads(threads)
    raise AssertionError("there are images")


def _images(manifests: Sequence[str], **allowed: bool) -> tuple[list[bytes], str]:
    """Encoded images, and what they are."""
    from pipeline.data.shards.manifest_format import load_manifest
    from pipeline.data.shards.storage import open_shard
    from pipeline.data.shards.tar_reader import FORMAT_SUFFIXES, DamagedTar, members

    if not manifests:
        return _generated(), f"generated, {STORED} px"
    manifest = load_manifest(manifests[0], **allowed)
    try:
        with open_shard(manifest.url(manifest.shards[0])) as file:
            wanted = members(file, wanted=lambda suffix: suffix.rpartition(".")[2] in FORMAT_SUFFIXES)
            found = list(itertools.islice((payload for _, payload in wanted if payload), IMAGES))
    except DamagedTar as error:
        raise UserError(f"the first shard of {manifests[0]} {error}") from error
    if not found:
        raise UserError(f"the first shard of {manifests[0]} has no images")
    return found, f"of {manifests[0]}"


def _generated() -> list[bytes]:
    """JPEGs that take about as many bits per pixel as photographs do."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    height, width = STORED, STORED * 4 // 3
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1.0
    found = []
    for _ in range(4):
        phases: Any = np.exp(2j * np.pi * rng.random((3, *frequency.shape)))
        waves = np.fft.irfft2(phases / frequency**1.5, s=(height, width)).transpose(1, 2, 0)
        out = io.BytesIO()
        pixels = np.clip(128 + 55 * waves / waves.std(), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(out, "JPEG", quality=90)
        found.append(out.getvalue())
    return found

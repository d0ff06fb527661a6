"""The checks of `neuclip doctor` that measure: collectives between this node's processes, and its loading workers.

Loading decodes images for a second and recommends `data.workers`.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pipeline.cores import usable_cores
from pipeline.data.data_config import LEAST_LOADING, CropConfig, default_workers
from pipeline.distributed.launch import without_launcher
from pipeline.errors import UserError
from pipeline.planning.node_checks import ROOT, DoctorFinding

ROUND_TRIP_SECONDS = 180


def check_collectives(device: Literal["cpu", "cuda"], *, ranks: int) -> DoctorFinding:
    """Let two or more processes exchange numbers: by gloo on the CPU, by NCCL on GPUs."""
    backend, on_gpus = ("NCCL", True) if device == "cuda" else ("gloo", False)
    command = [sys.executable, "-m", "pipeline.distributed.collective_check", device, str(ranks)]
    hint = "check that 127.0.0.1 is reachable and that GLOO_SOCKET_IFNAME names an interface that exists"
    if on_gpus:
        hint = "run again with NCCL_DEBUG=INFO; check the driver, NCCL_SOCKET_IFNAME, NCCL_IB_DISABLE and /dev/shm"
    environment = without_launcher(os.environ) | {"OMP_NUM_THREADS": "1"}
    environment.pop("NCCL_DEBUG_FILE", None)  # what NCCL says is read below
    environment |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"} if on_gpus else {}
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
    if not on_gpus:
        return DoctorFinding(backend, "good", reported[1])
    figures = reported[1] if ranks > 1 else "one GPU, which exchanges nothing within the node"
    return check_transport(done.stdout + done.stderr, figures, network=adapters())


def check_transport(log: str, figures: str, *, network: Mapping[str, float]) -> DoctorFinding:
    """Which transport between nodes NCCL has chosen, and whether this node has a better one.

    `log` is what NCCL printed at NCCL_DEBUG=INFO, `figures` are those of the all-reduce, which within a node goes over
    NVLink or PCIe, and `network` has the Gbit/s of the InfiniBand and RoCE adapters.
    """
    chosen = re.search(r"Using network (\S+)", log)
    transport, speed, names = chosen[1] if chosen else "unknown", sum(network.values()), ", ".join(network)
    found = f"{figures}; between nodes NCCL would use NET/{transport}" if chosen or network else figures
    if network and not speed:
        remedy = "see `ibstat` or `rdma link`; nodes exchange data by TCP until a port is up"
        return DoctorFinding("NCCL", "note", f"{found}; no port of {names} is active", remedy)
    if network and not chosen:
        remedy = "run the second check of 'Before you rent 64 GPUs' (docs/cluster.md), whose log shows it"
        return DoctorFinding("NCCL", "note", f"{found}: it has not said which; this node has {names}", remedy)
    if network and transport == "Socket":
        remedy = (
            "install libibverbs1 ibverbs-providers librdmacm1; a container needs --device=/dev/infiniband --ulimit "
            "memlock=-1; unset NCCL_IB_DISABLE"
        )
        return DoctorFinding("NCCL", "broken", f"{found} (TCP), although this node has {names}", remedy)
    return DoctorFinding("NCCL", "good", found + (f" ({names}: {speed / 8:,.0f} GB/s together)" if network else ""))


def adapters(folder: Path = Path("/sys/class/infiniband")) -> Mapping[str, float]:
    """Gbit/s of the node's InfiniBand and RoCE adapters, their active ports together."""
    speeds: dict[str, float] = {}
    for device in sorted(folder.iterdir()) if folder.is_dir() else ():
        speeds[device.name] = 0.0
        for port in device.glob("ports/*"):
            with suppress(OSError, ValueError, IndexError):
                if "ACTIVE" in (port / "state").read_text():
                    speeds[device.name] += float((port / "rate").read_text().split()[0])
    return speeds


SIDE, IMAGES = 224, 32
"""Pixels that a model reads, and how many images are decoded in turn."""
ENOUGH = 2500
"""Images per second and GPU, an estimate: ViT-B/16 (3 x 41 GFLOP a pair) at 31% of an H100's peak of 989 TFLOP/s.
Smaller models need more."""


def check_loading(manifest: str, *, ranks: int, needed: float | None = None, **allowed: bool) -> DoctorFinding:
    """Decode images of the first shard for a second, and say how many the default number of workers gives each rank.

    `ranks` train on this node, one per GPU, whose steps take `needed` images per second (None: ENOUGH); `allowed` are
    consents, as for `load_manifest`.
    """
    cores = usable_cores()
    try:
        images = _images(manifest, **allowed)
    except (UserError, OSError) as error:
        return DoctorFinding("loading", "note", f"not measured: {error}", "check the folder given by --data")
    workers, rate = default_workers(cores // ranks), _rate(images)
    found = (
        f"one process decodes {rate:,.0f} images/s; with the default data.workers, "
        f"{workers} per rank ({ranks} on {cores} cores), up to {workers * rate:,.0f} images/s per rank"
    )
    if needed is not None:
        found += f"; the recipe's steps take {needed:,.0f}"
    needed = ENOUGH if needed is None else LEAST_LOADING * needed
    if workers * rate >= needed:
        streams = f"data.streams of at least {workers * ranks} lets all of them work (by default at most 64)"
        return DoctorFinding("loading", "good", f"{found}; {streams}")
    remedy = "more cores per rank, images stored at about 256 px, or data.decoding=scaled for those of 448 px and more"
    if cores // ranks - 1 > workers:
        more = min(cores // ranks - 1, math.ceil(needed / max(1.0, rate)))
        remedy = f"data.workers={more} data.streams={more * ranks} or more"
    return DoctorFinding("loading", "note", found, remedy)


def _rate(images: Sequence[bytes]) -> float:
    """Images per second of CPU time in one thread, within a second: decoded, cropped and resized as in training."""
    import torch

    from pipeline.data.loading.decode import ImageDecoder

    decoder = ImageDecoder(size=SIDE, crop=CropConfig(), mode="fast", max_pixels=178_956_970)
    threads, count, spent = torch.get_num_threads(), 0, 0.0
    torch.set_num_threads(1)  # as in a worker
    try:
        for image in images[:2]:
            decoder(image, state=0)
        start, until = time.process_time(), time.monotonic() + 5
        while spent <= 1 and time.monotonic() <= until:
            decoder(images[count % len(images)], state=count)
            count, spent = count + 1, time.process_time() - start
        return count / spent
    finally:
        torch.set_num_threads(threads)


def _images(manifest: str, **allowed: bool) -> list[bytes]:
    """Encoded images."""
    from pipeline.data.shards.manifest_format import load_manifest
    from pipeline.data.shards.storage import open_shard
    from pipeline.data.shards.tar_reader import FORMAT_SUFFIXES, DamagedTar, members

    loaded = load_manifest(manifest, **allowed)
    try:
        with open_shard(loaded.url(loaded.shards[0])) as file:
            wanted = members(file, wanted=lambda suffix: suffix.rpartition(".")[2] in FORMAT_SUFFIXES)
            payloads = list(itertools.islice((payload for _, payload in wanted if payload), IMAGES))
    except DamagedTar as error:
        raise UserError(f"the first shard of {manifest} {error}") from error
    if not payloads:
        raise UserError(f"the first shard of {manifest} has no images")
    return payloads

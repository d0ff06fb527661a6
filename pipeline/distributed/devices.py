"""Which device a rank computes on, and whether the devices of all ranks fit together.

Before the ranks join a process group, rank 0 compares their hosts, backends and GPUs, so that a message names a node
that would compute on its CPU while the others wait for it in NCCL, or two ranks on one GPU.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.cores import cores_of_rank, cpu_quota
from pipeline.errors import UserError, in_a_line

REPORT_AFTER = timedelta(minutes=2)
"""Ranks that have not come by then are reported."""
NAMED = 8
"""A message names at most as many ranks."""


@dataclass(frozen=True, kw_only=True)
class RankDevice:
    """What a rank tells the others about itself."""

    rank: int
    host: str = field(default_factory=socket.gethostname)
    backend: str
    """"nccl" or "gloo"."""
    device: str
    """The GPU's name, or "CPU"."""
    gpu: str = ""
    """The GPU's UUID; empty on a CPU."""
    cores: list[int] = field(default_factory=lambda: sorted(os.sched_getaffinity(0)))
    """Cores of its affinity."""
    problem: str = ""
    """Why it has no device; empty if it has one."""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} ({self.device}, {self.backend})"


def choose_device(name: str, *, local_rank: int) -> torch.device:
    """This rank's device by its `name`, "auto", "cpu" or "cuda"; it becomes torch's current one.

    Where torch sees a single GPU, every rank takes it: `srun --gpus-per-task=1` shows each rank its own.

    Raises:
        UserError: There is no such device, or it cannot be used.
    """
    if name == "cpu":
        return torch.device("cpu")
    host = socket.gethostname()
    if not torch.cuda.is_available():
        if name == "cuda":
            raise UserError(
                f"engine.device = 'cuda', but torch sees no CUDA device here ({host}): use 'auto' or 'cpu', or look at "
                "`nvidia-smi` and `neuclip doctor` on this node."
            )
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count > 1 and local_rank >= count:
        raise UserError(
            f"Local rank {local_rank} on {host} has no GPU of its own: torch sees {count}. Start at most one process "
            "per GPU."
        )
    index = local_rank if count > 1 else 0
    try:
        torch.cuda.set_device(index)  # from CUDA 12 on, this takes hold of the GPU
    except RuntimeError as error:
        raise UserError(
            f"GPU {index} of {host} cannot be used: {in_a_line(error)}. Look at `nvidia-smi` and `neuclip "
            "doctor` on this node: end the program that holds the GPU, or leave the node out."
        ) from error
    return torch.device("cuda", index)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device. Through page-locked memory: for other memory the host may wait for the GPU."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


def exchange_devices(store: dist.Store, own: RankDevice, *, ranks: int, limit: timedelta) -> int:
    """Tell the other ranks about this one through their store. Returns this rank's number of cores.

    Rank 0 judges, after `REPORT_AFTER` also a contradiction among those that have come.

    Raises:
        UserError: The ranks do not fit together, or some have not come within `limit`.
    """
    keys = [f"neuclip/rank-{rank}" for rank in range(ranks)]
    store.set(keys[own.rank], json.dumps(asdict(own)))
    if own.rank == 0:
        waited = timedelta()
        for until in sorted({min(REPORT_AFTER, limit), limit}):
            with suppress(dist.DistStoreError):  # the time is up
                store.wait(keys, until - waited)
            waited = until
            present = [RankDevice(**json.loads(store.get(key))) for key in keys if store.check([key])]
            missing = _missing(present, ranks=ranks, seconds=until.total_seconds())
            problem = contradiction(present) or missing
            if not missing or problem != missing:
                break
            if until < limit:
                print(f"Waiting for the other ranks. {missing}", file=sys.stderr, flush=True)
        cores = []
        for rank in present:
            others = [other.cores for other in present if other.host == rank.host and other is not rank]
            cores.append(cores_of_rank(rank.cores, others=others, quota=cpu_quota()))
        store.set("neuclip/verdict", json.dumps({"problem": problem, "cores": cores}))
    store.wait(["neuclip/verdict"], limit + timedelta(seconds=30))
    verdict = json.loads(store.get("neuclip/verdict"))
    if not verdict["problem"]:
        return int(verdict["cores"][own.rank])
    deadline = time.monotonic() + 10.0
    with suppress(dist.DistError):
        readers = store.add("neuclip/read", 1)
        while own.rank == 0 and readers < len(present) and time.monotonic() < deadline:  # it ends with this process
            time.sleep(0.1)
            readers = store.add("neuclip/read", 0)
    raise UserError(verdict["problem"])


def _missing(present: Sequence[RankDevice], *, ranks: int, seconds: float) -> str:
    """Which ranks have not come; empty if all have."""
    missing = sorted(set(range(ranks)) - {rank.rank for rank in present})
    if not missing:
        return ""
    places = [f"{host} with {count}" for host, count in sorted(Counter(rank.host for rank in present).items())]
    return (
        f"{len(present)} of {ranks} ranks have come after {seconds:.0f} s ({_shortened(places)}); missing: "
        f"{_shortened(list(map(str, missing)))}. Look at the nodes that are not named here: what their ranks printed "
        "says why."
    )


def contradiction(ranks: Sequence[RankDevice]) -> str:
    """Why these ranks cannot train together; empty if they can."""
    if broken := [rank for rank in ranks if rank.problem]:
        nodes = sorted({rank.host for rank in broken} - {broken[0].host})
        return broken[0].problem + (f" The same on {_shortened(nodes)}." if nodes else "")
    backends = {backend: [rank for rank in ranks if rank.backend == backend] for backend in ("gloo", "nccl")}
    if all(backends.values()):
        odd, others = sorted(backends.values(), key=len)
        return (
            f"The ranks do not compute on the same kind of device. The odd ones: {_shortened([str(r) for r in odd])}. "
            f"The other {len(others)} are like {others[0]}. Look at `nvidia-smi` and `neuclip doctor` on "
            f"{_shortened(sorted({r.host for r in odd}))}, or set engine.device for all."
        )
    holders: dict[str, RankDevice] = {}  # by a number that no two GPUs share: containers of a node have their own names
    for rank in ranks:
        other = holders.setdefault(rank.gpu, rank) if rank.gpu else rank
        if other is not rank:
            places = rank.host if other.host == rank.host else f"{other.host} and {rank.host}"
            return (
                f"Ranks {other.rank} and {rank.rank} on {places} have the same GPU ({rank.device}, {rank.gpu}): "
                "start at most one process per GPU, or give each task its own (srun --gpus-per-task=1)."
            )
    return ""


def _shortened(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more

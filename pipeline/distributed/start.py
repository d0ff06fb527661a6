"""How a process joins the ranks of its run: environment of the launcher, store, devices, process group.

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pipeline.cores import cores_of_rank, cpu_quota
from pipeline.distributed.devices import choose_device, keep_fp32
from pipeline.distributed.exit_record import EXIT_STALLED
from pipeline.distributed.timing import Phases
from pipeline.distributed.world import World, free_port
from pipeline.errors import UserError, in_a_line, too_many_files, too_many_files_message

START_LIMIT = timedelta(minutes=10)
"""For all ranks to come; imports from a busy shared file system take minutes."""
REPORT_AFTER = timedelta(minutes=2)
"""Ranks that have not come by then are reported."""
NAMED = 8
"""A message names at most as many ranks."""


class LostRank(UserError):
    """Another rank is gone, or cannot be reached."""

    exit_code = EXIT_STALLED


@contextmanager
def start_world(*, timeout_minutes: float = 30.0, device: str = "auto") -> Iterator[World]:
    """Join the process group that the launcher's environment describes, and leave it at the end.

    Works under `deepspeed`, `torchrun` and `srun`, and in a plain process, which is a group of one.

    Args:
        timeout_minutes: Limit for a collective.
        device: "auto" (CUDA if there is a GPU), "cpu" or "cuda".

    Raises:
        UserError: The launcher's environment is incomplete, the meeting point is taken or cannot be reached, or the
            ranks' devices do not fit together.
        LostRank: The process group cannot be made.
    """
    names, launched = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"), "WORLD_SIZE" in os.environ
    if launched and (missing := [name for name in names if name not in os.environ]):
        raise UserError(
            f"The launcher set WORLD_SIZE but not {', '.join(missing)}: start with deepspeed, torchrun or srun."
        )
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if not launched and int(tasks) > 1:
        raise UserError(
            f"srun started {tasks} processes that do not know of each other. Use jobs/cluster/train.sbatch, or export "
            "in each: RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS, MASTER_ADDR (the first "
            "node) and MASTER_PORT. For one process: srun --ntasks=1."
        )
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    # For one process; restored at the end, because programs that are started later must not meet at this port.
    with nullcontext() if launched else environment(**one, MASTER_PORT=str(free_port())):
        rank, local_rank, size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
        problem = ""
        try:
            chosen = choose_device(device, local_rank=local_rank)
        except UserError as error:
            if size == 1:
                raise
            chosen, problem = torch.device("cpu"), str(error)  # the others would wait for this rank
        keep_fp32(chosen)
        backend, limit = "nccl" if chosen.type == "cuda" else "gloo", timedelta(minutes=timeout_minutes)
        cores = _join(rank, size, chosen, limit, problem=problem)
        failed = True
        try:
            yield World(rank=rank, size=size, local_rank=local_rank, device=chosen, phases=Phases(chosen), cores=cores)
            failed = False
        finally:
            # NCCL would wait here for its peers, which wait in a collective for this rank, and hide its error.
            if dist.is_initialized() and not (failed and backend == "nccl" and size > 1):
                dist.destroy_process_group()


@contextmanager
def environment(**values: str | None) -> Iterator[None]:
    """Inside, these variables have these values, or are not set where that is None."""
    before = dict(os.environ)
    for name in values:
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in values.items() if value is not None})
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update({name: before[name] for name in values if name in before})


def _join(rank: int, size: int, device: torch.device, timeout: timedelta, *, problem: str = "") -> int:
    """Create the process group. Returns this rank's number of cores. Errors as for `start_world`."""
    limit = min(timeout, START_LIMIT)
    try:
        store = _store(rank, size, limit)
        store.set_timeout(timeout)
        on_gpu = device.type == "cuda"
        backend, gpu = ("nccl", torch.cuda.get_device_properties(device)) if on_gpu else ("gloo", None)
        name, number = (gpu.name, str(getattr(gpu, "uuid", ""))) if gpu else ("CPU", "")
        own = RankDevice(rank=rank, backend=backend, device=name, gpu=number, problem=problem)
        cores = exchange_devices(store, own, ranks=size, limit=limit)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("default_pg", store),
            rank=rank,
            world_size=size,
            timeout=timeout,
            # Connects now, so that a broken link shows before the model is built; one rank has no peer.
            device_id=device if on_gpu and size > 1 else None,
        )
    except dist.DistBackendError as error:
        raise LostRank(
            f"{backend} cannot connect rank {rank} on {socket.gethostname()} with the others: {in_a_line(error)}. If "
            "another rank has ended, its own message says why; else look at `neuclip doctor` on this node, and start "
            "again with NCCL_DEBUG=INFO."
        ) from error
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        if too_many_files(error):
            raise UserError(too_many_files_message(error)) from error
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        taken = "EADDRINUSE" in str(error) or "already in use" in str(error)
        why = "is used by another program" if taken else f"cannot be reached from {socket.gethostname()}"
        raise UserError(
            f"The ranks cannot meet at {place}, which {why}: set MASTER_PORT to a free port (torchrun: "
            f"--master-port; deepspeed: --master_port), and MASTER_ADDR to the first node. {in_a_line(error)}"
        ) from error
    return cores


def _store(rank: int, size: int, limit: timedelta) -> Any:
    """A connection to the ranks' store, which torchrun's agent keeps, or rank 0.

    torch's own function waits on rank 0 until all ranks have come, so that nobody could say which one is missing.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return next(dist.rendezvous("env://", rank, size, timeout=limit))[0]
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(*place, size, rank == 0, timeout=limit, wait_for_workers=False, multi_tenant=True)


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


def exchange_devices(store: dist.Store, own: RankDevice, *, ranks: int, limit: timedelta) -> int:
    """Tell the other ranks about this one through their store, and return its number of cores.

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
            absent = sorted({*range(ranks)} - {rank.rank for rank in present})
            if (problem := contradiction(present)) or not absent:
                break
            hosts = sorted(Counter(rank.host for rank in present).items())
            problem = (
                f"{len(present)} of {ranks} ranks have come after {until.total_seconds():.0f} s "
                f"({_shortened([f'{host} with {count}' for host, count in hosts])}); missing: "
                f"{_shortened(list(map(str, absent)))}. Look at the nodes that are not named here: what their ranks "
                "printed says why."
            )
            if until < limit:
                print(f"Waiting for the other ranks. {problem}", file=sys.stderr, flush=True)
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

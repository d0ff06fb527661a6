"""How many CPU cores this process may use, and work for several of them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from itertools import islice
from pathlib import Path
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def usable_cores() -> int:
    """Cores that this process may use: those of its affinity, and no more than its container's CPU quota allows."""
    return max(1, min(len(os.sched_getaffinity(0)), cpu_quota() or 2**20))


def cores_of_rank(own: Sequence[int], *, others: Sequence[Sequence[int]], quota: int | None = None) -> int:
    """The whole cores of a rank with these cores in its affinity, beside `others` on its node.

    A core that is in the affinity of several ranks is divided among them: `torchrun` gives every rank all cores of the
    node, while `srun` with `--cpus-per-task` gives each its own. The node's container may grant all of them together
    only `quota` cores.
    """
    seen = [set(cores) for cores in others]
    share = sum(1 / (1 + sum(core in cores for cores in seen)) for core in own)
    if quota is not None:
        share = min(share, quota / (1 + len(others)))
    return max(1, int(share + 1e-6))


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Cores that the container's CPU quota (cgroup v2 or v1) allows, rounded up; None: no limit."""
    try:
        if (root / "cpu.max").is_file():
            limit, period = (root / "cpu.max").read_text().split()
        else:
            limit, period = ((root / "cpu" / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return None if limit == "max" or int(limit) <= 0 else max(1, -(-int(limit) // int(period)))
    except (OSError, ValueError, ZeroDivisionError):
        return None


def thread_map(
    pool: Executor, function: Callable[[Item], Result], items: Iterable[Item], *, ahead: int
) -> Iterator[Result]:
    """`pool.map`, results in the items' order, that takes items only as results are used, at most `ahead` of them."""
    source = iter(items)
    begun = deque(pool.submit(function, item) for item in islice(source, ahead))
    while begun:
        yield begun.popleft().result()
        begun.extend(pool.submit(function, item) for item in islice(source, 1))

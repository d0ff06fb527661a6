"""Start our programs as a user would, in separate processes, and wait for them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(
    module: str, *arguments: str, ranks: int = 0, timeout: float = 300, check: bool = True
) -> subprocess.CompletedProcess:
    """Run `python -m module arguments`, with torchrun and `ranks` processes if `ranks` is more than 0."""
    done = subprocess.run(
        command(module, *arguments, ranks=ranks),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if check:
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done


def command(module: str, *arguments: str, ranks: int = 0) -> list[str]:
    launcher = [sys.executable]
    if ranks:
        launcher += ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d"]
        launcher += ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    return [*launcher, "-m", module, *arguments]


def environment() -> dict[str, str]:
    """Return this process's environment without the variables of a launcher, with one thread per rank."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return {**kept, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def free_port() -> int:
    """Return a free port on 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

"""How long commands take that compute nothing, and which large packages each imports.

    python -m jobs.bench.startup
    python -m jobs.bench.startup --repeats 5 --every

Each command runs in a new process, first once to fill the caches of files and settings; the fastest of the repeats is
printed, and its CPU time over all its threads and child processes. On a busy machine only the latter means much.
"""

from __future__ import annotations

import argparse
import os
import resource
import shlex
import subprocess
import sys
import time
from statistics import median

from jobs import ROOT

QUICK = ("--help", "settings optimizer", "trian", "train", "train --recipe own optimzer.lr=1", "train --optimizer.lr 1")
SLOWER = ("plan --recipe cc12m", "doctor")
PACKAGES = ("torch", "open_clip", "deepspeed", "transformers", "torchvision", "matplotlib", "datasets", "numpy")
# After the command: what it imported. `os._exit` is how a process with threads of a process group ends.
PROGRAM = """
import os, sys
def report(code=0):
    print("IMPORTED", *sorted(set(sys.modules) & set(sys.argv[1].split(","))), file=sys.stderr, flush=True)
    leave(code)
leave, os._exit = os._exit, report
from jobs.cli import main
try:
    main(sys.argv[2:])
finally:
    sys.stdout.flush()
    report()
"""


def measure(command: str, *, repeats: int) -> tuple[float, float, list[str]]:
    """Fastest seconds, median CPU seconds and imported packages of a `neuclip` command."""
    argv = [sys.executable, "-c", PROGRAM, ",".join(PACKAGES), *shlex.split(command)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    seconds, cpu, imported = [], [], []
    for _ in range(1 + repeats):
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment)
        seconds.append(time.perf_counter() - began)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        lines = [line for line in done.stderr.splitlines() if line.startswith("IMPORTED")]
        if not lines:
            raise SystemExit(f"neuclip {command} did not run:\n{done.stderr}")
        imported = lines[-1].split()[1:]
    return min(seconds[1:]), median(cpu[1:]), imported


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--every", action="store_true", help="also plan and doctor, which need torch")
    args = parser.parse_args(argv)
    print(f"{'neuclip ...':<36}{'seconds':>8}{'CPU s':>8}  imports")
    for command in QUICK + (SLOWER if args.every else ()):
        seconds, cpu, imported = measure(command, repeats=args.repeats)
        print(f"{command:<36}{seconds:>8.2f}{cpu:>8.2f}  {', '.join(imported) or 'none of the large packages'}")


if __name__ == "__main__":
    main()

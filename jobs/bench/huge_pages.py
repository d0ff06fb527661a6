"""AdamW's time with and without transparent huge pages (`THP_MEM_ALLOC_ENABLE=1`), on a CPU.

    python -m jobs.bench.huge_pages
    python -m jobs.bench.huge_pages --tensors 1 --values 3300000 --rounds 6

Every contender and round is a new process, because pages are assigned by chance: the same program may be twice as fast
in one process as in the next. torch asks for huge pages for tensors of 2 MB and more only.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
from statistics import median

from jobs.bench.harness import alternate, parser, place, ratios, show

VARIABLE = "THP_MEM_ALLOC_ENABLE"
PROGRAM = """
import sys, time, torch
tensors, values, steps, threads = map(int, sys.argv[1:])
torch.set_num_threads(threads)
weights = [torch.nn.Parameter(torch.randn(values)) for _ in range(tensors)]
for weight in weights:
    weight.grad = torch.randn(values)
optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=True)
for _ in range(2):
    optimizer.step()
began = time.process_time()
for _ in range(steps):
    optimizer.step()
print((time.process_time() - began) / steps)
"""


def take(value: str, args: argparse.Namespace) -> float:
    """CPU seconds of a step in a process of its own."""
    numbers = (args.tensors, args.values, args.steps, args.threads)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, numbers)],
        env={**os.environ, VARIABLE: value},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def main() -> None:
    import torch

    given = parser(__doc__, rounds=6)
    given.add_argument("--tensors", type=int, default=12, help="tensors of the optimizer")
    given.add_argument("--values", type=int, default=768 * 3072, help="of each: as a matrix of ViT-B's MLPs")
    given.add_argument("--steps", type=int, default=10)
    args = given.parse_args()
    found = alternate({name: functools.partial(take, value, args) for name, value in (("without", "0"), ("with", "1"))},
                      rounds=args.rounds)  # fmt: skip
    rows = {
        name: (1e3 * median(times), 1e3 * min(times), 1e3 * max(times), *ratios(found["without"], times))
        for name, times in found.items()
    }
    columns = {"ms": ".1f", "least": ".1f", "most": ".1f", "without /": ".2f", "lowest": ".2f", "highest": ".2f"}
    what = f"AdamW of {args.tensors} tensors of {args.values:,} values, {place(torch.device('cpu'), args.threads)}"
    show(what, columns, rows, output=args.json)


if __name__ == "__main__":
    main()

"""Peak memory and time of the contrastive loss and its gradients, ours against open_clip's, one process per case.

    python -m jobs.bench.loss_memory                     # B = 8,192 and 32,768, d = 512
    python -m jobs.bench.loss_memory --batch 4096 --objective neuclip

open_clip's `ClipLoss` keeps the [B, B] logits and autograd's copies of them. Ours works in blocks of rows and
recomputes similarities for the gradient. Peak memory is the increase of the process's peak (on a GPU: the device's
peak); time is CPU time (on a GPU: wall time).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
import warnings

import torch
import torch.nn.functional as F


def peak(device: torch.device) -> float:
    """Peak memory so far, in megabytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def one_case(name: str, batch: int, dim: int) -> None:
    """Run one step of one loss and print a line of JSON."""
    from open_clip.loss import ClipLoss

    from pipeline.objectives import build_objective

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(0)
    features = F.normalize(torch.randn(2, batch, dim, generator=generator), dim=2).to(device)
    image, text = (f.requires_grad_() for f in features.unbind(0))
    if name == "open_clip":
        clip_loss, scale = ClipLoss(), torch.tensor(1 / 0.07, device=device)
        call = lambda: clip_loss(image, text, scale)  # noqa: E731
        small = lambda: clip_loss(image[:8], text[:8], scale)  # noqa: E731
    else:
        settings = {"name": name} | ({"prototypes": 4096} if name == "neuclip" else {})
        objective, warm = (
            build_objective(settings, dim=dim, batch_size=size, dataset_size=batch, device=device)
            for size in (batch, 8)
        )
        ids = torch.arange(batch)
        call = lambda: objective.loss(image, text, sample_ids=ids)  # noqa: E731
        small = lambda: warm.loss(image[:8], text[:8], sample_ids=ids[:8])  # noqa: E731
    small().backward()
    before = peak(device)
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    start = clock()
    loss = call()
    loss.backward()
    value = float(loss)  # waits for the device
    print(json.dumps({"megabytes": peak(device) - before, "seconds": clock() - start, "loss": value}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--objective", nargs="+", default=["open_clip", "openclip", "neuclip"])
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.case:
        one_case(arguments.case, arguments.batch[0], arguments.dim)
        return
    for batch in arguments.batch:
        for name in arguments.objective:
            command = [sys.executable, "-m", "jobs.bench.loss_memory", "--case", name]
            done = subprocess.run(
                [*command, "--batch", str(batch), "--dim", str(arguments.dim)], capture_output=True, text=True
            )
            if done.returncode:
                print(f"B = {batch:6d}  {name:10s} ended with {done.returncode}: {done.stderr.strip()[-200:]}")
                continue
            result = json.loads(done.stdout.splitlines()[-1])
            print(
                f"B = {batch:6d}  {name:10s} peak +{result['megabytes']:7.0f} MB  {result['seconds']:7.2f} s  "
                f"loss {result['loss']:.6f}",
                flush=True,
            )


if __name__ == "__main__":
    main()

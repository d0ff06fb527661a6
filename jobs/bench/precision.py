"""Errors of fp32, split-bf16 and bf16 products of features, against float64.

    python -m jobs.bench.precision
    python -m jobs.bench.precision --dim 64 --pairs 4096

Split-bf16 writes a feature as the sum of two bf16 numbers and adds up three of their four products, in fp32: it could
run on tensor cores. bf16 gathered: the anchors' features are fp32, those of the other side were rounded on their way.
The exponents are (s_ij - s_ii) / tau; log g is each anchor's log-normalizer. Products are emulated in fp32 on the CPU,
which multiplies bf16 numbers exactly; no time is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """The two bf16 numbers whose sum stands for x, in fp32."""
    high = x.bfloat16().float()
    return high, (x - high).bfloat16().float()


def split_product(x: Tensor, y: Tensor) -> Tensor:
    """x y^T from three products of bf16 numbers, [B, B]."""
    (x_high, x_low), (y_high, y_low) = halves(x), halves(y)
    return torch.cat([x_high, x_high, x_low], 1) @ torch.cat([y_high, y_low, y_high], 1).T


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "fp32": lambda x, y: x @ y.T,
    "split-bf16": split_product,
    "bf16 gathered": lambda x, y: x @ halves(y)[0].T,
    "bf16": lambda x, y: halves(x)[0] @ halves(y)[0].T,
}


def make_pairs(count: int, dim: int) -> tuple[Tensor, Tensor]:
    """Unit features of pairs whose similarity is about 0.8, fp32, [B, d] each."""
    generator = torch.Generator().manual_seed(0)
    image, noise = torch.randn(2, count, dim, generator=generator, dtype=torch.float64)
    image = F.normalize(image, dim=1)
    return image.float(), F.normalize(image + 0.75 * F.normalize(noise, dim=1), dim=1).float()


def log_normalizers(s: Tensor, tau: float) -> Tensor:
    """log mean_{j != i} exp((s_ij - s_ii) / tau), [B]."""
    h = (s - s.diagonal()[:, None]) / tau
    return h.fill_diagonal_(-torch.inf).logsumexp(1)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--tau", type=float, default=0.01)
    args = parser.parse_args(argv)
    image, text = make_pairs(args.pairs, args.dim)
    exact = image.double() @ text.double().T
    print(f"{args.pairs} pairs, d = {args.dim}, tau = {args.tau}; errors against float64")
    print(f"{'product':<16}{'similarity, rms':>16}{'largest':>10}{'exponent, largest':>20}{'log g, largest':>16}")
    for name, product in PRODUCTS.items():
        found = product(image, text).double()
        error = (found - exact).abs()
        gap = (log_normalizers(found, args.tau) - log_normalizers(exact, args.tau)).abs().max()
        print(f"{name:<16}{float(error.square().mean().sqrt()):>16.1e}{float(error.max()):>10.1e}"
              f"{float(error.max()) / args.tau:>20.1e}{float(gap):>16.1e}")  # fmt: skip


if __name__ == "__main__":
    main()

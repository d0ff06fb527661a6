"""Builds the library of `null_gpu.c`, with which a program takes this machine for one with a GPU."""

import re
import subprocess
from pathlib import Path

import torch
import triton

SOURCE = Path(__file__).with_name("null_gpu.c")
OURS = re.compile(r"(__cuda|cuda|cublas|nccl|cu[A-Z])\w+")


def names(*words, of):
    """The dynamic symbols of some libraries that belong to CUDA, cuBLAS or NCCL."""
    done = subprocess.run(["nm", *words, *map(str, of)], capture_output=True, text=True, check=True)
    last = (line.split()[-1].partition("@")[0] for line in done.stdout.splitlines() if line.split())
    return {name for name in last if OURS.fullmatch(name)}


def null_gpu(folder):
    """Build the library in a folder, and return the environment variables with which a program takes it for a GPU."""
    headers = Path(triton.__file__).with_name("backends") / "nvidia" / "include"
    library, own = folder / "libcuda.so.1", folder / "null_gpu.o"
    subprocess.run(["gcc", "-O1", "-fPIC", f"-I{headers}", "-c", str(SOURCE), "-o", str(own)], check=True)
    needed = names("--dynamic", "--undefined-only", of=Path(torch.__file__).with_name("lib").glob("*.so*"))
    needed |= set(re.findall(r"CUDAAPI (cu\w+)\(", Path(headers, "cuda.h").read_text()))
    others = folder / "others.c"
    stubs = sorted(needed - names("--defined-only", of=[own]))
    others.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in stubs))
    subprocess.run(
        ["gcc", "-shared", "-fPIC", str(own), str(others), "-o", str(library), "-lpthread", "-ldl"], check=True
    )
    return {
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(folder),
        "TRITON_LIBCUDA_PATH": str(folder),
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",  # there is no null cuDNN
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }

"""`neuclip doctor`: check this node before starting a run on it, or say what happened to a run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import click

from pipeline.distributed.processes import without_launcher
from pipeline.errors import UserError, in_a_line
from pipeline.files import existing_folder
from pipeline.planning import DoctorFinding
from pipeline.versions import version_of

EXIT_BROKEN = 1
MARKS = {"good": ("ok", "green"), "note": ("note", "yellow"), "broken": ("BROKEN", "red")}
GIB = 2**30
ROOT = Path(__file__).parents[1]
NEEDED_GIB = 5.0
"""Free space for the checkpoints of a run."""
READ_LIMIT, READ_SECONDS = 256 * 2**20, 10.0


@click.command(name="doctor", epilog="Exit codes: 0 a run can start or continue, 1 something is broken.")
@click.argument("run", required=False, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--output", type=click.Path(path_type=Path), default="runs", show_default=True, help="Folder of the runs."
)
@click.option("--data", "manifests", multiple=True, help="Folder of shards to try reading; may be given several times.")
@click.option("--allow-outside", is_flag=True, help="Read shards that --data's manifest names outside of its folder.")
def command(run: Path | None, output: Path, manifests: tuple[str, ...], **allowed: bool) -> int:
    """Check this node, or say what happened to a RUN.

    Without RUN: check versions, GPUs, a collective, disk, shared memory and compiler, with --data also how fast it is
    read, and report what to fix.

    With the folder of a RUN: say how it ended, which checkpoints are intact, and the command to continue. Nothing is
    changed.
    """
    if run is not None:
        from pipeline.planning.diagnosis import diagnose

        return EXIT_BROKEN if show(diagnose(run)) else 0
    count = show(check_versions())
    count += show([check_compiler(), *check_shared_memory(), check_disk(output)])
    count += show(check_data(manifest, **allowed) for manifest in manifests)
    count += show([check_collectives()])  # before this process allocates GPU memory itself
    count += show(check_gpus())
    click.echo("\nA run can start here." if not count else f"\n{count} broken: fix this before starting a run.")
    return EXIT_BROKEN if count else 0


def show(findings: Iterable[DoctorFinding]) -> int:
    """Print each finding as soon as it is known. Returns the number of those that are broken.

    "broken" means that a run on this node would fail; "note" that it may be slow, or differ from what was tested.
    """
    broken = 0
    for finding in findings:
        mark, colour = MARKS[finding.status]
        click.echo(f"{click.style(f'{mark:<7}', fg=colour)} {finding.subject:<14} {finding.found}")
        if finding.remedy:
            click.echo(f"{'':<22} -> {finding.remedy}")
        broken += finding.status == "broken"
    return broken


def check_versions(constraints: Path = ROOT / "constraints.txt") -> Iterator[DoctorFinding]:
    """Python, and the installed packages that have another version than the tested one."""
    yield DoctorFinding("python", "good", sys.version.split()[0])
    if not constraints.is_file():
        return
    pinned = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;#]+)", constraints.read_text(encoding="utf-8"), flags=re.MULTILINE)
    here = [(name, tested, version_of(name)) for name, tested in pinned]
    other = [f"{name} {found} (tested {tested})" for name, tested, found in here if found not in ("absent", tested)]
    if other:
        shown = ", ".join(other[:6]) + (f" and {len(other) - 6} more" if len(other) > 6 else "")
        text = f"{len(other)} differ from the tested ones: {shown}"
        yield DoctorFinding("versions", "note", text, "pip install -e . -c constraints.txt")
    else:
        yield DoctorFinding("versions", "good", f"equal to those in {constraints.name}")


def check_gpus() -> Iterator[DoctorFinding]:
    """GPUs that torch sees, and whether other processes use them."""
    import torch

    from pipeline.distributed.devices import why_bf16_is_slow
    from pipeline.engine.engine_config import EngineConfig, in_fp32

    advice = f"use engine.deepspeed={in_fp32(EngineConfig())}"
    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists():
            found = f"a driver is installed, but torch {torch.__version__} sees no GPU"
            remedy = "install a torch build for this driver; a container needs --gpus all (Docker) or --nv (Apptainer)"
            yield DoctorFinding("GPUs", "broken", found, remedy)
            return
        yield DoctorFinding("GPUs", "note", "none: training runs on the CPU", "real runs need a GPU")
        if slow := why_bf16_is_slow(torch.device("cpu")):
            yield DoctorFinding("bf16", "note", slow.rstrip("."), advice)
        return
    for index in range(torch.cuda.device_count()):
        gpu = f"GPU {index}"
        try:
            free, total = torch.cuda.mem_get_info(index)
            text = f"{torch.cuda.get_device_name(index)}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
            with torch.cuda.device(index):
                slow = why_bf16_is_slow(torch.device("cuda", index))
        except RuntimeError as error:
            remedy = "see nvidia-smi: another program holds it, or it needs a reset"
            yield DoctorFinding(gpu, "broken", f"it cannot be used: {in_a_line(error)}", remedy)
            continue
        text, remedy = (f"{text}, no bf16", advice) if slow else (text, "other processes hold memory: see nvidia-smi")
        busy = slow or free < 0.9 * total
        yield DoctorFinding(gpu, "note" if busy else "good", text, remedy if busy else "")


def check_collectives() -> DoctorFinding:
    """Let this node's GPUs exchange numbers by NCCL, or without GPUs two processes by gloo."""
    import torch

    backend, device, ranks = "gloo", "cpu", 2
    hint = "check that 127.0.0.1 is reachable and that GLOO_SOCKET_IFNAME names an interface that exists"
    if torch.cuda.is_available():
        backend, device, ranks = "NCCL", "cuda", torch.cuda.device_count()
        hint = "run again with NCCL_DEBUG=INFO; check the driver, NCCL_SOCKET_IFNAME, NCCL_IB_DISABLE and /dev/shm"
    command = [sys.executable, "-m", "pipeline.distributed.collective_check", device, str(ranks)]
    environment = without_launcher(os.environ) | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, cwd=ROOT)
    except subprocess.TimeoutExpired as error:
        return DoctorFinding(backend, "broken", f"{ranks} processes did not connect within {error.timeout} s", hint)
    reported = re.search(r"round trip: (.*)", done.stdout)
    if done.returncode or reported is None:
        said = [line for line in done.stderr.splitlines() if not re.match(r"[EIW]\d{4} ", line)]  # not by the launcher
        return DoctorFinding(backend, "broken", f"{ranks} processes failed: {(said or ['no output'])[-1][:200]}", hint)
    return DoctorFinding(backend, "good", reported[1])


def check_disk(folder: Path) -> DoctorFinding:
    """Free space in the folder of runs, and whether this user may write there."""
    existing = existing_folder(folder)
    free = shutil.disk_usage(existing).free / GIB
    text = f"{free:.1f} GiB free at {existing}"
    if not os.access(existing, os.W_OK):
        return DoctorFinding("disk", "broken", f"{existing} cannot be written", "choose another output")
    if free < NEEDED_GIB:
        remedy = "free some, or choose another output; checkpoint.keep_last limits what a run keeps"
        return DoctorFinding("disk", "broken", f"{text}, {NEEDED_GIB:g} are needed", remedy)
    return DoctorFinding("disk", "good", text)


def check_shared_memory(shm: Path = Path("/dev/shm")) -> Iterator[DoctorFinding]:
    """Shared memory, which NCCL and the workers of loaders and evaluations use."""
    if shm.is_dir():
        usage = shutil.disk_usage(shm)
        free, remedy = usage.free / GIB, "start the container with --shm-size=16g or --ipc=host"
        text = f"{free:.2f} of {usage.total / GIB:.2f} GiB free"
        status: Literal["good", "note", "broken"] = "good" if free >= 2 else "note" if free >= 0.25 else "broken"
        yield DoctorFinding("shared memory", status, text, "" if status == "good" else remedy)


def check_compiler() -> DoctorFinding:
    """ninja and a C++ compiler, which only DeepSpeed's compiled operations and torch.compile need."""
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    ninja = shutil.which("ninja") or (version_of("ninja") != "absent" and "the ninja package")
    missing = [name for name, there in (("a C++ compiler", compiler), ("ninja", ninja)) if not there]
    if missing:
        text = f"{' and '.join(missing)} missing: no model.compile, no DeepSpeed ops"
        return DoctorFinding("compiler", "note", text, "apt-get install g++; pip install ninja")
    return DoctorFinding("compiler", "good", f"{compiler}, {ninja}")


def check_data(manifest: str, **allowed: bool) -> DoctorFinding:
    """Read the first shards of a manifest, or its folder, for a few seconds; `allowed` as for `load_manifest`."""
    from pipeline.data.shards.manifest_format import load_manifest
    from pipeline.data.shards.storage import open_shard

    try:
        loaded = load_manifest(manifest, **allowed)
    except UserError as error:
        return DoctorFinding("data", "broken", str(error), "name the folder of a manifest")
    count, start = 0, time.perf_counter()
    for url in map(loaded.url, loaded.shards):
        if count > READ_LIMIT or time.perf_counter() - start > READ_SECONDS:
            break
        try:
            with open_shard(url) as file:
                while (data := file.read(2**20)) and count <= READ_LIMIT and time.perf_counter() - start < READ_SECONDS:
                    count += len(data)
        except OSError as error:
            text = f"{url} cannot be read: {error}"
            return DoctorFinding("data", "broken", text, "check mounts, credentials and the manifest")
    speed = count / (time.perf_counter() - start)
    rate = f"{speed / 2**20:,.0f} MiB/s, {speed * loaded.n / loaded.bytes:,.0f} samples/s"
    return DoctorFinding("data", "good", f"{loaded.n:,} samples; one reader reaches {rate} (the page cache included)")


if __name__ == "__main__":
    from jobs.cli import run as run_command

    run_command(command, prog_name="jobs.doctor")

"""Check whether this node can train: versions, GPUs, collectives, disk, shared memory, compiler, data.

Every check yields findings and never raises. "broken" means that a run on this node would fail; "note" that it may be
slow, or differ from what was tested.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import sys
import time
import tomllib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from pipeline.errors import UserError, in_a_line
from pipeline.files import existing_folder
from pipeline.versions import version_of

GIB = 2**30
INSTALL = "pip install -e . -c constraints.txt"
PACKAGE, ROOT = "neuclip", Path(__file__).parents[2]
READ_LIMIT, READ_SECONDS = 256 * 2**20, 10.0


@dataclass(frozen=True)
class DoctorFinding:
    """The result of one check; `remedy` says what to do about a "note" or "broken"."""

    subject: str
    status: Literal["good", "note", "broken"]
    found: str
    remedy: str = ""


def check_packages(constraints: Path | None) -> Iterator[DoctorFinding]:
    """Python, this project's requirements (broken if absent or out of range), and the tested versions (notes)."""
    from packaging.requirements import Requirement

    yield DoctorFinding("python", "good", sys.version.split()[0])
    wrong, seen = [], 0
    for text in _requirements():
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        seen += 1
        version = version_of(requirement.name)
        if version == "absent" or not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} (needs {requirement.specifier or 'any'})")
    if wrong:
        yield DoctorFinding("packages", "broken", "; ".join(wrong), INSTALL)
    elif seen:
        yield DoctorFinding("packages", "good", f"all {seen} requirements are met")
    else:
        outcome = f"not compared: {PACKAGE} is not installed, and there is no pyproject.toml at {ROOT}"
        yield DoctorFinding("packages", "note", outcome, INSTALL)
    if constraints is not None:
        yield _against(constraints)


def _requirements() -> list[str]:
    """This package's requirements; where it runs from a folder without being installed, those of pyproject.toml."""
    try:
        return metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        project = ROOT / "pyproject.toml"
        if not project.is_file():
            return []
        return list(tomllib.loads(project.read_text(encoding="utf-8"))["project"].get("dependencies", []))


def _against(constraints: Path) -> DoctorFinding:
    """Compare installed versions with the tested ones; packages that are not installed are ignored."""
    pinned = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;#]+)", constraints.read_text(encoding="utf-8"), flags=re.MULTILINE)
    other = [
        f"{name} {version_of(name)} (tested {tested})"
        for name, tested in pinned
        if version_of(name) not in ("absent", tested)
    ]
    if not other:
        return DoctorFinding("versions", "good", f"equal to those in {constraints.name}")
    shown = ", ".join(other[:6]) + (f" and {len(other) - 6} more" if len(other) > 6 else "")
    return DoctorFinding("versions", "note", f"{len(other)} differ from the tested ones: {shown}", INSTALL)


def check_gpus() -> Iterator[DoctorFinding]:
    """GPUs that torch sees, and whether other processes use them."""
    import torch

    from pipeline.distributed.precision import why_bf16_is_slow

    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists():
            outcome = f"a driver is installed, but torch {torch.__version__} sees no GPU"
            remedy = "install a torch build for this driver; a container needs --gpus all (Docker) or --nv (Apptainer)"
            yield DoctorFinding("GPUs", "broken", outcome, remedy)
            return
        yield DoctorFinding("GPUs", "note", "none: training runs on the CPU", "real runs need a GPU")
        if slow := why_bf16_is_slow(torch.device("cpu")):
            yield DoctorFinding("bf16", "note", slow.rstrip("."), "use engine.deepspeed=zero1_fp32")
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
        if slow:
            yield DoctorFinding(gpu, "note", f"{text}, no bf16", "use engine.deepspeed=zero1_fp32")
        elif free < 0.9 * total:
            yield DoctorFinding(gpu, "note", text, "other processes hold memory: see nvidia-smi")
        else:
            yield DoctorFinding(gpu, "good", text)


def check_disk(folder: Path, *, needed_gib: float) -> Iterator[DoctorFinding]:
    """Free space and write speed at the folder of runs; writes a file, flushes it to disk and removes it."""
    existing = existing_folder(folder)
    free = shutil.disk_usage(existing).free / GIB
    space = f"{free:.1f} GiB free at {existing}"
    if free < needed_gib:
        remedy = "free some, or choose another output; checkpoint.keep_last limits what a run keeps"
        yield DoctorFinding("disk space", "broken", f"{space}, {needed_gib:g} are needed", remedy)
    else:
        yield DoctorFinding("disk space", "good", space)
    try:
        speed = _write_speed(existing, mib=int(min(64, max(1, free * 1024 // 4))))
    except OSError as error:
        outcome = f"{existing} cannot be written: {error.strerror}"
        yield DoctorFinding("disk writing", "broken", outcome, "choose an output folder that this user can write to")
        return
    outcome = f"{speed:.0f} MiB/s at {existing}"
    if speed < 50:
        yield DoctorFinding("disk writing", "note", outcome, "checkpoints will be slow: a local disk helps")
    else:
        yield DoctorFinding("disk writing", "good", outcome)


def _write_speed(folder: Path, *, mib: int) -> float:
    """MiB/s of writing a file of this size to the disk."""
    probe = folder / f".neuclip-doctor-{uuid.uuid4().hex}"
    block = os.urandom(2**20)
    try:
        start = time.perf_counter()
        with probe.open("wb") as file:
            for _ in range(mib):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return mib / (time.perf_counter() - start)
    finally:
        probe.unlink(missing_ok=True)


def check_memory(shm: Path = Path("/dev/shm")) -> Iterator[DoctorFinding]:
    """Shared memory, which NCCL and the workers of evaluations use, and the limit of open files."""
    if shm.is_dir():
        usage = shutil.disk_usage(shm)
        free, remedy = usage.free / GIB, "start the container with --shm-size=16g or --ipc=host"
        text = f"{free:.2f} of {usage.total / GIB:.2f} GiB free"
        status: Literal["good", "note", "broken"] = "good" if free >= 2 else "note" if free >= 0.25 else "broken"
        yield DoctorFinding("shared memory", status, text, "" if status == "good" else remedy)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1024:
        yield DoctorFinding("open files", "note", f"at most {soft}", f"ulimit -n {min(4096, hard)}")
    else:
        yield DoctorFinding("open files", "good", f"at most {soft}")


def check_compiler() -> DoctorFinding:
    """ninja and a C++ compiler, which only DeepSpeed's compiled operations and torch.compile need."""
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    ninja = shutil.which("ninja") or (version_of("ninja") != "absent" and "the ninja package")
    missing = [name for name, there in (("a C++ compiler", compiler), ("ninja", ninja)) if not there]
    if missing:
        outcome = f"{' and '.join(missing)} missing: no model.compile, no DeepSpeed ops"
        return DoctorFinding("compiler", "note", outcome, "apt-get install g++; pip install ninja")
    return DoctorFinding("compiler", "good", f"{compiler}, {ninja}")


def check_data(manifest: str, *, needed: float | None = None, **allowed: bool) -> Iterator[DoctorFinding]:
    """Read the first shards for a few seconds, which tests access and gives an upper bound of samples per second.

    Args:
        manifest: A manifest or its folder.
        needed: Samples per second that the steps of this node's GPUs take.
        allowed: Consents, as for `load_manifest`.
    """
    from pipeline.data.shards.manifest_format import load_manifest
    from pipeline.data.shards.storage import open_shard

    try:
        loaded = load_manifest(manifest, **allowed)
    except UserError as error:
        yield DoctorFinding("data", "broken", str(error), "name the folder of a manifest")
        return
    count, start = 0, time.perf_counter()

    def enough() -> bool:
        return time.perf_counter() - start > READ_SECONDS or count > READ_LIMIT

    for url in map(loaded.url, loaded.shards):
        try:
            with open_shard(url) as file:
                while data := file.read(2**20):
                    count += len(data)
                    if enough():
                        break
        except OSError as error:
            outcome = f"{url} cannot be read: {error}"
            yield DoctorFinding("data", "broken", outcome, "check mounts, credentials and the manifest")
            return
        if enough():
            break
    speed = count / (time.perf_counter() - start)
    per_sample = loaded.bytes / loaded.n
    rate = f"{speed / 2**20:,.0f} MiB/s, {speed / per_sample:,.0f} samples/s"
    outcome = f"{loaded.n:,} samples; one reader reaches {rate} (the page cache included)"
    if needed is not None:
        needed_mib = needed * per_sample / 2**20
        outcome += f"; the recipe's steps take {needed_mib:,.0f} MiB/s, {needed:,.0f} samples/s on this node"
    if needed is not None and speed < needed * per_sample:
        remedy = "workers read in parallel: `neuclip plan --measure` shows if it is enough"
        yield DoctorFinding("data", "note", outcome, remedy)
    else:
        yield DoctorFinding("data", "good", outcome)

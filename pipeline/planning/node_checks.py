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
import tempfile
import time
import tomllib
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


Status = Literal["good", "note", "broken"]


@dataclass(frozen=True)
class DoctorFinding:
    """The result of one check; `remedy` says what to do about a "note" or "broken"."""

    subject: str
    status: Status
    found: str
    remedy: str = ""


def check_packages(constraints: Path | None) -> Iterator[DoctorFinding]:
    """Python, this project's requirements (broken if absent or out of range), and the tested versions (notes)."""
    from packaging.requirements import Requirement

    yield DoctorFinding("python", "good", sys.version.split()[0])
    required = [Requirement(text) for text in _requirements()]
    required = [each for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]
    wrong = []
    for each in required:
        version = version_of(each.name)
        if version == "absent" or not each.specifier.contains(version, prereleases=True):
            wrong.append(f"{each.name} {version} (needs {each.specifier or 'any'})")
    if wrong:
        yield DoctorFinding("packages", "broken", "; ".join(wrong), INSTALL)
    elif required:
        yield DoctorFinding("packages", "good", f"all {len(required)} requirements are met")
    else:
        found = f"not compared: {PACKAGE} is not installed, and there is no pyproject.toml at {ROOT}"
        yield DoctorFinding("packages", "note", found, INSTALL)
    if constraints is None:
        return
    pinned = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;#]+)", constraints.read_text(encoding="utf-8"), flags=re.MULTILINE)
    versions = [(name, version_of(name), tested) for name, tested in pinned]
    other = [f"{name} {version} (tested {tested})" for name, version, tested in versions
             if version not in ("absent", tested)]  # fmt: skip
    if not other:
        yield DoctorFinding("versions", "good", f"equal to those in {constraints.name}")
        return
    shown = ", ".join(other[:6]) + (f" and {len(other) - 6} more" if len(other) > 6 else "")
    yield DoctorFinding("versions", "note", f"{len(other)} differ from the tested ones: {shown}", INSTALL)


def _requirements() -> list[str]:
    """This package's requirements; where it runs from a folder without being installed, those of pyproject.toml."""
    try:
        return metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        project = ROOT / "pyproject.toml"
        if not project.is_file():
            return []
        return list(tomllib.loads(project.read_text(encoding="utf-8"))["project"].get("dependencies", []))


def check_gpus() -> Iterator[DoctorFinding]:
    """GPUs that torch sees, and whether other processes use them."""
    import torch

    from pipeline.distributed.precision import why_bf16_is_slow

    in_fp32 = "use engine.deepspeed=zero1_fp32"
    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists():
            found = f"a driver is installed, but torch {torch.__version__} sees no GPU"
            remedy = "install a torch build for this driver; a container needs --gpus all (Docker) or --nv (Apptainer)"
            yield DoctorFinding("GPUs", "broken", found, remedy)
            return
        yield DoctorFinding("GPUs", "note", "none: training runs on the CPU", "real runs need a GPU")
        if slow := why_bf16_is_slow(torch.device("cpu")):
            yield DoctorFinding("bf16", "note", slow.rstrip("."), in_fp32)
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
            yield DoctorFinding(gpu, "note", f"{text}, no bf16", in_fp32)
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
    mib, block = int(min(64, max(1, free * 1024 // 4))), os.urandom(2**20)
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".neuclip-doctor-") as file:
            start = time.perf_counter()
            for _ in range(mib):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            speed = mib / (time.perf_counter() - start)
    except OSError as error:
        found = f"{existing} cannot be written: {error.strerror}"
        yield DoctorFinding("disk writing", "broken", found, "choose an output folder that this user can write to")
        return
    slow: tuple[Status, str] = ("note", "checkpoints will be slow: a local disk helps") if speed < 50 else ("good", "")
    yield DoctorFinding("disk writing", slow[0], f"{speed:.0f} MiB/s at {existing}", slow[1])


def check_memory(shm: Path = Path("/dev/shm")) -> Iterator[DoctorFinding]:
    """Shared memory, which NCCL and the workers of evaluations use, and the limit of open files."""
    if shm.is_dir():
        usage = shutil.disk_usage(shm)
        free, remedy = usage.free / GIB, "start the container with --shm-size=16g or --ipc=host"
        text = f"{free:.2f} of {usage.total / GIB:.2f} GiB free"
        status: Status = "good" if free >= 2 else "note" if free >= 0.25 else "broken"
        yield DoctorFinding("shared memory", status, text, "" if status == "good" else remedy)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few: tuple[Status, str] = ("note", f"ulimit -n {min(4096, hard)}") if soft < 1024 else ("good", "")
    yield DoctorFinding("open files", few[0], f"at most {soft}", few[1])


def check_compiler() -> DoctorFinding:
    """ninja and a C++ compiler, which only DeepSpeed's compiled operations and torch.compile need."""
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    ninja = shutil.which("ninja") or (version_of("ninja") != "absent" and "the ninja package")
    missing = [name for name, there in (("a C++ compiler", compiler), ("ninja", ninja)) if not there]
    if missing:
        found = f"{' and '.join(missing)} missing: no model.compile, no DeepSpeed ops"
        return DoctorFinding("compiler", "note", found, "apt-get install g++; pip install ninja")
    return DoctorFinding("compiler", "good", f"{compiler}, {ninja}")


def check_data(manifest: str, *, needed: float | None = None, **allowed: bool) -> DoctorFinding:
    """Read the first shards for a few seconds, which tests access and gives an upper bound of samples per second.

    `manifest` is one or its folder, `needed` the samples per second that the steps of this node's GPUs take, and
    `allowed` are consents, as for `load_manifest`.
    """
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
            found = f"{url} cannot be read: {error}"
            return DoctorFinding("data", "broken", found, "check mounts, credentials and the manifest")
    speed, per_sample = count / (time.perf_counter() - start), loaded.bytes / loaded.n
    rate = f"{speed / 2**20:,.0f} MiB/s, {speed / per_sample:,.0f} samples/s"
    found = f"{loaded.n:,} samples; one reader reaches {rate} (the page cache included)"
    if needed is not None:
        needed_mib = needed * per_sample / 2**20
        found += f"; the recipe's steps take {needed_mib:,.0f} MiB/s, {needed:,.0f} samples/s on this node"
        if speed < needed * per_sample:
            remedy = "workers read in parallel: `neuclip plan --measure` shows if it is enough"
            return DoctorFinding("data", "note", found, remedy)
    return DoctorFinding("data", "good", found)

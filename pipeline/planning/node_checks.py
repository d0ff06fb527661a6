"""Check whether this node can train: versions, GPUs, collectives, disk, shared memory, compiler, data.

Every check is a function that returns findings and never raises. "broken" means that a run on this node would fail;
"note" that it may be slow, or differ from what was tested.
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
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from pipeline.errors import UserError, in_a_line

GIB = 2**30
PACKAGE, ROOT = "neuclip", Path(__file__).parents[2]
READ_LIMIT, READ_SECONDS = 256 * 2**20, 10.0


@dataclass(frozen=True)
class DoctorFinding:
    """The result of one check; `remedy` says what to do about a "note" or "broken"."""

    subject: str
    status: Literal["good", "note", "broken"]
    found: str
    remedy: str = ""


def check_packages(constraints: Path | None) -> list[DoctorFinding]:
    """Python, this project's requirements (broken if absent or out of range), and the tested versions (notes)."""
    from packaging.requirements import Requirement

    wrong, seen = [], 0
    for text in _requirements():
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        seen += 1
        version = _version(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version or 'absent'} (needs {requirement.specifier or 'any'})")
    packages = DoctorFinding("packages", "good", f"all {seen} requirements are met")
    if wrong:
        packages = DoctorFinding("packages", "broken", "; ".join(wrong), "pip install -e . -c constraints.txt")
    elif not seen:
        packages = DoctorFinding(
            "packages",
            "note",
            f"not compared: {PACKAGE} is not installed, and there is no pyproject.toml at {ROOT}",
            "pip install -e . -c constraints.txt",
        )
    findings = [DoctorFinding("python", "good", sys.version.split()[0]), packages]
    if constraints is not None:
        findings.append(_against(constraints))
    return findings


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
    installed = {name: (_version(name), version) for name, version in pinned}
    other = [
        f"{name} {have} (tested {tested})" for name, (have, tested) in installed.items() if have not in (None, tested)
    ]
    if not other:
        return DoctorFinding("versions", "good", f"equal to those in {constraints.name}")
    shown = ", ".join(other[:6]) + (f" and {len(other) - 6} more" if len(other) > 6 else "")
    return DoctorFinding(
        "versions", "note", f"{len(other)} differ from the tested ones: {shown}", "pip install -e . -c constraints.txt"
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_gpus() -> list[DoctorFinding]:
    """GPUs that torch sees, and whether other processes use them."""
    import torch

    from pipeline.distributed.precision import why_bf16_is_slow

    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists():
            return [
                DoctorFinding(
                    "GPUs",
                    "broken",
                    f"a driver is installed, but torch {torch.__version__} sees no GPU",
                    "install a torch build for this driver; a container needs --gpus all (Docker) or --nv (Apptainer)",
                )
            ]
        on_cpu = [DoctorFinding("GPUs", "note", "none: training runs on the CPU", "real runs need a GPU")]
        if slow := why_bf16_is_slow(torch.device("cpu")):
            on_cpu.append(DoctorFinding("bf16", "note", slow.rstrip("."), "use engine.deepspeed=zero1_fp32"))
        return on_cpu
    findings = []
    for index in range(torch.cuda.device_count()):
        gpu = f"GPU {index}"
        try:
            free, total = torch.cuda.mem_get_info(index)
            text = f"{torch.cuda.get_device_name(index)}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
            with torch.cuda.device(index):
                slow = why_bf16_is_slow(torch.device("cuda", index))
        except RuntimeError as error:
            why, remedy = in_a_line(error), "see nvidia-smi: another program holds it, or it needs a reset"
            findings.append(DoctorFinding(gpu, "broken", f"it cannot be used: {why}", remedy))
            continue
        if slow:
            findings.append(DoctorFinding(gpu, "note", f"{text}, no bf16", "use engine.deepspeed=zero1_fp32"))
        elif free < 0.9 * total:
            findings.append(DoctorFinding(gpu, "note", text, "other processes hold memory: see nvidia-smi"))
        else:
            findings.append(DoctorFinding(gpu, "good", text))
    return findings


def check_disk(folder: Path, *, needed_gib: float) -> list[DoctorFinding]:
    """Free space and write speed at the folder of runs; writes a file, flushes it to disk and removes it."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free / GIB
    space = DoctorFinding("disk space", "good", f"{free:.1f} GiB free at {existing}")
    if free < needed_gib:
        space = DoctorFinding(
            "disk space",
            "broken",
            f"{free:.1f} GiB free at {existing}, {needed_gib:g} are needed",
            "free some, or choose another output; checkpoint.keep_last limits what a run keeps",
        )
    probe = existing / f".neuclip-doctor-{uuid.uuid4().hex}"
    block = os.urandom(2**20)
    size = int(min(64, max(1, free * 1024 // 4)))
    try:
        start = time.perf_counter()
        with probe.open("wb") as file:
            for _ in range(size):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        speed = size / (time.perf_counter() - start)
    except OSError as error:
        return [
            space,
            DoctorFinding(
                "disk writing",
                "broken",
                f"{existing} cannot be written: {error.strerror}",
                "choose an output folder that this user can write to",
            ),
        ]
    finally:
        probe.unlink(missing_ok=True)
    if speed < 50:
        slow = DoctorFinding(
            "disk writing", "note", f"{speed:.0f} MiB/s at {existing}", "checkpoints will be slow: a local disk helps"
        )
        return [space, slow]
    return [space, DoctorFinding("disk writing", "good", f"{speed:.0f} MiB/s at {existing}")]


def check_memory(shm: Path = Path("/dev/shm")) -> list[DoctorFinding]:
    """Shared memory, through which workers pass on batches, and the limit of open files."""
    findings = []
    if shm.is_dir():
        stat = os.statvfs(shm)
        size, free = stat.f_blocks * stat.f_frsize / GIB, stat.f_bavail * stat.f_frsize / GIB
        text, remedy = f"{free:.2f} of {size:.2f} GiB free", "start the container with --shm-size=16g or --ipc=host"
        status: Literal["good", "note", "broken"] = "good" if free >= 2 else "note" if free >= 0.25 else "broken"
        findings.append(DoctorFinding("shared memory", status, text, "" if status == "good" else remedy))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1024:
        findings.append(DoctorFinding("open files", "note", f"at most {soft}", f"ulimit -n {min(4096, hard)}"))
    else:
        findings.append(DoctorFinding("open files", "good", f"at most {soft}"))
    return findings


def check_compiler() -> DoctorFinding:
    """ninja and a C++ compiler, which only DeepSpeed's compiled operations and torch.compile need."""
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    ninja = shutil.which("ninja") or (_version("ninja") and "the ninja package")
    missing = [name for name, there in (("a C++ compiler", compiler), ("ninja", ninja)) if not there]
    if missing:
        return DoctorFinding(
            "compiler",
            "note",
            f"{' and '.join(missing)} missing: no model.compile, no DeepSpeed ops",
            "apt-get install g++; pip install ninja",
        )
    return DoctorFinding("compiler", "good", f"{compiler}, {ninja}")


def check_data(manifest: str, *, needed: float | None = None, **allowed: bool) -> list[DoctorFinding]:
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
        return [DoctorFinding("data", "broken", str(error), "name the folder of a manifest")]
    count, start = 0, time.perf_counter()
    for shard in loaded.shards:
        url = loaded.url(shard)
        try:
            with open_shard(url) as file:
                while data := file.read(2**20):
                    count += len(data)
                    if time.perf_counter() - start > READ_SECONDS or count > READ_LIMIT:
                        break
        except OSError as error:
            return [
                DoctorFinding(
                    "data", "broken", f"{url} cannot be read: {error}", "check mounts, credentials and the manifest"
                )
            ]
        if time.perf_counter() - start > READ_SECONDS or count > READ_LIMIT:
            break
    speed = count / (time.perf_counter() - start)
    per_sample = loaded.bytes / loaded.n
    rate = f"{speed / 2**20:,.0f} MiB/s, {speed / per_sample:,.0f} samples/s"
    found = f"{loaded.n:,} samples; one reader reaches {rate} (the page cache included)"
    if needed is None:
        return [DoctorFinding("data", "good", found)]
    found += f"; the recipe's steps take {needed * per_sample / 2**20:,.0f} MiB/s, {needed:,.0f} samples/s on this node"
    if speed < needed * per_sample:
        return [
            DoctorFinding(
                "data", "note", found, "workers read in parallel: `neuclip plan --measure` shows if it is enough"
            )
        ]
    return [DoctorFinding("data", "good", found)]

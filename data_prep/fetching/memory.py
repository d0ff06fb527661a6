"""Memory that is left on this machine or in the container of this process."""

from __future__ import annotations

from pathlib import Path

# Share that decoders may use, because other processes also grow.
_SHARE = 0.6
_PLENTY = 1 << 62


def memory_at_hand() -> int:
    """Bytes that all worker processes of this machine together may use for decoding."""
    free = min(_available(Path("/proc/meminfo")), _left_in_group(Path("/sys/fs/cgroup")))
    return int(free * _SHARE)


def _available(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:  # not Linux: no limit
        return _PLENTY
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), _PLENTY)


def _left_in_group(root: Path) -> int:
    """Memory left in the control group (version 2, otherwise 1); the page cache counts as free."""
    names = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
    for limit, usage in names:
        try:
            most, used = (root / limit).read_text().strip(), int((root / usage).read_text())
            cached = _inactive_files(root / limit)
        except (OSError, ValueError):
            continue
        return _PLENTY if most == "max" else max(0, int(most) - used + cached)
    return _PLENTY


def _inactive_files(limit: Path) -> int:
    for line in (limit.parent / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0

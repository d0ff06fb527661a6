"""The commit of this source tree, which results record."""

from __future__ import annotations

import subprocess
from pathlib import Path


def source_commit() -> str:
    """The git commit of this source tree, with `-dirty` if files were changed; "unknown" outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"

"""Import img2dataset without dependencies that are never used here.

Its logger imports wandb, and its tar writer imports webdataset and with it torch: 2.3 s and 640 MB per worker process
instead of 0.8 s and 175 MB. We pass our own writer and monitor, so empty modules replace these two during the import.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stand_ins(*names: str) -> Iterator[None]:
    """Let `import name` succeed with an empty module inside the block; modules that are already loaded are kept."""
    # Albumentations, which img2dataset uses to resize, checks for newer versions online when it is imported.
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
    added = [name for name in names if name not in sys.modules]
    for name in added:
        sys.modules[name] = types.ModuleType(name)
    try:
        yield
    finally:
        for name in added:
            sys.modules.pop(name, None)
